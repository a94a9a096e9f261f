"""The rules of the architecture as checks on the whole state; tests and the simulator run them after every event."""

from elche_coordinator.core.coordinator import Coordinator
from elche_coordinator.core.jobs.job import Job
from elche_coordinator.core.jobs.managed import ManagedTraining
from elche_coordinator.core.messages.ids import Epoch, Rank
from elche_coordinator.core.records.machine import JobPhase, RankPhase
from elche_coordinator.core.results.training import Training
from elche_coordinator.core.rounds.generation import Generation
from elche_coordinator.core.work.intervals import Interval
from elche_coordinator.core.work.ledger import Ledger


class Broken(AssertionError):
    """A rule does not hold. The message names the rule, the job and the place."""


def check_invariants(coordinator: Coordinator) -> None:
    """Raises `Broken` when a rule does not hold."""
    _check_slots(coordinator)
    for job in coordinator.jobs.values():
        _check_life(job)
        body = job.body
        if isinstance(body, ManagedTraining) and body.training is not None:
            check_ledger(body.training.ledger)
            if body.generation is not None:
                _check_rounds(job, body.training, body.generation)


def check_ledger(ledger: Ledger) -> None:
    """Exactly once: every position of an open epoch is in exactly one place, and no epoch is overtaken."""
    for epoch, book in ledger.open_books().items():
        leased = [
            (part.offset, part.offset + part.size)
            for leases in ledger.rank_leases.values()
            for part in leases.remainders()
            if part.epoch == epoch
        ]
        _check_cover(epoch, sorted([*book.free, *book.committed, *leased]), ledger.size(epoch))
    for rank, leases in ledger.rank_leases.items():
        _require(
            leases.first <= leases.committed <= leases.processed <= leases.end,
            f"rank {rank}: committed {leases.committed} <= processed {leases.processed} <= leased {leases.end}",
        )
        old = [part for part in leases.remainders() if part.epoch < ledger.epoch]
        _require(not old, f"rank {rank} has work of a closed epoch: {old}")


def _check_cover(epoch: Epoch, parts: list[Interval], size: int) -> None:
    position = 0
    for start, end in parts:
        _require(
            start == position,
            f"epoch {epoch}: position {min(start, position)} is in two places or in none: {parts}",
        )
        position = end
    _require(position == size, f"epoch {epoch}: positions from {position} of {size} are in no place")


def _check_rounds(job: Job, training: Training, generation: Generation) -> None:
    """Every round has all members, one that all have received is committed, and targets lie within leased work."""
    ids = [opened.id for opened in generation.rounds]
    _require(ids == sorted(set(ids)), f"job {job.id}: open rounds {ids} are not in order")
    for opened in generation.rounds:
        _require(opened.generation == generation.id, f"job {job.id}: round {opened.id} is of an old generation")
        _require(list(opened.targets) == list(generation.members), f"job {job.id}: round {opened.id} has other members")
        _require(
            set(opened.results) <= set(opened.entered),
            f"job {job.id}: round {opened.id} is received but not entered",
        )
        if job.phase is JobPhase.TRAINING and generation.abandoned is None:
            _require(not opened.is_received_by_all, f"job {job.id}: round {opened.id} is received by all and open")
    if training.policy.can_revise:
        announced = [opened for opened in generation.rounds if not opened.is_granted]
        _require(len(announced) <= 1, f"job {job.id}: rounds {ids} are open together")
        for opened in announced:
            _check_targets(job, training, generation, opened.targets)


def _check_targets(job: Job, training: Training, generation: Generation, targets: dict[Rank, int]) -> None:
    for rank, record in generation.members.items():
        leased_to = record.base_step + training.ledger.uncommitted_batches(rank)[1]
        _require(
            targets[rank] <= leased_to,
            f"job {job.id}: rank {rank}'s target {targets[rank]} > leased {leased_to}",
        )


def _check_life(job: Job) -> None:
    gone = all(record.phase is RankPhase.EXITED for record in job.ranks.values())
    _require(job.phase is not JobPhase.ENDED or gone, f"job {job.id} has ended with a rank alive")
    _require((job.result is not None) == (job.phase is JobPhase.ENDED), f"job {job.id} is {job.phase}: result?")
    _require(job.phase is not JobPhase.STOPPING or not gone, f"job {job.id} stops with nobody left")
    body = job.body
    if isinstance(body, ManagedTraining) and body.training and body.generation and job.phase is JobPhase.TRAINING:
        _require(not body.training.is_complete, f"job {job.id} trains with nothing left")
        _check_progress(job, body.training, body.generation)


def _check_progress(job: Job, training: Training, generation: Generation) -> None:
    """A round is open, or a rank has work whose end will be reported and make one due; or somebody has paused it."""
    working = any(
        training.ledger.uncommitted_batches(rank)[1] > record.round_batches
        for rank, record in generation.members.items()
    )
    is_regrouping = generation.abandoned is not None  # its members are asked, or form the next one
    is_asked = any(training.ledger.is_recalled(rank) for rank in generation.members)  # its answer is awaited
    can_progress = bool(generation.rounds) or working or training.is_paused or is_regrouping or is_asked
    _require(can_progress, f"job {job.id} trains without an open round: it cannot progress")


def _check_slots(coordinator: Coordinator) -> None:
    taken = {
        place: (job.id, record.rank)
        for job in coordinator.jobs.values()
        for record in job.ranks.values()
        if record.phase is not RankPhase.EXITED and isinstance(job.body, ManagedTraining)
        for place in record.places
    }
    _require(
        taken == coordinator.fleet.taken,
        f"slots {coordinator.fleet.taken} are not those of living ranks {taken}",
    )

    for job in coordinator.jobs.values():
        sizes = {len(record.places) for record in job.ranks.values()}
        is_placed = isinstance(job.body, ManagedTraining)
        _require(not is_placed or sizes <= {job.spec.group_size}, f"job {job.id} has ranks of {sizes} slots")


def _require(rule: bool, message: str) -> None:
    if not rule:
        raise Broken(message)
