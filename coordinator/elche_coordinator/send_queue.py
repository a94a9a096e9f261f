"""A bounded queue between the driver and one stream."""

import asyncio
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

from google.protobuf.message import Message

Item = TypeVar("Item", bound=Message)

MAX_WAITING = 10_000
"""Messages that may wait in the queue of one connection."""


MAX_WATCHED_BYTES = 16 << 20
"""Most bytes that wait for one watcher of a job."""


class SendQueue(Generic[Item]):
    """The messages to be sent on one stream, in order. A receiver that falls too far behind is disconnected."""

    def __init__(self, limit: int, max_bytes: int | None = None) -> None:
        """`limit`: most items; `max_bytes`: most bytes, for receivers that can begin anew."""
        self._queue: asyncio.Queue[tuple[Item, int] | None] = asyncio.Queue()
        self._limit = limit
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self.is_closed = False

    def put(self, item: Item) -> None:
        """Adds an item; closes the queue when it is full. Does nothing when it is closed."""
        if self.is_closed:
            return
        num_bytes = 0 if self._max_bytes is None else item.ByteSize()
        if self._queue.qsize() >= self._limit or self._num_bytes + num_bytes > (self._max_bytes or 0):
            self.close()
        else:
            self._num_bytes += num_bytes
            self._queue.put_nowait((item, num_bytes))

    def close(self) -> None:
        """Ends the stream after the items that are in the queue."""
        if not self.is_closed:
            self.is_closed = True
            self._queue.put_nowait(None)

    async def get(self) -> Item | None:
        """The next item; None when the queue is closed and empty."""
        if (found := await self._queue.get()) is None:
            return None
        item, num_bytes = found
        self._num_bytes -= num_bytes
        return item

    async def __aiter__(self) -> AsyncIterator[Item]:
        while (item := await self.get()) is not None:
            yield item
