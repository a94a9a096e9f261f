"""Files on their way through the coordinator, when the one that wants them leaves."""

import asyncio

import pytest

from elche.errors import InvalidJob
from elche_coordinator.transfers import DEPTH, Transfers


def test_an_agent_that_waits_for_room_hears_that_nobody_is_there_any_more() -> None:
    async def scenario() -> None:
        transfers = Transfers()
        name = transfers.begin()
        chunks = transfers.chunks(name)
        await transfers.deliver(name, b"first")
        assert await anext(chunks) == b"first"
        for _ in range(DEPTH):
            await transfers.deliver(name, b"more")
        waiting = asyncio.ensure_future(transfers.deliver(name, b"there is no room for this"))
        await asyncio.sleep(0)
        assert not waiting.done()
        await chunks.aclose()  # type: ignore[attr-defined]
        with pytest.raises(InvalidJob, match="the receiver of this file has gone"):
            await asyncio.wait_for(waiting, 1)
        with pytest.raises(InvalidJob, match="the receiver of this file has gone"):
            await transfers.deliver(name, b"one more")

    asyncio.run(scenario())
