"""Simulates a slower device by sleeping after each batch or step."""

import time
from collections import deque
from statistics import median_low

MOST = 10
"""A batch or step counts as at most so many times the usual time: one that takes longer has compiled, or prepared."""
NUM_LATEST = 20


class Slowdown:
    """Makes batches or steps take `factor` times as long, except the first one, which may compile and allocate."""

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._latest_s: deque[float] = deque(maxlen=NUM_LATEST)

    @property
    def is_on(self) -> bool:
        """True if there is anything to simulate."""
        return self._factor > 1

    def sleep(self, took_s: float) -> None:
        """Called when a batch or step has ended that took `took_s` on this device."""
        if self._latest_s:
            # The median: an epoch's last batch may be of a single sample.
            usual_s = median_low(self._latest_s)
            time.sleep(min(took_s, MOST * usual_s) * (self._factor - 1))
        self._latest_s.append(took_s)
