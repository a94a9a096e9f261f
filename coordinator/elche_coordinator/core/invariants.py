"""The architecture's rules as checks of the whole state, which tests and the simulator run after every event."""

from itertools import pairwise

from elche_coordinator.core.coordinator import Coordinator
from elche_coordinator.core.jobs.managed_job import ManagedJob
from elche_coordinator.core.life.job import Job
from elche_coordinator.core.messages.ids import Epoch, JobId, Rank
from elche_coordinator.core.records.fleet import Place
from elche_coordinator.core.records.machine import JobPhase, RankPhase
from elche_coordinator.core.results.training import Training
from elche_coordinator.core.rounds.generation import Generation
from elche_coordinator.core.work.intervals import Interval
from elche_coordinator.core.work.ledger import Ledger


class Broken(AssertionError):
    """A rule is broken. The message names the rule, the job and the place."""


def check_invariants(coordinator: Coordinator) -> None:
    """Raises `Broken` when a rule is broken."""
    check_places(coordinator)
    for training in coordinator.trainings.values():
        check_training(training)


def check_places(coordinator: Coordinator) -> None:
    """Checks what jobs have in common, slots and the queue, and the life of each."""
    _check_slots(coordinator)
    _check_queue(coordinator)
    for job in coordinator.jobs.values():
        _check_life(job)


def check_training(job: ManagedJob, *, with_progress: bool = True) -> None:
    """Checks the ledger and rounds of a training. Without `with_progress` one that waits for nothing is no reason."""
    training, generation = job.run.training, job.run.generation
    if training is None:
        return
    check_ledger(training.ledger)
    if generation is None:
        return
    _check_rounds(job, training, generation)
    if job.phase is JobPhase.TRAINING:
        if training.is_over:
            raise Broken(f"job {job.id} trains on though its last round is committed")
        if with_progress:
            _check_progress(job, training, generation)


def check_ledger(ledger: Ledger) -> None:
    """Checks that every position of an open epoch is in exactly one place, and no lease is of a closed epoch."""
    books = ledger.open_books()
    leased: dict[Epoch, list[Interval]] = {epoch: [] for epoch in books}
    for rank, leases in ledger.rank_leases.items():
        if not leases.first <= leases.committed <= leases.processed <= leases.end:
            counts = f"committed {leases.committed} <= processed {leases.processed} <= leased {leases.end}"
            raise Broken(f"rank {rank}: {counts}, and from {leases.first} on")
        after, start, end = leases.first, leases.committed, leases.end
        for lease in leases.leases:  # `RankLeases.remainders`, inlined because this runs after every event
            at, after = after, after + lease.size
            if after <= start or at >= end:
                continue
            if lease.epoch < ledger.epoch:
                raise Broken(f"rank {rank} has work of a closed epoch: {lease}")
            if lease.epoch in leased:
                first, last = max(start, at) - at, min(end, after) - at
                leased[lease.epoch].append((lease.offset + first, lease.offset + last))
    for epoch, book in books.items():
        parts = [*book.free, *book.committed, *leased[epoch]]
        parts.sort()
        _check_cover(epoch, parts, ledger.size(epoch))


def _check_cover(epoch: Epoch, parts: list[Interval], size: int) -> None:
    position = 0
    for start, end in parts:
        if start != position:
            raise Broken(f"epoch {epoch}: position {min(start, position)} is in two places or in none: {parts}")
        position = end
    if position != size:
        raise Broken(f"epoch {epoch}: positions from {position} of {size} are in no place")


def _check_rounds(job: Job, training: Training, generation: Generation) -> None:
    """Checks that every round has all members, none that all have received is open, and targets lie in leased work."""
    rounds = generation.rounds
    if len(rounds) > 1 and any(later.id <= opened.id for opened, later in pairwise(rounds)):
        raise Broken(f"job {job.id}: open rounds {[opened.id for opened in rounds]} are not in order")
    members = list(generation.members)
    for opened in rounds:
        if opened.generation != generation.id:
            raise Broken(f"job {job.id}: round {opened.id} is of an old generation")
        if list(opened.targets) != members:
            raise Broken(f"job {job.id}: round {opened.id} has other members")
        if not opened.results.keys() <= opened.entered.keys():
            raise Broken(f"job {job.id}: round {opened.id} is received but not entered")
        if job.phase is JobPhase.TRAINING and generation.abandoned is None and opened.is_received_by_all:
            raise Broken(f"job {job.id}: round {opened.id} is received by all and open")
    if training.policy.can_revise:
        announced = [opened for opened in rounds if not opened.is_granted]
        if len(announced) > 1:
            raise Broken(f"job {job.id}: rounds {[opened.id for opened in announced]} are open together")
        for opened in announced:
            _check_targets(job, training, generation, opened.targets)


def _check_targets(job: Job, training: Training, generation: Generation, targets: dict[Rank, int]) -> None:
    for rank, record in generation.members.items():
        leased_to = record.base_step + training.ledger.uncommitted_batches(rank)[1]
        if targets[rank] > leased_to:
            raise Broken(f"job {job.id}: rank {rank}'s target {targets[rank]} > leased {leased_to}")


def _check_life(job: Job) -> None:
    is_gone = all(record.phase is RankPhase.EXITED for record in job.ranks.values())
    if job.phase is JobPhase.ENDED and not is_gone:
        raise Broken(f"job {job.id} has ended with a rank alive")
    if (job.result is not None) != (job.phase is JobPhase.ENDED):
        raise Broken(f"job {job.id} is {job.phase}: result?")
    if job.phase is JobPhase.STOPPING and is_gone:
        raise Broken(f"job {job.id} stops with nobody left")


def _check_progress(job: Job, training: Training, generation: Generation) -> None:
    """Checks that a round is open, or a rank has work whose end makes one due, or the job is held."""
    is_regrouping = generation.abandoned is not None  # its members report how its rounds ended, or form the next one
    if generation.rounds or training.is_paused or is_regrouping:
        return
    ledger, members = training.ledger, generation.members
    if any(ledger.uncommitted_batches(rank)[1] > one.round_batches for rank, one in members.items()):
        return
    if not any(map(ledger.is_recalled, members)):  # the answer to a recall makes a round possible
        raise Broken(f"job {job.id} trains without an open round: it cannot progress")


def _check_slots(coordinator: Coordinator) -> None:
    taken: dict[Place, tuple[JobId, Rank]] = {}
    for job in coordinator.placed.values():
        for record in job.ranks.values():
            places = record.places
            if len(places) != job.spec.group_size:
                raise Broken(f"job {job.id}: rank {record.rank} has {len(places)} slots")
            if record.phase is not RankPhase.EXITED:
                taken.update(dict.fromkeys(places, (job.id, record.rank)))
    if taken != coordinator.fleet.taken:
        raise Broken(f"slots {coordinator.fleet.taken} are not those of living ranks {taken}")


def _check_queue(coordinator: Coordinator) -> None:
    waiting = {job_id for job_id, job in coordinator.placed.items() if job.phase is JobPhase.QUEUED}
    if waiting != coordinator.queued():
        raise Broken(f"jobs {coordinator.queued()} are in line for slots, and those that wait are {waiting}")
