"""The present duty of a training's rank, by which its silence is judged."""

from elche_coordinator.core.life.hangs import EXPLAINED_S, Duty
from elche_coordinator.core.life.stalls import BATCHES, FIRST_S, LEAST_S, StallWatch
from elche_coordinator.core.messages.ids import Rank
from elche_coordinator.core.records.ranks import RankRecord, RankRecords, present
from elche_coordinator.core.results.training import Training
from elche_coordinator.core.rounds.generation import Generation


def duties_of(
    ranks: RankRecords, training: Training | None, generation: Generation | None, stalls: StallWatch
) -> dict[Rank, Duty]:
    """The duties of all ranks that are there and connected."""
    there = {rank: record for rank, record in present(ranks).items() if record.is_connected}
    if training is None or generation is None:
        return {rank: Duty() for rank in there}
    last, due_s = _last_with_model(training), generation.scheduler.due_s()
    return {
        rank: _duty_of(record, training, generation, stalls, last, due_s.get(rank)) for rank, record in there.items()
    }


def _duty_of(
    record: RankRecord,
    training: Training,
    generation: Generation,
    stalls: StallWatch,
    last: RankRecord | None,
    due_s: float | None,
) -> Duty:
    """The rank's duty: a batch, an evaluation, or waiting for others, with the seconds of silence after which it counts
    as stalled, and as hung; None where silence means nothing.
    """
    if not _is_member(record, generation):
        # A newcomer: nobody waits for it. It waits for `last`, while the job trains and there is such a rank.
        return Duty(is_busy=last is None or training.is_paused or training.is_over)
    stall_s: float | None = None
    hang_s: float | None = None
    is_busy = generation.should_work(record) or generation.should_enter(record)
    if is_busy:
        stall_s = stalls.patience_s(record)
        # the allowed silence of `stalls`, with the shorter `EXPLAINED_S` in place of its `LEAST_S`
        # Without batch times of its own it may compile or load: nobody knows how long that takes (protocol P20.3).
        hang_s = EXPLAINED_S + stall_s - LEAST_S if record.recent_ms else None
    elif generation.is_averaging(record):
        stall_s = LEAST_S + BATCHES * training.longest_averaging_ms / 1000
    elif training.evaluations.has(record.rank):
        known_ms = record.evaluation_ms or max(one.evaluation_ms for one in training.members.values())
        least_s = LEAST_S if record.evaluation_ms else FIRST_S
        stall_s = least_s + BATCHES * known_ms / 1000 if known_ms else None
    return Duty(
        is_busy=is_busy or training.is_waited_for(record.rank) or training.is_paused,
        stall_s=stall_s,
        hang_s=hang_s,
        cost_s=_unsaved_s(record, training) if record is last else _uncommitted_s(record),
        is_last=record is last,
        due_s=due_s if is_busy else None,
    )


def _last_with_model(training: Training) -> RankRecord | None:
    """The only rank that has the model; None if there are others."""
    holders = [one for one in present(training.members).values() if training.has_model(one)]
    return holders[0] if len(holders) == 1 else None


def _uncommitted_s(record: RankRecord) -> float:
    """Seconds of the rank's work that is in no committed round."""
    return record.round_batches * (record.ms_per_batch or 0.0) / 1000


def _unsaved_s(record: RankRecord, training: Training) -> float:
    """Seconds from the newest checkpoint, or the begin of training, until the rank's last report."""
    began_s = training.started.at_s if training.started is not None else record.reported_at_s
    return max(0.0, record.reported_at_s - max(began_s, training.checkpoints.saved_at_s or 0.0))


def has_batch_due(record: RankRecord, generation: Generation | None) -> bool:
    """True if the rank trains now, and neither waits for others nor does something else."""
    return generation is not None and _is_member(record, generation) and generation.should_work(record)


def _is_member(record: RankRecord, generation: Generation) -> bool:
    return generation.members.get(record.rank) is record
