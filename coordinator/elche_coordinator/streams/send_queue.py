"""A bounded queue between the driver and one stream."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Generic, TypeVar

from google.protobuf.message import Message

from elche.errors import TooMuch

Item = TypeVar("Item", bound=Message)

MAX_WAITING = 10_000
"""Messages that may wait in the queue of one connection."""

MAX_WATCHED_BYTES = 16 << 20
"""Most bytes that wait for one watcher of a job."""


class SendQueue(Generic[Item]):
    """The messages to be sent on one stream, in order. A receiver that falls too far behind is disconnected.

    There is one for each rank, so it is made smaller than `asyncio.Queue`: only one task takes from it.
    """

    def __init__(
        self, limit: int, max_bytes: int | None = None, hold: Callable[[int], None] = lambda num_bytes: None
    ) -> None:
        """`limit`: most items; `max_bytes`: most bytes, for receivers that can start over. `hold` counts these bytes
        elsewhere, too, and raises `TooMuch`.
        """
        self._items: deque[Item] = deque()
        self._taker: asyncio.Future[None] | None = None
        """Future of the task that waits for the next item; None while none waits."""
        self._limit = limit
        self._max_bytes = max_bytes
        self._hold = hold
        self._num_bytes = 0
        self.is_closed = False

    def put(self, item: Item) -> None:
        """Adds an item. Closes the queue when it is full; if bytes are bounded, what waits is dropped, too. Does
        nothing when it is closed.
        """
        if self.is_closed:
            return
        num_bytes = self._size_of(item)
        if self._is_counted(num_bytes):
            self._num_bytes += num_bytes
            self._items.append(item)
            self._wake()
        elif self._max_bytes is None:
            self.close()
        else:
            self.drop()

    def _is_counted(self, num_bytes: int) -> bool:
        """Counts the bytes elsewhere, too; False if there is no room for the item, here or there."""
        # Without a bound on bytes each item counts 0, and the sum never exceeds 0.
        if len(self._items) >= self._limit or self._num_bytes + num_bytes > (self._max_bytes or 0):
            return False
        try:
            self._hold(num_bytes)
        except TooMuch:
            return False
        return True

    def drop(self) -> None:
        """Ends the stream, without what is in the queue."""
        self._hold(-self._num_bytes)
        self._num_bytes = 0
        self._items.clear()
        self.close()

    def close(self) -> None:
        """Ends the stream after the items that are in the queue."""
        self.is_closed = True
        self._wake()

    async def get(self) -> Item | None:
        """The next item; None when the queue is closed and empty."""
        while not self._items:
            if self.is_closed:
                return None
            self._taker = asyncio.get_running_loop().create_future()
            await self._taker
        item = self._items.popleft()
        num_bytes = self._size_of(item)
        self._num_bytes -= num_bytes
        self._hold(-num_bytes)
        return item

    async def __aiter__(self) -> AsyncIterator[Item]:
        while (item := await self.get()) is not None:
            yield item

    def _size_of(self, item: Item) -> int:
        return 0 if self._max_bytes is None else item.ByteSize()

    def _wake(self) -> None:
        taker, self._taker = self._taker, None
        # The task that waits may have been cancelled, and its future with it.
        if taker is not None and not taker.done():
            taker.set_result(None)
