"""Transfers of files from an agent's host to a client, chunk by chunk through this process."""

import asyncio
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass

from elche.errors import ElcheError, HostAway, InvalidJob

DEPTH = 1
"""Chunks that may wait for the client, besides the one that has come last; with more, the agent waits. There may be a
thousand readers of logs, and each may take nothing."""
GONE = "the receiver of this file has gone"
BEGIN_S = 30.0
"""Seconds in which an agent must deliver the next chunk."""


class TooLong(ElcheError):
    """An agent has sent more than was requested."""


@dataclass(slots=True)
class Rest:
    """What is sent of a file of which the receiver may have the beginning."""

    has_bytes: int = 0
    """Bytes that the receiver has of the file whose checksum is `of_sha256`."""
    of_sha256: str = ""
    offset: int = 0
    """Where the data begin that come."""
    sha256: str = ""
    """SHA-256 of the whole file that comes, in hex; empty until, and unless, its sender says it."""
    is_announced: bool = False
    """True once the sender has said what comes."""

    def begins(self, sha256: str, offset: int | None = None) -> None:
        """Notes what comes: from `offset` on, by default from the first byte that the receiver lacks of this file."""
        if offset is None:
            offset = self.has_bytes if sha256 == self.of_sha256 else 0
        self.offset, self.sha256, self.is_announced = offset, sha256, True


class Transfer:
    """One file: chunks, or an error instead of them, then None at the end."""

    def __init__(self, rest: Rest) -> None:
        self.rest = rest
        self.queue: asyncio.Queue[bytes | ElcheError | None] = asyncio.Queue(DEPTH)
        self.left = asyncio.Event()
        """Set when the client has disconnected."""
        self.is_lost = False
        """True once the agent has gone before the end of the file."""


class Transfers:
    """Connects the agent that delivers a file to the client that waits for it."""

    def __init__(self) -> None:
        self._open: dict[str, Transfer] = {}

    def begin(self, rest: Rest | None = None) -> str:
        """Begins a transfer; returns its name, which cannot be guessed. `rest` learns where the data begin."""
        name = secrets.token_urlsafe(16)
        self._open[name] = Transfer(rest or Rest())
        return name

    def announce(self, name: str, sha256: str, offset: int) -> None:
        """Notes the checksum of the file whose data follow, "" of a log, and where in it they begin."""
        if name in self._open:
            self._open[name].rest.begins(sha256, offset)

    def drop(self, name: str) -> None:
        """Ends a transfer. Further chunks of its agent are refused."""
        transfer = self._open.pop(name, None)
        if transfer is not None:
            transfer.left.set()

    async def chunks(self, name: str) -> AsyncGenerator[bytes, None]:
        """Yields the file's chunks in order. Raises `ElcheError` when the agent cannot deliver or is silent for 30 s.

        Close the generator if it is not read to its end: the agent waits until then.
        """
        transfer = self._open[name]
        waiting = transfer.queue
        try:
            while True:
                if transfer.is_lost and waiting.empty():
                    raise HostAway("the host has gone while it sent this file")
                try:
                    # Not `wait_for`, which loses a cancellation that comes as it ends (Python 3.11): the reader would
                    # go on, and block in a queue that nobody reads any more.
                    async with asyncio.timeout(BEGIN_S):
                        item = await waiting.get()
                except TimeoutError:
                    raise HostAway(f"the host has sent nothing for {BEGIN_S:.0f} s") from None
                if item is None:
                    return
                if isinstance(item, ElcheError):
                    raise item
                if item:  # an empty chunk is a sign of life
                    yield item
        finally:
            self.drop(name)

    def lose(self, name: str) -> None:
        """Notes that the agent has gone before the end of the file, if anybody still waits for it."""
        if (transfer := self._open.get(name)) is not None:
            transfer.is_lost = True
            with suppress(asyncio.QueueFull):
                transfer.queue.put_nowait(b"")

    async def whole(self, name: str, max_bytes: int) -> bytes:
        """Returns the file, of at most `max_bytes`. Raises `ElcheError`, `TooLong` when the agent sends more."""
        found = b""
        async with aclosing(self.chunks(name)) as chunks:
            async for chunk in chunks:
                found += chunk
                if len(found) > max_bytes:
                    raise TooLong(f"the host has sent more than the {max_bytes} bytes that it was asked for")
        return found

    async def deliver(self, name: str, item: bytes | ElcheError | None) -> None:
        """Adds a chunk, an error, or None at the end; waits while the queue is full. Raises `InvalidJob` when the
        client has gone.
        """
        transfer = self._open.get(name)
        if transfer is None:
            raise InvalidJob(GONE)
        # Both are waited for: a queue that is full of chunks for a client that has left is never emptied.
        putting = asyncio.ensure_future(transfer.queue.put(item))
        leaving = asyncio.ensure_future(transfer.left.wait())
        try:
            await asyncio.wait({putting, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not putting.done():
                raise InvalidJob(GONE)
        finally:
            putting.cancel()
            leaving.cancel()
