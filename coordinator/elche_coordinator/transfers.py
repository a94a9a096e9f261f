"""Files on their way from an agent's host to a client, through this process and never in it as a whole."""

import asyncio
import secrets
from collections.abc import AsyncIterator

from elche.errors import ElcheError, InvalidJob

DEPTH = 8
"""Chunks that wait for the client; the agent waits meanwhile."""
BEGIN_S = 30.0
"""How long an agent may take until it delivers."""


class Transfers:
    """Meets the agent that delivers a file and the client that waits for it."""

    def __init__(self) -> None:
        self._open: dict[str, asyncio.Queue[bytes | ElcheError | None]] = {}

    def begin(self) -> str:
        """A name for a transfer that nobody can guess."""
        name = secrets.token_urlsafe(16)
        self._open[name] = asyncio.Queue(DEPTH)
        return name

    def drop(self, name: str) -> None:
        """Nobody will deliver."""
        self._open.pop(name, None)

    async def chunks(self, name: str) -> AsyncIterator[bytes]:
        """What the agent delivers, in order. Raises `ElcheError` when it cannot, or says nothing for too long."""
        waiting = self._open[name]
        try:
            while True:
                try:
                    item = await asyncio.wait_for(waiting.get(), BEGIN_S)
                except TimeoutError:
                    raise InvalidJob(f"the host has said nothing for {BEGIN_S:.0f} s") from None
                if item is None:
                    return
                if isinstance(item, ElcheError):
                    raise item
                yield item
        finally:
            del self._open[name]
            while not waiting.empty():  # an agent that waits for room goes on, and hears that nobody is here
                waiting.get_nowait()

    async def deliver(self, name: str, item: bytes | ElcheError | None) -> None:
        """One more chunk, why there is none, or None at the end. Raises `InvalidJob` when nobody waits any more."""
        waiting = self._open.get(name)
        if waiting is None:
            raise InvalidJob("nobody waits for this file any more")
        await waiting.put(item)
