"""Deadlines in a heap, at most one per key."""

import heapq
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Deadlines(Generic[Key]):
    """A heap of deadlines. Cleared entries are dropped when they reach the top."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Key]] = []
        """(time, number, key), also of deadlines that were cleared or replaced: removing from a heap's middle is slow.
        """
        self._live: dict[Key, int] = {}
        """Number of the deadline of each key that has one; other numbers in the heap are void."""
        self._count = 0
        """Deadlines set so far. The number decides between equal times, so that the order never depends on keys."""

    def set(self, key: Key, at_s: float) -> None:
        """Sets the key's deadline, replacing an earlier one."""
        self._count += 1
        self._live[key] = self._count
        heapq.heappush(self._heap, (at_s, self._count, key))

    def clear(self, key: Key) -> None:
        """Removes the key's deadline."""
        self._live.pop(key, None)

    def next_s(self) -> float | None:
        """The earliest deadline; None when there is none."""
        while self._heap and self._live.get(self._heap[0][2]) != self._heap[0][1]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def take_passed(self, now_s: float) -> Iterator[Key]:
        """Removes the keys whose deadlines have passed, earliest first, each as it is yielded: if a bug ends the loop
        at one, the others still have theirs. Set none meanwhile.
        """
        while (next_s := self.next_s()) is not None and next_s <= now_s:
            key = heapq.heappop(self._heap)[2]
            del self._live[key]
            yield key
