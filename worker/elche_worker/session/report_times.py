"""When a rank reports its progress: often, and in a job of many ranks only as often as it carries news."""

EVERY_S = 0.05
"""Least time between two progress reports."""
PER_RANK_S = 0.001
"""The same for each rank of the job, so that all of them together send no more than a thousand a second."""
MAX_BATCHES = 4
"""Batches that a report tells of at the latest: a rank's silence is judged by 20 of its batches (protocol P20)."""


class ReportTimes:
    """The times of one rank's progress reports, in seconds of any clock."""

    def __init__(self) -> None:
        self._every_s = EVERY_S
        self._reported_s = 0.0
        self._reported_step = 0

    def learn(self, num_ranks: int) -> None:
        """The job has so many ranks now."""
        self._every_s = max(EVERY_S, PER_RANK_S * num_ranks)

    def is_due(self, now_s: float, local_step: int) -> bool:
        """True if a rank that trains is to report its step."""
        num_batches = local_step - self._reported_step
        return self.is_allowed(now_s) and (now_s - self._reported_s >= self._every_s or num_batches >= MAX_BATCHES)

    def is_allowed(self, now_s: float) -> bool:
        """True if a report that others may wait for can be sent."""
        return now_s >= self.allowed_s

    @property
    def allowed_s(self) -> float:
        """From when on such a report can be sent."""
        return self._reported_s + EVERY_S

    def note(self, now_s: float, local_step: int) -> None:
        """The step is reported."""
        self._reported_s, self._reported_step = now_s, local_step
