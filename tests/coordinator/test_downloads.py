"""Links to downloads: each works once, and nobody has them all."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from elche.errors import TooMuch
from elche_coordinator.web import downloads as module
from elche_coordinator.web.downloads import Download, Downloads


def test_a_caller_has_so_many_links_and_others_have_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 links of one user kept everybody from downloading, for as long as he went on."""
    monkeypatch.setattr(module, "MAX_LINKS_OF_CALLER", 2)
    monkeypatch.setattr(module, "LINK_S", 0.0)

    async def nothing() -> AsyncIterator[bytes]:
        return
        yield b""

    async def story() -> None:
        downloads = Downloads()

        def link(caller: str) -> str:
            return downloads.link(Download("a file", nothing(), b""), caller).rpartition("/")[2]

        first, _ = link("eve"), link("eve")
        with pytest.raises(TooMuch, match="you have 3 downloads that have not been started at once, and 2"):
            link("eve")
        of_bob = link("bob")
        assert downloads.take(first) is not None
        assert downloads.take(first) is None
        link("eve")
        ended = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.0, ended.set_result, None)
        await ended  # and the links before it
        assert downloads.take(of_bob) is None
        assert link("eve") != link("eve")

    asyncio.run(asyncio.wait_for(story(), 20))
