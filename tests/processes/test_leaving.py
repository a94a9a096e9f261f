"""Hosts that are to be left: their ranks commit their work and exit; jobs go on elsewhere, or from a checkpoint."""

import re
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from processes.test_hung_ranks import trains
from processes.test_lost_ranks import EPOCHS, NUM_SAMPLES, Story, begin, succeeds
from worker.test_notices import address, metadata

from elche.errors import InvalidJob
from elche_client import Client
from elche_client.events import Checkpoint, JobState, MembershipReport
from support.real_processes import Agent, Command, Mark, agent, coordinator, eventually

__all__ = ["begin"]

pytestmark = pytest.mark.slow(reason="hosts come and go")

AWAY = r"waits for host \S+, which is not connected: only that host's disk has its newest checkpoint"


class Hosts:
    """A coordinator, and hosts that come and go."""

    def __init__(self, mark: Mark, folder: Path, stack: ExitStack) -> None:
        self.mark, self._folder, self._stack = mark, folder, stack
        self.coordinator = stack.enter_context(coordinator(mark, folder))
        self.client = stack.enter_context(Client(self.coordinator.address, token=""))

    def join(self, name: str, devices: str, *more: str, env: dict[str, str] | None = None) -> Agent:
        (self._folder / name).mkdir(exist_ok=True)
        where = (self.mark, self._folder / name, self.coordinator.address)
        return self._stack.enter_context(agent(*where, *more, devices=devices, env=env))


@pytest.fixture
def hosts(mark: Mark, tmp_path: Path) -> Iterator[Hosts]:
    with ExitStack() as stack:
        yield Hosts(mark, tmp_path, stack)


def test_a_worker_that_can_write_no_more_gets_no_ranks_until_it_can(
    hosts: Hosts, begin: Callable[..., Story], elche: Callable[..., Command], tmp_path: Path
) -> None:
    """Its disk is full, or read-only since a fault: every job that was placed there failed, one after the other."""
    unfit, work = hosts.join("a", "cpu"), tmp_path / "a" / "work"
    shutil.rmtree(work)
    work.write_text("no folder")
    story = begin(client=hosts.client, num_ranks=1)
    why = f"can start none: --work-dir {work} cannot be written (File exists)"
    eventually(
        lambda: why in (view := hosts.client.get(story.job.id)).reason or view.state.has_ended,
        "the job waits for another host, or has failed",
    )
    assert hosts.client.get(story.job.id).state is JobState.QUEUED
    there = hosts.coordinator.address
    assert "can start no ranks: --work-dir" in elche("hosts", "--coordinator", there).out
    assert "cannot be written (File exists): until it can, this host gets no more ranks" in unfit.log.read_text()
    log = hosts.coordinator.log
    assert re.search(r"WARNING agent=\S+ host=\S+ can start no ranks, and gets no more: --work-dir", log.read_text())
    work.unlink()
    trains(story, 0)
    assert hosts.client.hosts()[0].problem == ""
    assert re.search(r"INFO agent=\S+ host=\S+ can start ranks again", log.read_text())


def test_a_worker_that_gets_sigterm_leaves_with_its_work_committed(hosts: Hosts, begin: Callable[..., Story]) -> None:
    hosts.join("a", "cpu,cpu")
    leaving = hosts.join("b", "cpu")
    story = begin(client=hosts.client)
    trains(story, 0, 1, 2)
    leaving.process.send_signal(signal.SIGTERM)
    assert leaving.process.wait(400) == 0
    log = leaving.log.read_text()
    assert "leaves; 1 ranks commit their work" in log
    assert re.search(r"rank=2 incarnation=\d+ exited member=0 code=0", log)
    eventually(lambda: story.of(MembershipReport), "it is told")
    (report,) = story.of(MembershipReport)
    assert re.fullmatch(r"rank 2 has left \S+ \(cpu\), its work committed", report.text)
    trains(story, 0, 1)
    hosts.join("c", "cpu")
    story.await_return(2)
    succeeds(story, survivors=(0, 1))


@pytest.mark.long(
    reason="a notice does what SIGTERM does, which the gate shows; worker/test_notices.py has the notices"
)
def test_a_machine_that_the_cloud_takes_away_leaves(hosts: Hosts, begin: Callable[..., Story]) -> None:
    with metadata() as cloud:
        hosts.join("a", "cpu,cpu")
        leaving = hosts.join("b", "cpu", "--notices", "aws", env={"ELCHE_METADATA": address(cloud)})
        story = begin(client=hosts.client)
        trains(story, 0, 1, 2)
        cloud.is_noticed = True
        assert leaving.process.wait(400) == 0
    assert "the cloud gives notice" in leaving.log.read_text()
    assert "has left" in story.of(MembershipReport)[0].text
    story.hurry()
    succeeds(story, survivors=(0, 1))


@pytest.mark.long(reason="a worker that gets SIGTERM goes the same way")
def test_a_host_is_drained_by_hand(hosts: Hosts, begin: Callable[..., Story], elche: Callable[..., Command]) -> None:
    hosts.join("a", "cpu,cpu")
    hosts.join("b", "cpu")
    story = begin(client=hosts.client)
    trains(story, 0, 1, 2)
    there = hosts.coordinator.address
    with pytest.raises(InvalidJob, match="no host 'nobody' is connected; connected are "):
        hosts.client.drain("nobody")
    done = elche("drain", "agent-2", "--coordinator", there)
    assert (done.code, done.out) == (
        0,
        "agent-2 gets no more ranks; it has 1 rank, which leaves once its work is committed\n",
    )
    eventually(lambda: story.of(MembershipReport), "it has left")
    trains(story, 0, 1)
    assert elche("drain", "agent-2", "--off", "--coordinator", there).out == "agent-2 is offered again\n"
    story.await_return(2)
    succeeds(story, survivors=(0, 1))


def test_the_only_host_with_the_model_is_drained_and_another_gets_it_first(
    hosts: Hosts, begin: Callable[..., Story]
) -> None:
    """The job went back to a checkpoint that only the drained host's disk had, and failed on the other."""
    hosts.join("a", "cpu")
    story = begin(client=hosts.client, num_ranks=1)
    trains(story, 0)
    hosts.join("b", "cpu")
    hosts.client.drain("agent-1")
    eventually(lambda: "rank 0 has left" in str(story.of(MembershipReport)), "it leaves")
    story.hurry()
    succeeds(story, survivors=())
    assert [len(story.pids(rank)) for rank in range(2)] == [1, 1]


@pytest.mark.gate
def test_a_job_waits_for_the_host_whose_disk_has_its_checkpoint(hosts: Hosts, begin: Callable[..., Story]) -> None:
    """On another one it would find none, or an older one."""
    lost = hosts.join("a", "cpu")
    story = begin(client=hosts.client, num_ranks=1, checkpoint_every_epochs=1)
    eventually(lambda: story.of(Checkpoint), "a checkpoint")
    hosts.join("b", "cpu")
    lost.process.kill()
    eventually(lambda: re.fullmatch(AWAY, hosts.client.jobs()[0].reason), "it waits")
    story.hurry()
    hosts.join("a", "cpu")
    result = story.end()
    assert result.state is JobState.SUCCEEDED, result
    assert result.committed_samples == (NUM_SAMPLES,) * EPOCHS


def test_a_job_takes_in_what_comes_and_lets_go_what_is_too_many(
    hosts: Hosts, begin: Callable[..., Story], elche: Callable[..., Command]
) -> None:
    hosts.join("a", "cpu,cpu")
    story = begin(client=hosts.client, num_ranks=4, min_ranks=2, epochs=24)
    trains(story, 0, 1)
    hosts.join("b", "cpu,cpu,cpu")
    trains(story, 0, 1, 2, 3)
    scale = ["scale", story.job.id, "--coordinator", hosts.coordinator.address, "--ranks"]
    done = elche(*scale, "3")
    assert done.out == f"job {story.job.id} is to have 3 ranks: the highest leave once their work is committed\n"
    eventually(lambda: any("rank 3 has left" in one.text for one in story.of(MembershipReport)), "one leaves")
    assert story.job.scale(5) == 3
    eventually(lambda: len(story.pids(4, "batch")) == 1 and len(story.pids(3, "batch")) == 2, "others come")
    refused = elche(*scale, "0")
    assert refused.code == 2
    story.hurry()
    succeeds(story, epochs=24, survivors=(0, 1, 2))
    told = [one.text for one in story.of(MembershipReport)]
    assert all(re.match(r"rank \d (trains (again )?on|has left) ", text) for text in told), told
    with pytest.raises(InvalidJob, match=r"cannot be changed: it has ended$"):
        story.job.scale(2)
