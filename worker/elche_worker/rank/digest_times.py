"""Chooses the rounds after which a rank sends a digest of the result, for the coordinator to compare."""

import time
from collections.abc import Callable

LEAST_EVERY = 16
"""Fewest rounds between two digests."""
COST_FRACTION = 0.001
"""Largest part of the time that digests may take."""


class DigestTimes:
    """Chooses the rounds whose number is a multiple of `every`.

    `every` is a power of two on each rank, larger where digests cost more. So the rounds that a rank chooses are among
    those of every rank with a smaller `every`, and there are rounds after which all ranks send a digest.
    """

    def __init__(self, *, is_always: bool = False, clock: Callable[[], float] = time.perf_counter) -> None:
        """With `is_always`, a digest is due after every round."""
        self._is_always = is_always
        self._clock = clock
        self.every = LEAST_EVERY
        self._last: tuple[int, float] | None = None
        """Number and time of an earlier round."""

    def digest(self, round_id: int, compute: Callable[[], int]) -> int | None:
        """The digest that `compute` returns; None if none is due after this round."""
        if self._is_always:
            return compute()
        started_s = self._clock()
        if self._last is None:
            self._last = round_id, started_s
        if round_id % self.every:
            return None
        digest = compute()
        self._learn(round_id, started_s, self._clock() - started_s)
        return digest

    def _learn(self, round_id: int, started_s: float, cost_s: float) -> None:
        """Doubles `every` until a digest that costs `cost_s` takes at most `COST_FRACTION` of the time."""
        assert self._last is not None
        num_rounds, lasted_s = round_id - self._last[0], started_s - self._last[1]
        self._last = round_id, started_s
        while num_rounds and lasted_s > 0 and cost_s > COST_FRACTION * lasted_s / num_rounds * self.every:
            self.every *= 2
