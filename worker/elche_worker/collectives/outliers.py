"""Finds steps of a rank that are far longer than its steps before: a device that computes wrong, or a broken batch.

After EDiT's anomaly elimination (Cheng et al., arXiv 2412.07210), which compares the norm of a worker's pseudo-gradient
with its earlier ones. Here rounds differ in their numbers of batches. What all ranks do is not left out
(`elche.contributions`).
"""

import math

MOST = 5.0
"""How many times longer than usual a step may be."""
NUM_KNOWN = 10
"""Rounds after which it is known what is usual."""
_WEIGHT = 0.1
"""Of the newest round in what is usual."""


class StepWatch:
    """What is usual for one rank: moving averages of the norm of its steps, and of their number of batches."""

    def __init__(self) -> None:
        self._num_rounds, self._usual_norm, self._usual_batches = 0, 0.0, 0.0
        self._last_step = 0
        """The rank's batches in the last result."""
        self._norm, self._local_step = math.nan, 0
        """Of the round under way: the norm of the step from the last result, and the rank's batches at its end."""

    @property
    def _num_batches(self) -> int:
        return self._local_step - self._last_step

    def is_usual(self, norm: float, local_step: int) -> bool:
        """Whether the step that a round begins with is at most `MOST` times as long as expected; NaN: its norm is not
        known. In the first `NUM_KNOWN` rounds every step is.

        A step grows at most in proportion to its batches; one of fewer batches than usual may be as long as usual.
        """
        self._norm, self._local_step = norm, local_step
        if self._num_rounds < NUM_KNOWN or self._num_batches <= 0 or math.isnan(norm):
            return True
        return norm <= MOST * self._usual_norm * max(1.0, self._num_batches / self._usual_batches)

    def learn(self, *, is_averaged: bool) -> None:
        """The round has a result. A step that is in it is usual from now on, however long: all have made such steps."""
        if is_averaged and self._num_batches > 0 and math.isfinite(self._norm):
            weight = max(_WEIGHT, 1 / (self._num_rounds + 1))
            self._usual_norm += weight * (self._norm - self._usual_norm)
            self._usual_batches += weight * (self._num_batches - self._usual_batches)
            self._num_rounds += 1
        self._last_step = self._local_step
