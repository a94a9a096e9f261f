"""Finds steps of a rank that are far longer than its earlier ones: of a device that computes wrong, or a broken batch.

After EDiT's anomaly elimination (Cheng et al., arXiv 2412.07210), which compares the norm of a worker's pseudo-gradient
with its earlier ones. Here a step is compared with the longest ones, since norms have long tails, and many batches of a
training may have no gradient at all. A step that is unusual on all ranks is not left out (`elche.contributions`).
"""

import math

MOST = 20.0
"""A usual step is at most this many times as long as the longest recent one."""
NUM_KNOWN = 10
"""Rounds in which every step is usual, since too few are known to compare with."""
FADING = 0.99
"""Factor per round on the longest recent step."""
LEARNING = 2.0
"""Factor on the longest recent step per step that is left out: if steps stay long, as after a change of the learning
rate, they count as usual after a few rounds."""


class StepWatch:
    """One rank's longest steps, with their numbers of batches, by which the next step is judged."""

    def __init__(self) -> None:
        self._num_rounds = 0
        self._longest = self._longest_lately = 0.0
        """Norms of the longest step in any result, and of the longest recent one."""
        self._most_batches = 0.0
        """The most batches of a recent step."""
        self._last_step = 0
        """The rank's local step in the last result."""
        self._norm, self._local_step = math.nan, 0
        """Of the round under way: the norm of the step from the last result, and the rank's local step."""

    @property
    def _num_batches(self) -> int:
        return self._local_step - self._last_step

    def is_usual(self, norm: float, local_step: int) -> bool:
        """True if a round's step is not far longer than earlier ones, or its norm is not known (NaN). Every step is
        usual in the first `NUM_KNOWN` rounds, and until a step has had any length.

        A step may grow in proportion to its batches. One no longer than a step in a result is always usual, even after
        many short steps, such as steps without gradients.
        """
        self._norm, self._local_step = norm, local_step
        if self._num_rounds < NUM_KNOWN or not self._longest or self._num_batches <= 0 or math.isnan(norm):
            return True
        most = max(self._longest, MOST * self._longest_lately)
        return norm <= most * max(1.0, self._num_batches / self._most_batches)

    def learn(self, *, is_averaged: bool) -> None:
        """Records the round's result. A step that was averaged is usual from now on, however long."""
        num_batches, self._last_step = self._num_batches, self._local_step
        if num_batches <= 0 or math.isnan(self._norm):
            return
        if not is_averaged:
            self._longest_lately *= LEARNING
        elif math.isfinite(self._norm):
            self._longest = max(self._norm, self._longest)
            self._longest_lately = max(self._norm, FADING * self._longest_lately)
            self._most_batches = max(num_batches, FADING * self._most_batches)
            self._num_rounds += 1
