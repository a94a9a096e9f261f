"""One catalogue of all jobs: of this run and of earlier ones, with an end only when that is durable."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest

from elche.errors import UnknownJob
from elche_coordinator import tape
from elche_coordinator.catalogue import JobCatalogue
from elche_coordinator.core.coordinator import Coordinator
from elche_coordinator.core.messages.events import JobCancelled, JobSubmitted
from elche_coordinator.core.messages.ids import JobId
from elche_coordinator.core.messages.spec import JobSpec
from elche_coordinator.driver import Driver
from elche_coordinator.history import History
from elche_coordinator.sql.store import SqlStore


def started(folder: Path) -> tuple[Driver, JobCatalogue]:
    """As a coordinator starts."""
    store = SqlStore.in_file(folder / "elche.sqlite")
    driver = Driver(Coordinator(), store, recorded=tape.read(store))
    return driver, JobCatalogue(driver, History(store, living=driver.core.job_ids()))


def submit(driver: Driver, name: str) -> None:
    spec = JobSpec(name=name, source_hash="", file_name="job.py", num_ranks=1, submitted_by="ada")
    driver.handle(JobSubmitted(job_id=JobId(name), spec=spec, submitted_at=1.0, key=f"key of {name}"))


async def end(driver: Driver, *names: str) -> None:
    for name in names:
        driver.handle(JobCancelled(job_id=JobId(name)))
        await asyncio.wait_for(driver.durable(), 10)


def in_loop(story: Callable[[], Coroutine[None, None, None]]) -> None:
    asyncio.run(story())


def test_a_job_is_found_in_whichever_run_it_was(tmp_path: Path) -> None:
    async def story() -> None:
        driver, _ = started(tmp_path)
        for name in ("past", "present"):
            submit(driver, name)
        await end(driver, "past")
        driver.stop()
        driver, jobs = started(tmp_path)
        assert jobs.job_ids() == ["past", "present"]
        assert [view.job_id for view in jobs.past_views()] == ["past"]
        assert [view.job_id for view in jobs.present_views()] == ["present"]
        for name, state in (("past", "cancelled"), ("present", "queued")):
            assert jobs.submitted_as(f"key of {name}") == name
            assert jobs.known_view(name).state == state
            spec, details = jobs.spec(name), jobs.details(name)
            assert spec is not None
            assert details is not None
            assert details.spec == spec == jobs.submission(name)
            assert (jobs.result(name) is not None) == jobs.is_past(name) == (name == "past")
        assert jobs.spec("other") is jobs.result("other") is jobs.details("other") is None
        with pytest.raises(UnknownJob):
            jobs.known_view("other")
        driver.stop()

    in_loop(story)


def test_an_end_that_may_be_undone_by_a_crash_is_none(tmp_path: Path) -> None:
    async def story() -> None:
        driver, jobs = started(tmp_path)
        submit(driver, "job")
        await asyncio.wait_for(driver.durable(), 10)
        driver.handle(JobCancelled(job_id=JobId("job")))
        assert jobs.known_view("job").state == "cancelled"
        assert jobs.result("job") is None
        await asyncio.wait_for(driver.durable(), 10)
        assert jobs.result("job") is not None
        driver.stop()

    in_loop(story)


def test_those_that_ended_first_are_forgotten_first(tmp_path: Path) -> None:
    async def story() -> None:
        driver, _ = started(tmp_path)
        for name in ("past", "a", "b", "waits"):
            submit(driver, name)
        await end(driver, "past")
        driver.stop()
        driver, jobs = started(tmp_path)
        await end(driver, "b", "a")
        assert jobs.forget_oldest(4) == 0
        assert jobs.forget_oldest(2) == 1
        assert jobs.job_ids() == ["a", "b", "waits"]
        assert jobs.submitted_as("key of past") is None
        assert jobs.forget_oldest(1) == 1
        assert jobs.job_ids() == ["a", "waits"]
        assert jobs.forget_oldest(0) == 1
        assert jobs.job_ids() == ["waits"]
        driver.stop()
        assert started(tmp_path)[1].job_ids() == ["waits"]

    in_loop(story)
