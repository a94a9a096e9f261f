"""A bounded queue between the driver and one stream."""

import asyncio
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

Item = TypeVar("Item")

MAX_WAITING = 10_000
"""Messages that may wait in the queue of one connection."""


class SendQueue(Generic[Item]):
    """The messages to be sent on one stream, in order. A receiver that falls too far behind is disconnected."""

    def __init__(self, limit: int) -> None:
        self._queue: asyncio.Queue[Item | None] = asyncio.Queue()
        self._limit = limit
        self.is_closed = False

    def put(self, item: Item) -> None:
        """Adds an item; closes the queue when it is full. Does nothing when it is closed."""
        if self.is_closed:
            return
        if self._queue.qsize() >= self._limit:
            self.close()
        else:
            self._queue.put_nowait(item)

    def close(self) -> None:
        """Ends the stream after the items that are in the queue."""
        if not self.is_closed:
            self.is_closed = True
            self._queue.put_nowait(None)

    async def get(self) -> Item | None:
        """The next item; None when the queue is closed and empty."""
        return await self._queue.get()

    async def __aiter__(self) -> AsyncIterator[Item]:
        while (item := await self._queue.get()) is not None:
            yield item
