"""Sets of whole numbers as few sorted, disjoint, half-open intervals."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator

Interval = tuple[int, int]
"""(start, end), end excluded."""


class IntervalSet:
    """A set of numbers that costs what its gaps cost, not what its members would."""

    __slots__ = ("_parts",)
    __hash__ = None  # type: ignore[assignment]  # it changes

    def __init__(self, parts: Iterable[Interval] = ()) -> None:
        self._parts: list[Interval] = []
        for start, end in parts:
            self.add(start, end)

    def __iter__(self) -> Iterator[Interval]:
        return iter(self._parts)

    def __bool__(self) -> bool:
        return bool(self._parts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IntervalSet) and self._parts == other._parts

    def __repr__(self) -> str:
        return f"IntervalSet({self._parts})"

    @property
    def size(self) -> int:
        """How many numbers are in it."""
        return sum(end - start for start, end in self._parts)

    def add(self, start: int, end: int) -> None:
        """Adds [start, end). Raises `ValueError` when a number is there already: nothing is counted twice."""
        if start >= end:
            return
        index = bisect_left(self._parts, (start, end))
        before = self._parts[index - 1] if index else None
        after = self._parts[index] if index < len(self._parts) else None
        if (before and before[1] > start) or (after and after[0] < end):
            raise ValueError(f"[{start}, {end}) overlaps {before if before and before[1] > start else after}")
        first, last = index, index
        if before and before[1] == start:
            start, first = before[0], index - 1
        if after and after[0] == end:
            end, last = after[1], index + 1
        self._parts[first:last] = [(start, end)]

    def take(self, size: int) -> list[Interval]:
        """Removes the `size` lowest numbers, or all there are, and returns them as intervals."""
        taken: list[Interval] = []
        while size > 0 and self._parts:
            start, end = self._parts[0]
            stop = min(end, start + size)
            taken.append((start, stop))
            size -= stop - start
            if stop == end:
                del self._parts[0]
            else:
                self._parts[0] = (stop, end)
        return taken
