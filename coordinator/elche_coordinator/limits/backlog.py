"""Which streams are read, so that senders wait by gRPC's flow control.

`Backlog`: messages that are not durable yet are held in memory, so streams with many are not read while a disk or
database is slow. `Turns`: many streams of one user's ranks, or of one token's agents, that send without end would
otherwise all be read in each turn of the event loop, and the calls of others, which take several turns, would wait for
all of them each time.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Hashable
from dataclasses import dataclass, field

from google.protobuf.message import Message

from elche_coordinator.limits.budgets import (
    MAX_UNWRITTEN_BYTES,
    MAX_UNWRITTEN_BYTES_OF_STREAM,
    MAX_UNWRITTEN_BYTES_OF_USER,
    MIN_UNWRITTEN_BYTES_OF_STREAM,
    TURN_BYTES,
)

EVENT_BYTES = 512
"""Approximate size of an event without its message."""


class Backlog:
    """Counts the bytes of each stream's messages that are not durable. Used on the event loop only."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, Hashable, Hashable, int]] = deque()
        """(number of the event with which a message becomes durable, its stream, its user, its bytes)."""
        self._of_stream: Counter[Hashable] = Counter()
        self._of_user: Counter[Hashable] = Counter()
        self._num_bytes = 0
        self._has_changed = asyncio.Event()

    def add(self, stream: Hashable, message: Message, number: int, user: Hashable = "") -> bool:
        """Adds a stream's message, which becomes durable with the event of that number. Returns False if the stream
        must not be read until there is `room`. Users without a name have no bound of their own.
        """
        num_bytes = EVENT_BYTES + message.ByteSize()
        self._waiting.append((number, stream, user, num_bytes))
        self._of_stream[stream] += num_bytes
        self._of_user[user] += num_bytes
        self._num_bytes += num_bytes
        return not self._is_much(stream, user)

    async def room(self, stream: Hashable, user: Hashable = "") -> None:
        """Waits until the stream may be read."""
        while self._is_much(stream, user):
            self._has_changed.clear()
            await self._has_changed.wait()

    def settle(self, number: int) -> None:
        """All events up to the number are durable."""
        # In order of their events, whichever stream they are of: the tape becomes durable in this order.
        while self._waiting and self._waiting[0][0] <= number:
            _, stream, user, num_bytes = self._waiting.popleft()
            self._num_bytes -= num_bytes
            for counts, whose in ((self._of_stream, stream), (self._of_user, user)):
                counts[whose] -= num_bytes
                if not counts[whose]:
                    del counts[whose]
        self._has_changed.set()

    def _is_much(self, stream: Hashable, user: Hashable) -> bool:
        """True if the stream has too much, or its user or all together have and the stream more than a little."""
        held = self._of_stream[stream]
        is_much_of_user = bool(user) and self._of_user[user] > MAX_UNWRITTEN_BYTES_OF_USER
        is_much = is_much_of_user or self._num_bytes > MAX_UNWRITTEN_BYTES
        return held > MAX_UNWRITTEN_BYTES_OF_STREAM or (is_much and held > MIN_UNWRITTEN_BYTES_OF_STREAM)


@dataclass(slots=True)
class _Line:
    """The streams of one user that wait."""

    num_bytes: int = 0
    """Bytes that were read and that no turn has paid for yet."""
    waiting: deque[tuple[asyncio.Future[None], int]] = field(default_factory=deque)
    """Messages that wait to be read, with their bytes."""


class Turns:
    """Allows each user `TURN_BYTES` of messages in each turn of the event loop. In an idle loop nobody waits for long,
    since its turns follow each other at once. Used on the event loop only.
    """

    def __init__(self) -> None:
        self._lines: dict[str, _Line] = {}

    async def take(self, user: str, num_bytes: int) -> None:
        """Waits until a message of so many bytes may be read."""
        num_bytes += EVENT_BYTES
        line = self._lines.get(user)
        if line is None:
            line = self._lines[user] = _Line()
            # `call_soon` from here runs after all that is ready now: that is one turn of the loop.
            asyncio.get_running_loop().call_soon(self._next, user, line)
        if line.num_bytes < TURN_BYTES and not line.waiting:
            line.num_bytes += num_bytes
            return
        future = asyncio.get_running_loop().create_future()
        line.waiting.append((future, num_bytes))
        await future

    def _next(self, user: str, line: _Line) -> None:
        """The next turn. A message that was longer than a turn's bytes takes several."""
        line.num_bytes = max(0, line.num_bytes - TURN_BYTES)
        while line.waiting and line.num_bytes < TURN_BYTES:
            future, num_bytes = line.waiting.popleft()
            if not future.done():  # else its stream has ended
                future.set_result(None)
                line.num_bytes += num_bytes
        if line.num_bytes:
            asyncio.get_running_loop().call_soon(self._next, user, line)
        else:
            del self._lines[user]
