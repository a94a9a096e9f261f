"""Many who ask for /metrics at once get few texts, and nobody one from before the question."""

import asyncio

import pytest

from elche_coordinator.telemetry.scrapes import Scrapes


def test_who_waits_for_metrics_gets_one_text_together() -> None:
    """30 at once beside 12,000 ranks made 30 texts on 6 threads: a submission took 1.2 s."""

    async def story() -> None:
        scrapes, begun, ends = Scrapes(), 0, asyncio.Event()

        async def make() -> bytes:
            nonlocal begun
            begun += 1
            number = begun
            await ends.wait()
            return b"%d" % number

        first = asyncio.ensure_future(scrapes.text("plain", make))
        await asyncio.sleep(0)
        others = [asyncio.ensure_future(scrapes.text("plain", make)) for _ in range(30)]
        other_kind = asyncio.ensure_future(scrapes.text("open", make))
        await asyncio.sleep(0)
        assert begun == 1, "one at a time"
        ends.set()
        assert await first == b"1"
        assert await asyncio.gather(*others) == [b"2"] * 30, "begun after they had asked"
        assert await other_kind == b"3"
        assert await scrapes.text("plain", make) == b"4"
        assert not scrapes._made, "none is kept"

    asyncio.run(story())


def test_a_text_that_cannot_be_made_keeps_nobody_waiting() -> None:
    async def story() -> None:
        scrapes = Scrapes()

        async def fail() -> bytes:
            raise OSError("the disk is gone")

        async def make() -> bytes:
            return b"made"

        with pytest.raises(OSError, match="gone"):
            await scrapes.text("plain", fail)
        assert await scrapes.text("plain", make) == b"made"

    asyncio.run(story())
