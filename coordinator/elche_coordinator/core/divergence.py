"""The divergence guard: average more often when the ranks' parameters drift apart (SPEC C8)."""

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

HISTORY = 5
RISING = 3


class Drift(StrEnum):
    """What the last rounds' divergences ask for."""

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
        """Takes in one round's divergences, one of each rank."""
        if self.threshold <= 0 or not divergences:
            return Drift.CALM
        self._history.append(max(divergences))
        if len(self._history) == HISTORY and min(self._history) > self.threshold:
            self._history.clear()
            return Drift.LASTING
        newest = list(self._history)[-RISING:]
        rises = len(newest) == RISING and newest[0] < newest[1] < newest[2]
        return Drift.RISING if rises and newest[-1] > self.threshold else Drift.CALM
