"""One catalogue of all jobs: of this run and of earlier ones, with an end only when that is durable."""

import asyncio
import gc
import sys
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType

import pytest

from elche.errors import UnknownJob
from elche.settings import AgreedSettings
from elche_coordinator.archive import catalogue as module
from elche_coordinator.archive.catalogue import JOB_BYTES, RANK_BYTES, JobCatalogue
from elche_coordinator.archive.history import History
from elche_coordinator.core.coordinator import Coordinator
from elche_coordinator.core.messages.events import (
    AgentJoined,
    JobCancelled,
    JobSubmitted,
    LoopAttached,
    LoopLeft,
    ScaleRequested,
)
from elche_coordinator.core.messages.ids import AgentId, JobId
from elche_coordinator.core.messages.spec import JobSpec, Slot
from elche_coordinator.driver import Driver
from elche_coordinator.simulator.simulation import RankModel, Simulation
from elche_coordinator.storage import tape
from elche_coordinator.storage.sql.store import SqlStore
from elche_coordinator.web import payloads
from elche_coordinator.web.recorder import Recorder
from support.effort import lines_run


def started(folder: Path) -> tuple[Driver, JobCatalogue]:
    """As a coordinator starts."""
    store = SqlStore.in_file(folder / "elche.sqlite")
    driver = Driver(Coordinator(), store, recorded=tape.read(store))
    return driver, JobCatalogue(driver, History(store, living=driver.core.job_ids()))


def submit(driver: Driver, name: str, user: str = "ada", text: str = "") -> None:
    source = driver.sources.add(text) if text else ""
    spec = JobSpec(name=name, source_hash=source, file_name="job.py", num_ranks=1, submitted_by=user)
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


def test_of_ended_jobs_those_of_who_takes_most_room_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten thousand were remembered however large: a cancelled loop of 10,000 ranks took 19 MB for good."""

    async def story() -> None:
        driver, jobs = started(tmp_path)
        submit(driver, "small")
        await end(driver, "small")
        driver.stop()
        driver, jobs = started(tmp_path)
        for number in range(4):
            job_id = JobId(f"wide-{number}")
            spec = JobSpec(
                name="wide", source_hash="", file_name="wide", num_ranks=100, is_loop=True, submitted_by="eve"
            )
            ranks = (("host", "cpu"),) * 100
            driver.handle(LoopAttached(job_id=job_id, spec=spec, ranks=ranks, policy="", submitted_at=1.0))
            driver.handle(JobCancelled(job_id=job_id))
            for address in driver.core.addresses(job_id):
                driver.handle(LoopLeft(**address))
            driver._clock_offset_s += 1.0
        await asyncio.wait_for(driver.durable(), 10)
        each = jobs._size_bytes("wide-0")
        assert 100 * RANK_BYTES < each < 200 * RANK_BYTES
        assert JOB_BYTES < jobs._size_bytes("small") < JOB_BYTES + RANK_BYTES
        monkeypatch.setattr(module, "MAX_ENDED_BYTES", 3 * each)
        assert jobs.forget_oldest(10_000) == 2
        assert jobs.job_ids() == ["small", "wide-2", "wide-3"]
        assert jobs.forget_oldest(10_000) == 0
        await asyncio.wait_for(driver.durable(), 10)
        assert driver.writer.row_bytes.keys() == {"wide-2", "wide-3"}
        driver.stop()

    in_loop(story)


@pytest.mark.parametrize("num_ranks", [2, 16])
def test_an_ended_job_takes_the_memory_that_is_counted(num_ranks: int) -> None:
    """A fifth of it was counted: 10,000 small jobs took a gigabyte."""
    settings = AgreedSettings(epochs=1, batch_size=16, dataset_size=500, averaging="overlapped")
    simulation = Simulation(settings=settings, ranks=[RankModel(batch_ms=3)] * num_ranks, check=False, sync_ms=2)
    simulation.run()
    (job,) = simulation.core.jobs.values()
    others = [simulation, simulation.core, *vars(simulation).values(), *vars(simulation.core).values()]
    counted = JOB_BYTES + num_ranks * RANK_BYTES
    assert counted / 2 < memory_of(job, others) < counted


def memory_of(value: object, others: list[object]) -> int:
    """Bytes of all objects that the value refers to, without code and what only others have."""
    seen, left, num_bytes = {id(one) for one in others}, [value], 0
    while left:
        one = left.pop()
        if id(one) not in seen and not isinstance(one, type | ModuleType | FunctionType | BuiltinFunctionType):
            seen.add(id(one))
            num_bytes += sys.getsizeof(one)
            left.extend(gc.get_referents(one))
    return num_bytes


def test_files_of_ended_jobs_have_a_bound_and_each_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ten thousand ended jobs could keep 10 GB of files in the database."""
    monkeypatch.setattr(module, "MAX_ENDED_BYTES", 5 << 20)
    caplog.set_level("INFO")

    async def story() -> None:
        driver, jobs = started(tmp_path)
        submit(driver, "of another", "ada", "a".ljust(1 << 20))
        for number in range(10):
            submit(driver, f"alike-{number}", "ada", "alike".ljust(1 << 20))
        for number in range(6):
            submit(driver, f"own-{number}", "eve", str(number).ljust(1 << 20))
        await end(driver, *jobs.job_ids())
        driver.stop()
        driver, jobs = started(tmp_path)
        assert jobs.forget_oldest(10_000) == 4
        assert "4 jobs are forgotten, of 17 that have ended: 4 since records and files take over 5 MiB" in caplog.text
        assert [one for one in jobs.job_ids() if "own" in one] == ["own-4", "own-5"]
        assert len(jobs.job_ids()) == 13
        assert jobs.forget_oldest(10_000) == 0
        await asyncio.wait_for(driver.durable(), 10)
        assert sorted(driver.sources._sizes.values()) == [1 << 20] * 4
        jobs.manifest_bytes["own-4"] = 1 << 20
        assert jobs.forget_oldest(10_000) == 1
        assert "own-4" not in [*jobs.job_ids(), *jobs.manifest_bytes]
        await asyncio.wait_for(driver.durable(), 10)
        driver.stop()
        assert sum(SqlStore.in_file(tmp_path / "elche.sqlite").source_sizes().values()) == 3 << 20

    in_loop(story)


def test_queued_jobs_are_not_described_again_each_second(tmp_path: Path) -> None:
    """With 10,000 of them a coordinator was busy with nothing else."""

    async def story() -> None:
        driver, jobs = started(tmp_path)
        submit(driver, "first")
        for number in range(100):
            submit(driver, f"job-{number}")
        before = jobs.present_views()
        assert lines_run(jobs.present_views) < 15 * len(before)
        await end(driver, "first")
        first, *others = jobs.present_views()
        assert first.state == "cancelled"
        assert all(one is other for one, other in zip(others, before[1:], strict=True))
        driver.stop()

    in_loop(story)


def test_ended_jobs_are_not_described_again_each_second(tmp_path: Path) -> None:
    """As many are kept as `--keep-jobs` says, 10,000."""

    async def story() -> None:
        driver, jobs = started(tmp_path)
        recorder = Recorder()
        names = [f"job-{number}" for number in range(100)]
        for name in names:
            submit(driver, name)
            driver.handle(JobCancelled(job_id=JobId(name)))
        await driver.durable()
        jobs.artifacts |= dict.fromkeys(names[:50], "in the store")
        before = jobs.present_views()
        recorder.take_views(before)

        def each_second() -> None:
            recorder.take_views(jobs.present_views())

        assert lines_run(each_second) < 30 * len(before)
        assert jobs.known_view("job-99") is before[99]
        assert all(one is other for one, other in zip(before, jobs.present_views(), strict=True))
        jobs.artifacts["job-0"] = "no longer there"
        assert jobs.present_views()[0].artifacts == "no longer there"
        assert jobs.forget_oldest(10) == 90
        assert [view.job_id for view in jobs.present_views()] == names[90:]
        assert len(driver.core._kept_views) == 10
        driver.stop()

    in_loop(story)


def test_a_page_says_why_a_job_waits_now(tmp_path: Path) -> None:
    async def story() -> None:
        driver, jobs = started(tmp_path)
        for name in ("a", "b"):
            submit(driver, name)
        joined = AgentJoined(agent_id=AgentId("host"), host="host", slots=(Slot(device="cpu"),))
        shown = jobs.present_views()
        assert [view.reason for view in shown] == ["waits for 1 free slot: no host offers any; start more workers"] * 2
        driver.handle(joined)
        views = jobs.present_views()
        assert views[1] is shown[1], "nothing has happened to it"
        page = payloads.jobs(views, payloads.ListQuery(), lambda view: jobs.known_view(view.job_id))
        assert page["items"][0]["reason"] == "waits for 1 free slot: 0 of 1 slots are free"
        driver.stop()

    in_loop(story)


def test_to_forget_old_jobs_describes_none_that_have_not_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        driver, jobs = started(tmp_path)
        for name in ("a", "b", "c"):
            submit(driver, name)
        await end(driver, "b")
        described: list[str] = []
        view = driver.core.view
        monkeypatch.setattr(
            driver.core, "view", lambda job_id, now_s: (described.append(job_id), view(job_id, now_s))[1]
        )
        assert jobs.forget_oldest(0) == 1
        assert described == ["b"]
        driver.stop()

    in_loop(story)


def test_records_of_jobs_that_the_core_has_are_not_read_again(tmp_path: Path) -> None:
    """Of 10,000 queued jobs, each was looked for among all of them: a restart took five seconds longer."""

    class Living(list[str]):
        def __contains__(self, name: object) -> bool:
            raise AssertionError("a look at all")

    async def story() -> None:
        driver, _ = started(tmp_path)
        for name in ("a", "b"):
            submit(driver, name)
        await driver.durable()
        driver.stop()
        store = SqlStore.in_file(tmp_path / "elche.sqlite")
        few = lines_run(lambda: History(store, living=Living(["b"])))
        none = lines_run(lambda: History(store, living=Living(["a", "b"])))
        assert History(store, living=["b"]).unfinished[0].job_id == "a"
        assert none < few - 20, "nor is it decoded"

    in_loop(story)


def test_a_job_waits_for_the_host_with_its_checkpoint_under_a_coordinator_of_another_version_too(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        driver, _ = started(tmp_path)
        submit(driver, "a")
        job = driver.core.jobs[JobId("a")]
        found = replace(job.spec, resume="/checkpoints", resume_version=9)
        job.spec = replace(found, resume_host="gpu-1", resume_work_folder="its disk")
        driver.handle(ScaleRequested(job_id=job.id, num_ranks=2))
        await driver.durable()
        driver.stop()
        (again,) = History(SqlStore.in_file(tmp_path / "elche.sqlite")).unfinished
        assert again.spec == job.spec

    in_loop(story)
