"""Links to downloads: each works once, and nobody has them all."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

import pytest

from elche.errors import HostAway, TooMuch
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


def test_a_caller_is_sent_so_many_models_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """32 that nobody read held 240 MB; three callers could have three times as much."""
    monkeypatch.setattr(module, "MAX_FILE_CALLS_OF_CALLER", 2)

    async def model(chunk: bytes = b"a part") -> AsyncGenerator[bytes]:
        if not chunk:
            raise HostAway("the host has gone")
        yield chunk

    async def story() -> None:
        downloads = Downloads()
        first = await downloads.begin(model(), "a file", "eve")
        open_ones = [first]
        with pytest.raises(HostAway):
            await downloads.begin(model(b""), "a file", "eve")
        open_ones.append(await downloads.begin(model(), "a file", "eve"))
        with pytest.raises(TooMuch, match="you have 3 models that are sent at once, and 2"):
            await downloads.begin(model(), "a file", "eve")
        open_ones.append(await downloads.begin(model(), "a file", "bob"))
        await first.close()
        await first.close()
        await downloads.begin(model(), "a file", "eve")

    asyncio.run(asyncio.wait_for(story(), 20))
