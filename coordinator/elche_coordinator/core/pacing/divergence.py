"""The divergence guard: average more often when the ranks' parameters drift apart (row C8).

Early in training, parameters move far in every round, and the guard may halve the anchor: on the digits example the
anchor stays at 5 for about a third of the run. Threshold and rule are those of the original (docs/reference.md).
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf, isfinite

HISTORY = 5
"""Rounds in a row above the threshold that halve the anchor."""
RISING = 3
"""Rounds in a row of rising divergence, the last one above the threshold, that keep the anchor from growing."""


class Drift(StrEnum):
    """The change of the anchor that the last rounds' divergences call for."""

    CALM = "calm"
    RISING = "rising"
    """The anchor must not grow."""
    LASTING = "lasting"
    """The anchor is to be halved."""


@dataclass(slots=True)
class DivergenceGuard:
    """Watches the largest relative weight distance of each round. A threshold of 0 switches it off."""

    threshold: float = 0.05
    _history: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))

    def judge(self, divergences: list[float]) -> Drift:
        """Takes in one round's divergences, one of each rank. One that is not finite exceeds every threshold."""
        if self.threshold <= 0 or not divergences:
            return Drift.CALM
        self._history.append(max(one if isfinite(one) else inf for one in divergences))
        if len(self._history) == HISTORY and min(self._history) > self.threshold:
            # Otherwise the same rounds would halve the anchor again with the next one.
            self._history.clear()
            return Drift.LASTING
        newest = list(self._history)[-RISING:]
        rises = len(newest) == RISING and newest[0] < newest[1] < newest[2]
        return Drift.RISING if rises and newest[-1] > self.threshold else Drift.CALM

    def to_json(self) -> list[float | None]:
        """The last rounds' divergences, as plain values; None for one that was not finite."""
        return [one if isfinite(one) else None for one in self._history]

    def restore(self, history: Iterable[float | None]) -> None:
        """Restores the rounds that `to_json` returned. Raises `TypeError`, `ValueError` or `OverflowError` for a value
        that is not a number.
        """
        self._history = deque((inf if one is None else float(one) for one in history), maxlen=HISTORY)
