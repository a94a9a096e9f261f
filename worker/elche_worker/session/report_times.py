"""Times of a rank's progress reports, which are rarer in a job of many ranks."""

EVERY_S = 0.05
"""Least time in seconds between two progress reports."""
PER_RANK_S = 0.001
"""Interval in seconds per rank of the job, so that all ranks together send at most a thousand a second, unless
`MAX_BATCHES` take less time than that interval."""
MAX_BATCHES = 4
"""Batches after which a report is due in any case: one silent for 20 batches may count as hung (P20)."""


class ReportTimes:
    """The times of one rank's progress reports, in seconds of any clock."""

    def __init__(self) -> None:
        self._every_s = EVERY_S
        self._reported_s = 0.0
        self._reported_step = 0

    def learn(self, num_ranks: int) -> None:
        """Adapts to the job's number of ranks."""
        self._every_s = max(EVERY_S, PER_RANK_S * num_ranks)

    def is_due(self, now_s: float, local_step: int) -> bool:
        """True if a rank that trains should report its step."""
        num_batches = local_step - self._reported_step
        return self.is_allowed(now_s) and (now_s - self._reported_s >= self._every_s or num_batches >= MAX_BATCHES)

    def is_allowed(self, now_s: float) -> bool:
        """True if a report that others may wait for can be sent now."""
        return now_s >= self.allowed_s

    @property
    def allowed_s(self) -> float:
        """Time from which a report that others may wait for can be sent."""
        return self._reported_s + EVERY_S

    def note(self, now_s: float, local_step: int) -> None:
        """Records that the step was reported."""
        self._reported_s, self._reported_step = now_s, local_step
