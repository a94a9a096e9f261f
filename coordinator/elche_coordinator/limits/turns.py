"""Turns: how much is read of the streams of one user's ranks, or of one token's agents, in each turn of the event loop.

Many streams that send without end would otherwise all be read in each turn, and the calls of others, which take several
turns, would wait for all of them each time.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field

from elche_coordinator.limits.backlog import EVENT_BYTES
from elche_coordinator.limits.budgets import TURN_BYTES


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
