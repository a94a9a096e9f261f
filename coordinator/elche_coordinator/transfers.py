"""Files on their way from an agent's host to a client, through this process and never in it as a whole."""

import asyncio
import secrets
from collections.abc import AsyncGenerator

from elche.errors import ElcheError, InvalidJob

DEPTH = 8
"""Chunks that wait for the client; the agent waits meanwhile."""
GONE = "nobody waits for this file any more"
BEGIN_S = 30.0
"""How long an agent may take until it delivers."""


class Transfer:
    """One file on its way: chunks, why there is none, or None at the end."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[bytes | ElcheError | None] = asyncio.Queue(DEPTH)
        self.left = asyncio.Event()
        """Set when the client has gone."""


class Transfers:
    """Meets the agent that delivers a file and the client that waits for it."""

    def __init__(self) -> None:
        self._open: dict[str, Transfer] = {}

    def begin(self) -> str:
        """A name for a transfer that nobody can guess."""
        name = secrets.token_urlsafe(16)
        self._open[name] = Transfer()
        return name

    def drop(self, name: str) -> None:
        """Nobody will deliver, or nobody waits any more; whoever delivers is told."""
        transfer = self._open.pop(name, None)
        if transfer is not None:
            transfer.left.set()

    async def chunks(self, name: str) -> AsyncGenerator[bytes, None]:
        """What the agent delivers, in order. Raises `ElcheError` when it cannot, or says nothing for too long.

        Close it when it is not read to its end: the agent waits until then.
        """
        waiting = self._open[name].queue
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
                if item:  # an empty one says that somebody is there, not that there is a file
                    yield item
        finally:
            self.drop(name)

    async def deliver(self, name: str, item: bytes | ElcheError | None) -> None:
        """One more chunk, why there is none, or None at the end. Raises `InvalidJob` when nobody waits any more."""
        transfer = self._open.get(name)
        if transfer is None:
            raise InvalidJob(GONE)
        putting = asyncio.ensure_future(transfer.queue.put(item))
        leaving = asyncio.ensure_future(transfer.left.wait())
        try:
            await asyncio.wait({putting, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not putting.done():
                raise InvalidJob(GONE)
        finally:
            putting.cancel()
            leaving.cancel()
