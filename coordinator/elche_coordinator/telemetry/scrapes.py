"""Texts of /metrics, one at a time: one of 12,000 ranks takes a thread seconds, and slows the event loop beside it."""

import asyncio
from collections.abc import Awaitable, Callable


class Scrapes:
    """Makes each text for all scrapes that wait when it is begun, so that nobody gets one from before the request."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._num_begun = 0
        self._num_open = 0
        self._made: dict[str, tuple[int, bytes]] = {}
        """The newest text of each kind, with its number, while a scrape waits."""

    async def text(self, kind: str, make: Callable[[], Awaitable[bytes]]) -> bytes:
        """A text of this kind that was begun after the call; `make` makes one."""
        num_before = self._num_begun
        self._num_open += 1
        try:
            async with self._turn:
                number, text = self._made.get(kind, (0, b""))
                if number <= num_before:
                    self._num_begun += 1
                    number = self._num_begun
                    text = await make()
                    self._made[kind] = number, text
                return text
        finally:
            self._num_open -= 1
            if not self._num_open:
                self._made.clear()
