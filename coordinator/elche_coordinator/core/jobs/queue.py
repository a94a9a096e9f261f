"""Who gets slots first, and who makes room for whom.

Jobs are placed by priority, and among equals in the order of submission. One that waits for slots holds back those
behind it: else large jobs would wait for ever while small ones come. For it, jobs of lower priority give slots: first
what they have beyond their least number of ranks; when that is too little, whole jobs go back to the queue, each with a
checkpoint made for it, the least important and newest first.
"""

from collections.abc import Iterable

from elche_coordinator.core.jobs.job import Job
from elche_coordinator.core.messages.events import SlotsAsked
from elche_coordinator.core.records.fleet import Fleet
from elche_coordinator.core.records.machine import JobPhase, RankPhase
from elche_coordinator.core.records.ranks import staying


def order(job: Job) -> tuple[float, float]:
    """Sorts jobs: the one that gets slots first comes first."""
    return -job.spec.priority, job.submitted_at


def holds_back(job: Job, fleet: Fleet) -> bool:
    """Whether others wait behind a job for which there are too few free slots: not when there are too few at all."""
    return fleet.num_groups(job.spec.group_size) >= job.spec.least_ranks


def asked(waiting: Job, jobs: Iterable[Job], fleet: Fleet) -> list[SlotsAsked]:
    """What jobs of lower priority are asked to give for the one that waits, beyond what leaves already; nothing if all
    together have too little.

    For ranks of several slots nobody is asked: what comes free would have to lie on one host.
    """
    jobs = list(jobs)
    lack = waiting.spec.least_ranks - len(fleet.free_places()) - sum(map(_num_leaving, jobs))
    lower = [job for job in jobs if job.spec.priority < waiting.spec.priority and _can_give(job)]
    lower.sort(key=order, reverse=True)
    if waiting.spec.group_size > 1 or not 0 < lack <= sum(_num_staying(job) * job.spec.group_size for job in lower):
        return []
    gifts: dict[Job, int] = {}
    for most in (_surplus, _num_staying):  # whole jobs only when what is beyond their least numbers is too little
        for job in lower:
            size, given = job.spec.group_size, gifts.get(job, 0)
            if lack > 0 and most(job) > given:
                gifts[job] = most(job) if most is _num_staying else min(most(job), -(-lack // size))
                lack -= (gifts[job] - given) * size
    return [SlotsAsked(job_id=job.id, num_ranks=num_ranks, by=waiting.id) for job, num_ranks in gifts.items()]


def _can_give(job: Job) -> bool:
    """Whether ranks of the job can leave soon: a paused one makes no round with which they could."""
    trains = job.phase in (JobPhase.GROUPING, JobPhase.TRAINING)
    return (
        job.can_scale
        and not job.body.is_paused
        and (trains or (job.phase is JobPhase.STARTING and job.body.goes_back(is_violent=True)))
    )


def _num_staying(job: Job) -> int:
    return len(staying(job.ranks))


def _surplus(job: Job) -> int:
    return max(0, _num_staying(job) - job.spec.least_ranks) if job.phase is not JobPhase.STARTING else 0


def _num_leaving(job: Job) -> int:
    """Slots of ranks that are about to exit."""
    stay = staying(job.ranks) if job.is_open else {}
    there = [rank for rank, record in job.ranks.items() if record.phase is not RankPhase.EXITED]
    return sum(rank not in stay for rank in there) * job.spec.group_size
