"""Counts the slots that each project has and may have, and chooses the job that gets the next ones.

Among jobs of equal priority, the project with the fewest slots comes first, and within a project the job that was
submitted first: somebody's hundred jobs do not delay somebody else's only one. A job without a project counts for its
submitter. The client's word on the project is not checked, nor, without a token of one's own, that on the submitter:
shares are for people who trust one another.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from heapq import heapify, heappop, heapreplace
from sys import maxsize

from elche_coordinator.core.jobs.placed import PlacedJob
from elche_coordinator.core.messages.ids import JobId
from elche_coordinator.core.records.fleet import Fleet

EVERYONE = "*"
"""The quota of projects that have none of their own."""

Turn = tuple[float, int, int]
"""Sorts the jobs of all projects at one moment. No two jobs have an equal one."""


def order(job: PlacedJob) -> tuple[float, int]:
    """Sorts the jobs of a project: the one that gets slots first comes first. Not by the time of submission: where a
    clock that was hours ahead is put right, later jobs have earlier times.
    """
    return -job.spec.priority, job.number


class Shares:
    """The projects' slots at one moment; whoever gives slots to a job says so with `take`."""

    def __init__(self, jobs: Mapping[JobId, PlacedJob], fleet: Fleet, quotas: Mapping[str, int]) -> None:
        self._quotas = quotas
        self._held = Counter(jobs[job_id].spec.account for job_id, _ in fleet.taken.values() if job_id in jobs)

    def held(self, job: PlacedJob) -> int:
        """Number of slots that the job's project has."""
        return self._held[job.spec.account]

    def quota(self, job: PlacedJob) -> int:
        """Number of slots that the job's project may have."""
        return self._quotas.get(job.spec.account, self._quotas.get(EVERYONE, maxsize))

    def room(self, job: PlacedJob) -> int:
        """Number of further ranks that the project may get for this job."""
        return (self.quota(job) - self.held(job)) // job.spec.group_size

    def take(self, job: PlacedJob, num_ranks: int) -> None:
        """Counts slots for `num_ranks` ranks, which the job gets, as its project's."""
        self._held[job.spec.account] += num_ranks * job.spec.group_size

    def in_turn(self, lines: Iterable[Iterable[PlacedJob]]) -> Iterator[PlacedJob]:
        """Yields the jobs in the order in which they get slots. Each line has the jobs of one project in their order.
        The caller gives a job its slots (`take`) before it asks for the next job, so that they count.
        """
        heads = [head for line in map(iter, lines) if (head := self._head(line)) is not None]
        heapify(heads)
        while heads:
            turn, job, line = heads[0]
            if turn != (now := self._turn(job)):  # another line's job has taken slots of the project
                heapreplace(heads, (now, job, line))
                continue
            yield job
            if (head := self._head(line)) is not None:
                heapreplace(heads, head)
            else:
                heappop(heads)

    def _head(self, line: Iterator[PlacedJob]) -> tuple[Turn, PlacedJob, Iterator[PlacedJob]] | None:
        job = next(line, None)
        return None if job is None else (self._turn(job), job, line)

    def _turn(self, job: PlacedJob) -> Turn:
        priority, number = order(job)
        return priority, self.held(job), number
