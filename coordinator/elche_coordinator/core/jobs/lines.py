"""The queue as lines of jobs that are alike for the placing of slots: where the first gets none, none behind it does.

So a look at the queue costs as many steps as there are lines, and not as there are jobs.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from elche_coordinator.core.jobs.placed import PlacedJob
from elche_coordinator.core.jobs.shares import order
from elche_coordinator.core.messages.ids import JobId
from elche_coordinator.core.messages.spec import JobSpec
from elche_coordinator.core.records.machine import JobPhase

Kind = tuple[str, tuple[str, ...], int, int]
"""What the jobs of a line have in common."""
Turn = tuple[float, float, int, PlacedJob]
"""A job's place in its line: by `order`, and by number where that is equal."""


def _kind(spec: JobSpec) -> Kind:
    """All on which it depends if there are slots for a job, but for the job's own state: see `Placing`."""
    return spec.account, spec.needs, spec.least_ranks, spec.group_size


@dataclass(slots=True)
class Line:
    """The queued jobs of one kind, in order."""

    kind: Kind
    turns: list[Turn] = field(default_factory=list)

    def jobs(self) -> Iterator[PlacedJob]:
        """The jobs in order, also while those that were returned leave the line."""
        index = 0
        while index < len(self.turns):
            turn = self.turns[index]
            yield turn[-1]
            index += index < len(self.turns) and self.turns[index] is turn


class Lines:
    """All queued jobs."""

    def __init__(self) -> None:
        self._lines: dict[Kind, Line] = {}
        self._turns: dict[JobId, tuple[Line, Turn]] = {}

    def __iter__(self) -> Iterator[Line]:
        return iter(list(self._lines.values()))

    @property
    def job_ids(self) -> set[JobId]:
        """All queued jobs."""
        return set(self._turns)

    def note(self, job: PlacedJob) -> None:
        """Adds a queued job, moves one that has changed, or removes one that waits no longer."""
        if job.phase is not JobPhase.QUEUED:
            if job.id in self._turns:
                self._remove(job.id)
            return
        kind, turn = _kind(job.spec), (*order(job), job.number, job)
        if (known := self._turns.get(job.id)) is not None:
            if (known[0].kind, known[1]) == (kind, turn):
                return
            self._remove(job.id)
        line = self._lines.setdefault(kind, Line(kind))
        insort(line.turns, turn)
        self._turns[job.id] = line, turn

    def kind_of(self, job: PlacedJob) -> Kind:
        """The kind of a queued job."""
        known = self._turns.get(job.id)
        return _kind(job.spec) if known is None else known[0].kind

    def _remove(self, job_id: JobId) -> None:
        line, turn = self._turns.pop(job_id)
        del line.turns[bisect_left(line.turns, turn)]
        if not line.turns:
            del self._lines[line.kind]
