"""Histograms for Prometheus."""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import inf

PERSIST_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
"""Bounds of the times in which the coordinator writes to its disk or database."""
BATCH_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Bounds of ranks' batch times."""


@dataclass(slots=True)
class Histogram:
    """Numbers of values by bounds, and their sum."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    """Number of values in each bucket; the last one has those above all bounds."""
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def copy(self) -> "Histogram":
        """A copy."""
        return replace(self, counts=self.counts.copy())

    def extend(self, values: Iterable[float]) -> None:
        """Adds values; ignores those that are not positive numbers."""
        for value in values:
            if 0 < value < inf:
                self.counts[bisect_left(self.bounds, value)] += 1
                self.sum += value

    def cumulative(self) -> list[tuple[float, int]]:
        """(bound, number of values up to it), the last for all values."""
        total, rows = 0, []
        for bound, count in zip((*self.bounds, inf), self.counts, strict=True):
            total += count
            rows.append((bound, total))
        return rows
