"""The present duty of a training's rank, by which its silence is judged."""

from elche_coordinator.core.life.hangs import EXPLAINED_S, Duty
from elche_coordinator.core.life.stalls import BATCHES, FIRST_S, LEAST_S, StallWatch
from elche_coordinator.core.records.ranks import RankRecord
from elche_coordinator.core.results.training import Training
from elche_coordinator.core.rounds.generation import Generation


def duty_of(record: RankRecord, training: Training | None, generation: Generation | None, stalls: StallWatch) -> Duty:
    """The rank's duty: a batch, an evaluation, or waiting for others, with the seconds of silence after which it counts
    as stalled, and as hung; None where silence means nothing.
    """
    if training is None or generation is None:
        return Duty()
    if not _is_member(record, generation):
        return Duty(is_busy=True)  # a newcomer, for which nobody waits
    stall_s: float | None = None
    hang_s: float | None = None
    is_busy = generation.should_work(record) or generation.should_enter(record)
    if is_busy:
        stall_s = stalls.patience_s(record)
        # the allowed silence of `stalls`, with the shorter `EXPLAINED_S` in place of its `LEAST_S`
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
        cost_s=record.round_batches * (record.ms_per_batch or 0.0) / 1000,
    )


def has_batch_due(record: RankRecord, generation: Generation | None) -> bool:
    """True if the rank trains now, and neither waits for others nor does something else."""
    return generation is not None and _is_member(record, generation) and generation.should_work(record)


def _is_member(record: RankRecord, generation: Generation) -> bool:
    return generation.members.get(record.rank) is record
