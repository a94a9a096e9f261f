"""The report of a committed round to watchers."""

from collections.abc import Mapping, Sequence
from math import nan

from elche_coordinator.core.messages.ids import Rank, Version
from elche_coordinator.core.messages.reports import RoundReport
from elche_coordinator.core.messages.spec import RankPart, RecordedRound
from elche_coordinator.core.records.round import Round
from elche_coordinator.core.results.tally import mean_loss

NO_PART = RankPart(slices=(), num_batches=0, newer_batches=0)
"""The row of a rank that was not in the round."""


def round_report(
    received: Round,
    parts: Mapping[Rank, RankPart],
    ranks: Sequence[Rank],
    *,
    version: Version,
    anchor: int,
    duration_s: float,
) -> RoundReport:
    """The report, with an entry for each of the job's ranks; zeros for those that were not in the round."""
    results, rows = received.results, received.rows
    everyone = [parts.get(rank, NO_PART) for rank in ranks]
    rank_samples = tuple(sum(piece.size for piece in part.slices) for part in everyone)
    return RoundReport(
        round=received.id,
        version=version,
        rank_batches=tuple(part.num_batches for part in everyone),
        rank_compute_ms=tuple(rows[rank].compute_us / 1000 if rank in rows else 0.0 for rank in ranks),
        rank_waited_ms=tuple(received.stalled_ms(rank) for rank in ranks),
        sync_ms=received.sync_ms,
        anchor=anchor,
        duration_s=duration_s,
        samples=sum(rank_samples),
        rank_sent_bytes=tuple(results[rank].sent_bytes if rank in results else 0 for rank in ranks),
        recorded=RecordedRound(parts=tuple(everyone), generation=received.generation),
        rank_losses=tuple(mean_loss(results[rank].work) if rank in results else nan for rank in ranks),
        rank_samples=rank_samples,
    )
