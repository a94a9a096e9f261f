"""Preemption by priority and share.

Jobs are placed by priority, and among equals by their projects' shares (`shares`). A job that waits for slots holds
back those behind it, since large jobs would otherwise never be placed while small ones arrive. Jobs of lower priority
give it slots: first those beyond their least number of ranks; if these are too few, whole jobs go back to the queue
with a checkpoint made for that, the lowest priority and newest first.

Jobs of equal priority give only slots beyond their least number, and only as many as leave their project no fewer slots
than the waiting job's project then has.
"""

from collections.abc import Iterable, Sequence

from elche_coordinator.core.jobs.placed import PlacedJob
from elche_coordinator.core.jobs.shares import Shares, order
from elche_coordinator.core.messages.events import SlotsRequested
from elche_coordinator.core.records.fleet import Fleet
from elche_coordinator.core.records.machine import JobPhase, RankPhase
from elche_coordinator.core.records.ranks import RankRecord, staying


def holds_back(job: PlacedJob, fleet: Fleet) -> bool:
    """True if a waiting job holds back others: not if all slots, free or not, are too few for it."""
    return fleet.num_groups(job.spec) >= job.spec.least_ranks


def asked(waiting: PlacedJob, jobs: Iterable[PlacedJob], fleet: Fleet, shares: Shares) -> list[SlotsRequested]:
    """Requests to other jobs for the slots that the waiting one lacks, beyond those that come free already. Empty if
    all jobs together have too few, or if the waiting one needs several slots of one host: they might come free on
    different ones.

    A job is asked only if the waiting one can use all of its slots, since any of them may come free.
    """
    jobs, least = [job for job in jobs if _has_only(job, fleet, waiting.spec.conditions)], waiting.spec.least_ranks
    # Slots of ranks that are leaving count as free: they were asked before, and must not be asked for again and again.
    lack = least - len(fleet.free_for_one(waiting.spec.conditions)) - sum(map(_num_leaving, jobs))
    lower = [job for job in jobs if job.spec.priority < waiting.spec.priority and _can_give(job)]
    richer = {
        job.spec.account: shares.held(job) - shares.held(waiting) - least
        for job in jobs
        if job.spec.account != waiting.spec.account
    }
    equal = [job for job in jobs if job.spec.priority == waiting.spec.priority and _can_give(job)]
    gifts: dict[PlacedJob, int] = {}

    def give(job: PlacedJob, num_ranks: int) -> int:
        """Counts `num_ranks` as given by the job, if slots still lack; returns the slots that this adds."""
        given, size = gifts.get(job, 0), job.spec.group_size
        if lack > 0 and num_ranks > given:
            gifts[job] = num_ranks
            return (num_ranks - given) * size
        return 0

    for job in sorted(lower, key=order, reverse=True):
        lack -= give(job, min(_surplus(job), -(-lack // job.spec.group_size)))
    for job in sorted(equal, key=order, reverse=True):
        most = min(lack, richer.get(job.spec.account, 0)) // job.spec.group_size
        slots = give(job, min(_surplus(job), most))
        lack -= slots
        if slots:
            richer[job.spec.account] -= slots
    for job in sorted(lower, key=order, reverse=True):  # whole jobs
        lack -= give(job, _num_staying(job))
    # A job that gives says how many ranks leave, not which, so nobody knows whether they are on one host.
    if waiting.spec.slots_on_one_host > 1 or lack > 0:
        return []
    return [SlotsRequested(job_id=job.id, num_ranks=num_ranks, by=waiting.id) for job, num_ranks in gifts.items()]


def asked_of_host(waiting: PlacedJob, jobs: Sequence[PlacedJob], fleet: Fleet) -> list[SlotsRequested]:
    """The request for a job that can begin only on a host which has its checkpoint, and where no slot is free. The
    least important job of lower priority there gives all of its slots: one that gives some may give those elsewhere.
    """
    spec = waiting.spec
    its_own = {place for place in fleet.offered(spec.conditions) if fleet.has_checkpoint(place, spec)}
    lower = [job for job in jobs if job.spec.priority < spec.priority and _can_give(job)]
    there = [job for job in jobs if any(not its_own.isdisjoint(one.places) for one in _living(job))]
    num_others = sum(_num_staying(job) * job.spec.group_size for job in lower)
    is_in_vain = len(fleet.free_for_one(spec.conditions)) + num_others < spec.least_ranks
    if spec.slots_on_one_host > 1 or is_in_vain or any(map(_num_leaving, there)):
        return []
    least = max((job for job in lower if job in there), key=order, default=None)
    return [SlotsRequested(job_id=least.id, num_ranks=_num_staying(least), by=waiting.id)] if least else []


def _living(job: PlacedJob) -> list[RankRecord]:
    return [record for record in job.ranks.values() if record.phase is not RankPhase.EXITED]


def _has_only(job: PlacedJob, fleet: Fleet, conditions: tuple[str, ...]) -> bool:
    """True if all slots of the job meet the conditions."""
    return not conditions or all(
        place.agent_id in fleet.agents and fleet.meets(place, conditions)
        for record in _living(job)
        for place in record.places
    )


def _can_give(job: PlacedJob) -> bool:
    """True if ranks of the job can leave soon. A paused job makes no round, in which their work would be committed."""
    trains = job.phase in (JobPhase.GROUPING, JobPhase.TRAINING)
    return job.can_scale and not job.is_paused and (trains or (job.phase is JobPhase.STARTING and job.can_begin_again))


def _num_staying(job: PlacedJob) -> int:
    return len(staying(job.ranks))


def _surplus(job: PlacedJob) -> int:
    return max(0, _num_staying(job) - job.spec.least_ranks) if job.phase is not JobPhase.STARTING else 0


def _num_leaving(job: PlacedJob) -> int:
    """Slots of ranks that are about to exit."""
    stay = staying(job.ranks) if job.is_open else {}
    there = [rank for rank, record in job.ranks.items() if record.phase is not RankPhase.EXITED]
    return sum(rank not in stay for rank in there) * job.spec.group_size
