"""Files on their way through the coordinator, when the one that wants them leaves."""

import asyncio

import pytest

from elche.errors import HostAway, InvalidJob
from elche_coordinator.streams.transfers import DEPTH, TooLong, Transfers


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


def test_an_agent_that_sends_more_than_it_was_asked_for_is_not_listened_to() -> None:
    async def scenario() -> None:
        transfers = Transfers()
        name = transfers.begin()
        whole = asyncio.ensure_future(transfers.whole(name, 10))
        await transfers.deliver(name, b"12345")
        await transfers.deliver(name, b"67890")
        await transfers.deliver(name, b"1")
        with pytest.raises(TooLong, match="more than the 10 bytes"):
            await asyncio.wait_for(whole, 1)
        with pytest.raises(InvalidJob, match="the receiver of this file has gone"):
            await transfers.deliver(name, b"one more")
        name = transfers.begin()
        whole = asyncio.ensure_future(transfers.whole(name, 10))
        for one in (b"1234567890", None):
            await transfers.deliver(name, one)
        assert await asyncio.wait_for(whole, 1) == b"1234567890"

    asyncio.run(scenario())


def test_a_reader_that_is_cancelled_as_a_chunk_comes_ends() -> None:
    """Whoever followed a job's logs and left at that moment left a task behind that nothing could end."""

    async def story() -> bool:
        transfers = Transfers()
        name = transfers.begin()

        async def read() -> None:
            async for _ in transfers.chunks(name):
                pass

        reading = asyncio.ensure_future(read())
        await asyncio.sleep(0)
        transfers._open[name].queue.put_nowait(b"chunk")
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait({reading}, timeout=400)
        return reading.cancelled()

    assert asyncio.run(story())


@pytest.mark.parametrize("num_waiting", [1, DEPTH])
def test_who_waits_for_a_file_hears_at_once_that_its_host_has_gone(num_waiting: int) -> None:
    """It waited for 30 s."""

    async def scenario() -> None:
        transfers = Transfers()
        name = transfers.begin()
        for _ in range(num_waiting):
            await transfers.deliver(name, b"data")
        transfers.lose(name)
        chunks = transfers.chunks(name)
        for _ in range(num_waiting):
            assert await anext(chunks) == b"data"
        with pytest.raises(HostAway, match="the host has gone while it sent this file"):
            await asyncio.wait_for(anext(chunks), 1)
        transfers.lose(name)

    asyncio.run(scenario())
