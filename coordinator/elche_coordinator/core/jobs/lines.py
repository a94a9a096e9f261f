"""The queue, as a line for each kind of jobs that the placing of slots treats alike: if the first job of a line gets no
slots, none behind it does.

So placing takes time that grows with the number of lines, not with the number of jobs.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from elche_coordinator.core.jobs.placed import PlacedJob
from elche_coordinator.core.jobs.shares import order
from elche_coordinator.core.messages.ids import JobId
from elche_coordinator.core.messages.spec import JobSpec
from elche_coordinator.core.records.machine import JobPhase

Kind = tuple[str, tuple[str, ...], bool, int, int, str]
"""Account, conditions, if it is a loop, least number of ranks, group size and the work folder with their checkpoint,
which all jobs of a line share.
"""
Turn = tuple[float, int, PlacedJob]
"""A job's place in its line, by `order`."""


def kind_of(spec: JobSpec) -> Kind:
    """The properties of a submission that decide if there are slots for it (see `Placing`)."""
    of_ranks = spec.conditions, spec.is_loop, spec.least_ranks, spec.group_size
    return spec.account, *of_ranks, spec.resume_work_folder


@dataclass(slots=True)
class Line:
    """The queued jobs of one kind, in order."""

    kind: Kind
    turns: list[Turn] = field(default_factory=list)

    def jobs(self) -> Iterator[PlacedJob]:
        """Yields the jobs in order. A job that was yielded may leave the line meanwhile."""
        index = 0
        while index < len(self.turns):
            turn = self.turns[index]
            yield turn[-1]
            # A job that got its slots has left the line meanwhile: then the next one is at this index.
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
        kind, turn = kind_of(job.spec), (*order(job), job)
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
        return kind_of(job.spec) if known is None else known[0].kind

    def _remove(self, job_id: JobId) -> None:
        line, turn = self._turns.pop(job_id)
        del line.turns[bisect_left(line.turns, turn)]
        if not line.turns:
            del self._lines[line.kind]
