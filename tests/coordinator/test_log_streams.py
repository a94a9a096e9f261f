"""How many logs of ranks a caller reads at once, and what waiting for them costs."""

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elche.errors import TooMuch
from elche.token import Role
from elche.v1 import agent_pb2, job_pb2
from elche_coordinator.archive.artifacts import Artifacts
from elche_coordinator.archive.catalogue import JobCatalogue
from elche_coordinator.archive.history import History
from elche_coordinator.core.coordinator import Coordinator
from elche_coordinator.core.describe import JobView
from elche_coordinator.core.messages.events import JobCancelled, JobSubmitted
from elche_coordinator.core.messages.ids import JobId
from elche_coordinator.core.messages.spec import JobSpec
from elche_coordinator.driver import Driver
from elche_coordinator.limits.budgets import Budget
from elche_coordinator.roles import CALLER, Caller
from elche_coordinator.services import log_streams as module
from elche_coordinator.services.job_service import JobServicer
from elche_coordinator.services.log_streams import Looks, stream_logs
from elche_coordinator.services.shared_views import VIEW_EVERY_S
from elche_coordinator.storage.sql.store import SqlStore
from elche_coordinator.streams.transfers import Transfers
from support.views import job_view, rank_view


class Hosts:
    """All that ranks have written is here; none of it is sent until somebody says so."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[str] = asyncio.Queue()

    def ask_for_log(self, job_id: str, rank: Any, how: agent_pb2.SendLog, transfer: str) -> bool:
        self.asked.put_nowait(transfer)
        return True


def looks_at(view: JobView) -> Looks:
    return Looks(newest=lambda: view, recent=lambda: (view, 0), last_change=lambda: 0)


@pytest.mark.parametrize("stamp", [b"", b"2026-01-31T12:00:00Z "], ids=["", "with times"])
def test_a_log_is_read_on_from_its_first_line_that_is_not_whole(stamp: bytes) -> None:
    text = b"one\n\nthree\nfour, which is not wh"
    sent = b"\n".join(stamp + line for line in text.split(b"\n"))
    for num_bytes in (1, 2, 5, 30, 1000):
        position = module._Position(offset=100, num_stamp=len(stamp))
        for begin in range(0, len(sent), num_bytes):
            position.add(sent[begin : begin + num_bytes])
        assert position.offset == 100 + len(b"one\n\nthree\n")


def test_a_caller_reads_so_many_logs_at_once() -> None:
    """560 that followed a job's logs took all files and threads of the worker."""

    async def story() -> None:
        hosts, transfers, budget = Hosts(), Transfers(), Budget("logs of ranks open", 3, 100)
        ranks = tuple(replace(rank_view(number), log_path=f"/logs/{number}") for number in range(2))
        view = replace(job_view(2), ranks=ranks)
        nothing: Any = SimpleNamespace(load_artifacts=dict, manifest_bytes={})
        artifacts = Artifacts("", nothing, nothing, nothing, transfers)

        def follow(caller: str) -> Any:
            CALLER.set(Caller(caller, Role.VIEWER))
            agents: Any = hosts
            request = job_pb2.StreamLogsRequest(follow=True)
            return stream_logs(request, looks_at(view), agents, artifacts, budget)

        first = follow("eve")
        reading = asyncio.create_task(anext(first))
        names = [await hosts.asked.get() for _ in range(2)]
        with pytest.raises(TooMuch, match="you have 4 logs of ranks open at once, and 3 is the limit"):
            await anext(follow("eve"))
        of_bob = asyncio.create_task(anext(follow("bob")))
        await hosts.asked.get()
        of_bob.cancel()
        await transfers.deliver(names[0], b"a line")
        assert (await reading).data == b"a line"
        await first.aclose()
        again = asyncio.create_task(anext(follow("eve")))
        await hosts.asked.get()
        again.cancel()
        await asyncio.wait({again, of_bob})

    asyncio.run(asyncio.wait_for(story(), 60))


def test_a_rank_that_joins_is_read_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """`elche logs -f` ended with the ranks that were there when it began."""
    monkeypatch.setattr(module, "LOOK_S", 0.01)

    async def story() -> None:
        hosts, transfers, budget = Hosts(), Transfers(), Budget("logs of ranks open", 2, 100)
        ranks = [replace(rank_view(number), log_path=f"/logs/{number}") for number in range(3)]
        now, change = replace(job_view(1), ranks=tuple(ranks[:1])), 0
        nothing: Any = SimpleNamespace(load_artifacts=dict, manifest_bytes={})
        artifacts, agents = Artifacts("", nothing, nothing, nothing, transfers), hosts
        CALLER.set(Caller("eve", Role.VIEWER))
        looks = Looks(newest=lambda: now, recent=lambda: (now, change), last_change=lambda: change)
        request = job_pb2.StreamLogsRequest(follow=True)
        parts = stream_logs(request, looks, agents, artifacts, budget)  # type: ignore[arg-type]
        reading = asyncio.ensure_future(anext(parts))
        first = await hosts.asked.get()
        now, change = replace(now, ranks=tuple(ranks)), 1
        joined = await hosts.asked.get()
        part = await reading
        assert (part.rank, part.error[:41]) == (2, "you have 3 logs of ranks open at once, an")
        for name, text in ((joined, b"joins"), (first, b"was there")):
            await transfers.deliver(name, text)
            assert (await anext(parts)).data == text
            await transfers.deliver(name, None)
        now, change = replace(now, state="succeeded"), 2
        assert [part async for part in parts] == []

    asyncio.run(asyncio.wait_for(story(), 60))


def test_few_chunks_are_taken_for_who_reads_none() -> None:
    """90 who followed the log of a job that printed without end, and took nothing: +4,607 MB."""

    async def story() -> None:
        hosts, transfers, num_taken = Hosts(), Transfers(), 0
        view = replace(job_view(2), ranks=tuple(replace(rank_view(number), log_path="/log") for number in range(2)))
        nothing: Any = SimpleNamespace(load_artifacts=dict, manifest_bytes={})
        artifacts, budget = Artifacts("", nothing, nothing, nothing, transfers), Budget("logs", 3, 3)
        agents: Any = hosts

        async def deliver(name: str) -> None:
            nonlocal num_taken
            while True:
                await transfers.deliver(name, b"a line")
                num_taken += 1

        request = job_pb2.StreamLogsRequest(follow=True)
        follow = stream_logs(request, looks_at(view), agents, artifacts, budget)
        reading = asyncio.create_task(anext(follow))
        delivering = [asyncio.create_task(deliver(await hosts.asked.get())) for _ in range(2)]
        assert (await reading).data == b"a line"
        await asyncio.sleep(0.1)
        assert num_taken <= 6
        for one in delivering:
            one.cancel()
        await follow.aclose()

    asyncio.run(asyncio.wait_for(story(), 60))


def test_who_follows_what_has_not_begun_costs_no_view_until_the_job_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of 512 who followed a starting job had it described four times a second."""
    monkeypatch.setattr(module, "POLL_S", 0.01)

    async def story() -> None:
        store = SqlStore.in_file(tmp_path / "elche.sqlite")
        driver = Driver(Coordinator(), store)
        nothing: Any = SimpleNamespace()
        catalogue, made = JobCatalogue(driver, History(store)), list[str]()
        make = catalogue.known_view
        catalogue.known_view = lambda job_id: made.append(job_id) or make(job_id)  # type: ignore[func-returns-value,method-assign]
        servicer = JobServicer(driver, catalogue, nothing, nothing, nothing, nothing, nothing, nothing)
        for name in ("j", "other"):
            spec = JobSpec(name=name, source_hash="", file_name="job.py", num_ranks=1)
            driver.handle(JobSubmitted(job_id=JobId(name), spec=spec, submitted_at=1.0))
        request = job_pb2.StreamLogsRequest(job_id="j", follow=True)
        follows: list[Any] = [servicer.StreamLogs(request, nothing) for _ in range(20)]
        reading = [asyncio.ensure_future(anext(one)) for one in follows]
        await asyncio.sleep(VIEW_EVERY_S)
        driver.handle(JobCancelled(job_id=JobId("other")))
        await asyncio.sleep(VIEW_EVERY_S)
        assert made == ["j"]
        driver.handle(JobCancelled(job_id=JobId("j")))
        ends = await asyncio.gather(*reading, return_exceptions=True)
        assert {str(one) for one in ends} == {"job j has no logs here: its ranks were never started"}
        assert made == ["j"] * 2
        driver.stop()

    asyncio.run(asyncio.wait_for(story(), 60))
