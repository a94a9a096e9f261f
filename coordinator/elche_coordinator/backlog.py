"""What has come on streams and is not durable yet: it is held in memory, so who has much of it is read no further.

While a disk or a database is slow or away, gRPC then has them wait with what they want to say, as it does for any
reader that is slow.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Hashable

from google.protobuf.message import Message

from elche_coordinator.budgets import MAX_UNWRITTEN_BYTES, MAX_UNWRITTEN_BYTES_OF_STREAM, MIN_UNWRITTEN_BYTES_OF_STREAM

EVENT_BYTES = 512
"""What an event takes besides its message, about."""


class Backlog:
    """Counts the bytes of each stream's messages that are not durable. Used on the event loop only."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, Hashable, int]] = deque()
        """The number of the event after which a message is durable, its stream, and its bytes."""
        self._of_stream: Counter[Hashable] = Counter()
        self._num_bytes = 0
        self._has_changed = asyncio.Event()

    def add(self, stream: Hashable, message: Message, number: int) -> bool:
        """A stream's message has come, which is durable with the event of that number. False when no more of the stream
        is to be read until there is `room` for it.
        """
        num_bytes = EVENT_BYTES + message.ByteSize()
        self._waiting.append((number, stream, num_bytes))
        self._of_stream[stream] += num_bytes
        self._num_bytes += num_bytes
        return not self._is_much(stream)

    async def room(self, stream: Hashable) -> None:
        """Waits until more of the stream may be read."""
        while self._is_much(stream):
            self._has_changed.clear()
            await self._has_changed.wait()

    def settle(self, number: int) -> None:
        """All events up to the number are durable."""
        while self._waiting and self._waiting[0][0] <= number:
            _, stream, num_bytes = self._waiting.popleft()
            self._num_bytes -= num_bytes
            self._of_stream[stream] -= num_bytes
            if not self._of_stream[stream]:
                del self._of_stream[stream]
        self._has_changed.set()

    def _is_much(self, stream: Hashable) -> bool:
        """Of the stream; or of all, and not very little of the stream: nobody waits for what others have sent."""
        held = self._of_stream[stream]
        is_much_of_all = self._num_bytes > MAX_UNWRITTEN_BYTES and held > MIN_UNWRITTEN_BYTES_OF_STREAM
        return held > MAX_UNWRITTEN_BYTES_OF_STREAM or is_much_of_all
