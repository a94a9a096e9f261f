"""The driver with a real core and a real database, whose disk takes its time."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

import elche_coordinator.driver
from elche.errors import Unreachable
from elche.v1 import agent_pb2, job_pb2
from elche_coordinator import codec
from elche_coordinator.archive.history import History
from elche_coordinator.core.coordinator import Coordinator
from elche_coordinator.core.jobs.placed import PlacedJob
from elche_coordinator.core.messages.commands import Publish, SendEpochMetrics
from elche_coordinator.core.messages.events import DeadlinePassed, JobCancelled, JobSubmitted, LoopAttached
from elche_coordinator.core.messages.ids import JobId
from elche_coordinator.core.messages.reports import EpochReport, EvaluationReport
from elche_coordinator.core.messages.spec import JobSpec
from elche_coordinator.driver import Driver, Visible
from elche_coordinator.services.sessions import AgentQueue, attend, open_session
from elche_coordinator.storage.sql.store import SqlStore
from elche_coordinator.storage.store import JobRow
from elche_coordinator.streams.streams import StartOrder
from support.real_processes import eventually

HELLO = agent_pb2.AgentHello(host="host", slots=[agent_pb2.Slot(device="cpu")] * 4)


class SlowDisk(SqlStore):
    """Writes when it is let."""

    def __init__(self, url: sa.URL) -> None:
        super().__init__(url)
        self.may_write = threading.Semaphore(0)
        self.num_begun = self.num_writes = 0

    def write(self, rows: Sequence[JobRow], **tape: Any) -> None:
        self.num_begun += 1
        self.may_write.acquire()
        super().write(rows, **tape)
        self.num_writes += 1


@asynccontextmanager
async def driving(path: Path) -> AsyncIterator[tuple[Driver, SlowDisk, AgentQueue]]:
    disk = SlowDisk.in_file(path / "elche.sqlite")
    driver = Driver(Coordinator(), disk)
    _, _, queue = attend(driver, HELLO)
    assert (await said(queue)).HasField("welcome")
    try:
        yield driver, disk, queue
    finally:
        disk.may_write.release(100)
        driver.stop()


async def said(queue: AgentQueue) -> agent_pb2.AttendResponse:
    """The next message to the agent."""
    message: Any = await asyncio.wait_for(queue.get(), 10)
    assert message is not None
    return codec.start_rank(message.command, "", "") if isinstance(message, StartOrder) else message


def submitted(name: str, **spec: object) -> JobSubmitted:
    job = JobSpec(name=name, source_hash="", file_name="job.py", num_ranks=1)
    return JobSubmitted(job_id=JobId(name), spec=replace(job, **spec), submitted_at=1.0)  # type: ignore[arg-type]


def in_loop(story: Callable[[], Coroutine[None, None, None]]) -> None:
    asyncio.run(story())


def test_nothing_leaves_before_its_record_is_on_disk(tmp_path: Path) -> None:
    """A rank that was started by a coordinator that then lost the job would train for nobody."""

    async def story() -> None:
        async with driving(tmp_path) as (driver, disk, queue):
            driver.handle(submitted("job"))
            durable = asyncio.ensure_future(driver.durable())
            getting = asyncio.ensure_future(said(queue))
            for _ in range(20):  # whatever is ready to run, runs
                await asyncio.sleep(0)
            assert disk.num_writes == 0
            assert not getting.done(), "the agent was told of a job that is not on disk"
            assert not durable.done(), "the client was told so"
            disk.may_write.release()
            assert (await getting).start_rank.job_id == "job"
            assert disk.num_writes == 1
            await asyncio.wait_for(durable, 10)
            written = History(SqlStore.in_file(tmp_path / "elche.sqlite"))
            assert [one.job_id for one in written.unfinished] == ["job"]

    in_loop(story)


def test_what_waits_for_one_jobs_record_does_not_wait_for_anothers(tmp_path: Path) -> None:
    """Records of one batch are written together; what was submitted later is told later."""

    async def story() -> None:
        async with driving(tmp_path) as (driver, disk, queue):
            driver.handle(submitted("first"))
            await asyncio.to_thread(eventually, lambda: disk.num_begun == 1, "the first is being written")
            driver.handle(submitted("second"))
            disk.may_write.release()
            assert (await said(queue)).start_rank.job_id == "first"
            await asyncio.to_thread(eventually, lambda: disk.num_begun == 2, "the second is being written")
            getting = asyncio.ensure_future(said(queue))
            for _ in range(20):  # whatever is ready to run, runs
                await asyncio.sleep(0)
            assert not getting.done(), "it is told of a job that is not on disk"
            disk.may_write.release()
            assert (await getting).start_rank.job_id == "second"

    in_loop(story)


def test_a_message_that_is_too_large_for_its_rank_fails_the_job_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC ended the rank's stream instead, and each one after it: the job stood still, and memory grew."""
    monkeypatch.setattr(elche_coordinator.driver, "MAX_MESSAGE_BYTES", 3)

    async def story() -> None:
        async with driving(tmp_path) as (driver, disk, _):
            disk.may_write.release(100)
            spec = JobSpec(name="loop", source_hash="", file_name="loop", num_ranks=1, is_loop=True)
            ranks = (("host", "cpu"),)
            driver.handle(LoopAttached(job_id=JobId("loop"), spec=spec, ranks=ranks, policy="", submitted_at=1.0))
            (address,) = driver.core.addresses(JobId("loop"))
            assert open_session(driver, address, 0) is not None
            report = EpochReport(epoch=0, loss=1.0, scalars={}, duration_s=1.0, committed=1, dropped=0, rank_batches=())
            command = SendEpochMetrics(**address, report=report, metrics={})
            assert driver._prepare(command) is None
            await asyncio.wait_for(driver.durable(), 10)
            view = driver.core.view(JobId("loop"), 0.0)
            assert view is not None
            size = codec.rank_response(command).ByteSize()
            assert view.reason == (
                f"a message to rank 0 (SendEpochMetrics) has {size} bytes, and at most 3 can be sent: record fewer "
                "scalars and metrics, with shorter names"
            )

    in_loop(story)


def test_a_command_that_cannot_be_carried_out_fails_its_own_job_and_what_waits_behind_it_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It once left the rest of the queue, and all later jobs of the same write, waiting for good."""

    async def story() -> None:
        async with driving(tmp_path) as (driver, disk, queue):
            watch = driver.watchers.watch("bad")
            driver.handle(submitted("bad", file_name="\ud800"))  # no message can carry that
            driver.handle(submitted("good"))
            disk.may_write.release(100)
            assert (await said(queue)).start_rank.job_id == "good"
            await asyncio.wait_for(driver.durable(), 10)
            assert (await said(queue)).stop_rank.job_id == "bad"
            view = driver.core.view(JobId("bad"), 0.0)
            assert view is not None
            assert view.reason.startswith("StartRank cannot be carried out: ")
            assert watch.is_closed is False

    in_loop(story)
    assert "StartRank cannot be performed" in caplog.text


def test_a_record_that_is_no_json_fails_its_own_job(tmp_path: Path) -> None:
    async def story() -> None:
        async with driving(tmp_path) as (driver, disk, queue):
            driver.handle(submitted("bad", submitted_by={1}, project="p"))
            driver.handle(submitted("good"))
            disk.may_write.release(100)
            started = {(await said(queue)).start_rank.job_id}
            await asyncio.wait_for(driver.durable(), 10)
            assert "good" in started or (await said(queue)).start_rank.job_id == "good"
            view = driver.core.view(JobId("bad"), 0.0)
            assert view is not None
            assert "its record cannot be written" in view.reason

    in_loop(story)


def test_a_report_that_cannot_be_told_does_not_keep_the_others_from_being_told(tmp_path: Path) -> None:
    async def story() -> None:
        async with driving(tmp_path) as (driver, disk, _):
            watch = driver.watchers.watch("job")
            driver.handle(submitted("job"))
            disk.may_write.release(100)
            await asyncio.wait_for(driver.durable(), 10)
            for metrics in ({"\ud800": 1.0}, {"accuracy": 1.0}):
                report = EvaluationReport(epoch=0, metrics=metrics, duration_s=1.0)
                driver._waiting.append((0, Visible(command=Publish(job_id=JobId("job"), report=report))))
            driver._on_written(0)
            told = await asyncio.wait_for(watch.get(), 10)
            assert isinstance(told, job_pb2.WatchJobResponse)
            assert dict(told.evaluation.metrics) == {"accuracy": 1.0}
            driver.handle(JobCancelled(job_id=JobId("job")))

    in_loop(story)


def test_a_bug_at_a_jobs_deadline_fails_that_job_and_leaves_the_others_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event names no job: nobody failed, and neither job was looked at again while its ranks were silent."""

    async def story() -> None:
        async with driving(tmp_path) as (driver, disk, _):
            disk.may_write.release(100)
            for name in ("broken", "sound"):
                driver.handle(submitted(name))
            broken, sound = (driver.core.jobs[JobId(name)] for name in ("broken", "sound"))
            looked_at: list[JobId] = []

            def look(job: PlacedJob, now_s: float) -> None:
                looked_at.append(job.id)
                assert job is not broken, "no such rank"

            monkeypatch.setattr(type(broken), "check_silence", look)
            for job in (broken, sound):
                driver.core._checks.set(job.id, driver.now_s)
            driver.handle(DeadlinePassed())
            await asyncio.to_thread(eventually, lambda: sound.id in looked_at, "the other job's turn has come", 30)
            assert "a bug in the coordinator: DeadlinePassed could not be handled" in broken.reason
            assert sound.is_open

    in_loop(story)


def test_who_has_stopped_decides_nothing_more(tmp_path: Path) -> None:
    """The next coordinator would not know of it: agents, ranks and clients are to try again."""

    async def story() -> None:
        driver = Driver(Coordinator(), SqlStore.in_file(tmp_path / "elche.sqlite"))
        hello = agent_pb2.AgentHello()
        hello.CopyFrom(HELLO)
        hello.identity = "an agent"
        agent_id, stream, queue = attend(driver, hello)
        driver.stop()
        stream.disconnect(queue)
        driver.presence.on_agent_away(agent_id)
        for late in (lambda: attend(driver, hello), lambda: driver.handle(submitted("job"))):
            with pytest.raises(Unreachable, match="stopping"):
                late()
        assert [host.agent_id for host in driver.agents.hosts()] == [agent_id]

    in_loop(story)


def test_the_timer_is_set_when_a_deadline_moves_and_not_with_each_event(tmp_path: Path) -> None:
    """Each report of a thousand ranks cancelled it and set another."""

    async def story() -> None:
        async with driving(tmp_path) as (driver, disk, _):
            disk.may_write.release(100)
            loop, times = asyncio.get_running_loop(), list[float]()
            set_timer = loop.call_at

            def counted(when: float, action: Callable[[], None], *more: Any, **options: Any) -> asyncio.TimerHandle:
                if action == driver._on_deadline:
                    times.append(when)
                return set_timer(when, action, *more, **options)

            loop.call_at = counted  # type: ignore[method-assign,assignment]
            deadlines = iter([5.0, 5.0, 5.0, 4.0, 4.0, None, None, 9.0])
            for deadline_s in deadlines:
                driver.core.next_deadline_s = lambda at_s=deadline_s: at_s  # type: ignore[method-assign,misc]
                driver.handle(submitted(f"job {len(times)} {deadline_s}"))
                assert (driver._timer is None) == (deadline_s is None)
            assert [when + driver._clock_offset_s for when in times] == [5.0, 4.0, 9.0]

    in_loop(story)
