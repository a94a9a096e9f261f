"""Finds steps of a rank that are far longer than its steps before: a device that computes wrong, or a broken batch.

After EDiT's anomaly elimination (Cheng et al., arXiv 2412.07210), which compares the norm of a worker's pseudo-gradient
with its earlier ones. Here a step is compared with the longest ones, since norms have long tails, and many batches of a
training may have no gradient at all. What all ranks do is not left out (`elche.contributions`).
"""

import math

MOST = 20.0
"""How many times longer than the longest one lately a step may be."""
NUM_KNOWN = 10
"""Rounds after which it is known what is usual."""
FADING = 0.99
"""Factor on the longest step lately with each round."""
LEARNING = 2.0
"""Factor on it for each step that is left out: if such steps go on, they are usual some time."""


class StepWatch:
    """What is known of one rank's steps: how long the longest are, and how many batches they have."""

    def __init__(self) -> None:
        self._num_rounds = 0
        self._longest = self._longest_lately = 0.0
        """Norms of the longest step that is in a result, and of the longest one lately."""
        self._most_batches = 0.0
        """Of a step lately."""
        self._last_step = 0
        """The rank's batches in the last result."""
        self._norm, self._local_step = math.nan, 0
        """Of the round under way: the norm of the step from the last result, and the rank's batches at its end."""

    @property
    def _num_batches(self) -> int:
        return self._local_step - self._last_step

    def is_usual(self, norm: float, local_step: int) -> bool:
        """Whether the step that a round begins with is not far longer than those before; NaN: its norm is not known. In
        the first `NUM_KNOWN` rounds every step is usual, and until one has had any length.

        A step grows at most in proportion to its batches. One as long as one that is in a result is always usual, also
        after any time of short steps, as without gradients.
        """
        self._norm, self._local_step = norm, local_step
        if self._num_rounds < NUM_KNOWN or not self._longest or self._num_batches <= 0 or math.isnan(norm):
            return True
        most = max(self._longest, MOST * self._longest_lately)
        return norm <= most * max(1.0, self._num_batches / self._most_batches)

    def learn(self, *, is_averaged: bool) -> None:
        """The round has a result. A step that is in it is usual from now on, however long: all have made such steps."""
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
