"""How many logs of ranks a caller reads at once."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from elche.errors import TooMuch
from elche.token import Role
from elche.v1 import job_pb2
from elche_coordinator.archive.artifacts import Artifacts
from elche_coordinator.limits.budgets import Budget
from elche_coordinator.roles import CALLER, Caller
from elche_coordinator.services.log_streams import stream_logs
from elche_coordinator.streams.transfers import Transfers
from support.views import job_view, rank_view


class Hosts:
    """All that ranks have written is here; none of it is sent until somebody says so."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[str] = asyncio.Queue()

    def ask_for_log(self, job_id: str, rank: Any, transfer: str, max_bytes: int, **how: bool) -> bool:
        self.asked.put_nowait(transfer)
        return True


def test_a_caller_reads_so_many_logs_at_once() -> None:
    """560 that followed a job's logs took all files and threads of the worker."""

    async def story() -> None:
        hosts, transfers, budget = Hosts(), Transfers(), Budget("logs of ranks open", 3, 100)
        ranks = tuple(replace(rank_view(number), log_path=f"/logs/{number}") for number in range(2))
        view = replace(job_view(2), ranks=ranks)
        nothing: Any = SimpleNamespace(load_artifacts=dict)
        artifacts = Artifacts("", nothing, nothing, nothing, transfers)

        def follow(caller: str) -> Any:
            CALLER.set(Caller(caller, Role.VIEWER))
            agents: Any = hosts
            request = job_pb2.StreamLogsRequest(follow=True)
            return stream_logs(request, lambda: view, agents, artifacts, budget)

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
