"""Sets of integers as sorted, disjoint, half-open intervals."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

Interval = tuple[int, int]
"""(start, end), end excluded."""


class IntervalSet:
    """A set of integers, whose memory and time grow with its gaps, not its size."""

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
        """Number of integers in it."""
        return sum(end - start for start, end in self._parts)

    def add(self, start: int, end: int) -> None:
        """Adds [start, end). Raises `ValueError` if any number is in the set already."""
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

    def contains(self, number: int) -> bool:
        """True if the number is in it."""
        return self._end_of(number) is not None

    def has(self, start: int, end: int) -> bool:
        """True if all of [start, end) is in it."""
        return start >= end or ((found := self._end_of(start)) is not None and end <= found)

    def end_of(self, number: int) -> int:
        """End of the interval with the number. Raises `ValueError` if it is not in the set."""
        end = self._end_of(number)
        if end is None:
            raise ValueError(f"{number} is not there")
        return end

    def _end_of(self, number: int) -> int | None:
        index = bisect_right(self._parts, number, key=lambda part: part[0]) - 1
        return self._parts[index][1] if index >= 0 and number < self._parts[index][1] else None

    def remove(self, start: int, end: int) -> None:
        """Removes [start, end). Raises `ValueError` unless the set has all of it."""
        if start >= end:
            return
        index = bisect_right(self._parts, start, key=lambda part: part[0]) - 1
        if index < 0 or self._parts[index][1] < end:
            raise ValueError(
                f"[{start}, {end}) is not all in {self._parts[max(0, index)] if self._parts else 'the set'}"
            )
        first, last = self._parts[index]
        self._parts[index : index + 1] = [part for part in ((first, start), (end, last)) if part[0] < part[1]]

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
