"""Which alerts fire in what happens to each coordinator now and then: series of real ones, the rules as they are."""

import os
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from elche_client import Client, JobHandle
from elche_client.events import JobState
from support.fleets import LINEAR, SLOWLY
from support.real_processes import Coordinator, Mark, agent, coordinator, eventually
from support.scraped import Scraped

pytestmark = [pytest.mark.system, pytest.mark.timeout(1800)]

MADE = "elche_job_made_samples_total"
JOB = LINEAR.read_text() + SLOWLY


@dataclass(slots=True)
class Story:
    """A coordinator that is scraped, a worker and a job."""

    mark: Mark
    folder: Path
    stack: ExitStack
    coordinator: Coordinator
    client: Client
    job: JobHandle
    scraped: Scraped = field(default_factory=Scraped)

    def passes(self, minutes: int) -> None:
        """So many minutes, in each of which the job trains a little."""
        for _ in range(minutes):
            self.scraped.scrape(c=self.coordinator.page_url)
            before = self.scraped.last(MADE)
            eventually(lambda before=before: self.now(MADE) != before, "it trains")

    def now(self, name: str) -> float:
        """A value between two minutes of the story."""
        probe = Scraped()
        probe.scrape(c=self.coordinator.page_url)
        return probe.last(name)

    def idles(self, minutes: int) -> None:
        """So many minutes in which nothing is waited for."""
        for _ in range(minutes):
            self.scraped.scrape(c=self.coordinator.page_url)

    def starts_again(self) -> None:
        """The next coordinator, on the same folder and address."""
        data, listen = self.coordinator.data, self.coordinator.address
        again = self.folder / f"again-{self.scraped.minutes}"
        again.mkdir()
        self.coordinator = self.stack.enter_context(coordinator(self.mark, again, data=data, listen=listen))


@contextmanager
def a_job_that_trains(mark: Mark, folder: Path) -> Iterator[Story]:
    path = folder / "linear.py"
    path.write_text(JOB)
    with ExitStack() as stack:
        one = stack.enter_context(coordinator(mark, folder))
        stack.enter_context(agent(mark, folder, one.address))
        client = stack.enter_context(Client(one.address, reconnect_s=60))
        job = client.submit(path, num_ranks=2, epochs=10_000)
        eventually(lambda: client.get(job.id).num_rounds > 3, "it trains")
        yield Story(mark, folder, stack, one, client, job)
    mark.assert_none_left()


def test_a_coordinator_is_away_for_a_while(mark: Mark, tmp_path: Path) -> None:
    with a_job_that_trains(mark, tmp_path) as story:
        story.passes(5)
        story.coordinator.process.kill()
        story.coordinator.process.wait()
        story.idles(10)
        story.starts_again()
        story.passes(15)
        story.scraped.fires(tmp_path, {"ElcheCoordinatorDown"})


def test_an_upgrade(mark: Mark, tmp_path: Path) -> None:
    """The job goes back to the checkpoint that was made before the coordinator stopped."""
    with a_job_that_trains(mark, tmp_path) as story:
        story.passes(5)
        story.coordinator.process.send_signal(signal.SIGTERM)
        assert story.coordinator.process.wait(400) == 0
        with sqlite3.connect(story.coordinator.data / "elche.sqlite") as database:
            database.execute("UPDATE states SET code = 'other'")
        story.idles(1)
        story.starts_again()
        eventually(lambda: story.client.get(story.job.id).num_rounds > 3, "it trains again")
        story.passes(20)
        assert "jobs that ran go back to their newest checkpoints" in story.coordinator.log.read_text()
        story.scraped.fires(tmp_path, ())


def test_a_job_ends(mark: Mark, tmp_path: Path) -> None:
    with a_job_that_trains(mark, tmp_path) as story:
        story.passes(10)
        story.job.cancel()
        eventually(lambda: story.client.get(story.job.id).state is JobState.CANCELLED, "it ends")
        story.idles(30)
        story.scraped.fires(tmp_path, ())


def test_a_rank_is_killed(mark: Mark, tmp_path: Path) -> None:
    with a_job_that_trains(mark, tmp_path) as story:
        story.passes(5)

        os.kill(min(mark.living("elche rank")), signal.SIGKILL)
        eventually(lambda: story.now("elche_job_lost_ranks_total"), "it is lost")
        story.passes(5)
        story.scraped.fires(tmp_path, {"ElcheRankLost"})
