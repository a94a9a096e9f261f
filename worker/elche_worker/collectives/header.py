"""The header of a round: one row per rank on what it contributes, and the ranks' weights that follow from the rows."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from elche.contributions import Contribution, discarded
from elche_worker.collectives.operations import RanksDiffer
from elche_worker.model.mean import Decay
from elche_worker.outer import Average, OuterOptimizer


@dataclass(frozen=True, slots=True)
class Row:
    """One rank's row of a round's header, sent as one int64 tensor. All rows are gathered before the values, so that
    every rank computes the same weights and the same source.
    """

    attempt: int
    generation: int
    round: int
    layout_hash: int
    weight: int
    """Samples since the last average."""
    finite: int
    """1 if the rank's values are finite, else 0."""
    cut: int
    """Samples of the rank's leases, in their order, that its values contain."""
    local_step: int
    compute_us: int
    """Compute time of the rank's batches since the last round in microseconds, without waits for data."""
    version: int
    """Version that the rank held before the round."""
    samples: int = 0
    """Samples of the job, over all ranks, in that version."""
    unusual: int = 0
    """1 if the step since the last result is far longer than the rank's steps before (`outliers`), else 0."""
    frozen: int = 0
    """Digest of the frozen parameters."""
    level: int = 0
    """With `compress="auto"` the level (`levels`) that this rank would choose for the round; else 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragingOptions:
    """Settings by which rounds average."""

    weighting: str = "auto"
    merge: str = "mean"
    """As `elche_worker.model.step.merge_of` returns it."""
    nonfinite: str = "fail"
    outliers: str = "keep"
    compress: str | None = None
    outer: OuterOptimizer = field(default_factory=Average)
    decay: Decay | None = None
    """Decay of the moving average of the weights; None: there is none."""
    overlaps: bool = False
    """True if ranks train on while they average."""

    @property
    def counts_samples(self) -> bool:
        """True if ranks are weighted by their samples; otherwise all that have any have equal weight."""
        return self.weighting == "samples" or (self.weighting == "auto" and self.merge != "adascale")

    def discarded(self, rows: Sequence[Contribution]) -> list[bool]:
        """For each rank, True if its values are left out."""
        return discarded(rows, nonfinite=self.nonfinite, outliers=self.outliers)

    def weights(self, rows: Sequence[Contribution]) -> list[int]:
        """Weight of each rank: its samples, or 1 if it has any; 0 where its values are left out."""
        weights = [row.weight if self.counts_samples else int(row.weight > 0) for row in rows]
        return [0 if is_out else weight for is_out, weight in zip(self.discarded(rows), weights, strict=True)]

    def source(self, rows: Sequence[Row]) -> int:
        """Position of the source: the first rank with the newest version, if possible one that is not left out."""
        are_out = self.discarded(rows)
        return max(range(len(rows)), key=lambda at: (rows[at].version, not are_out[at], -at))


def check_together(rows: Sequence[Row]) -> None:
    """Raises `RanksDiffer` if the rows are of different rounds or models."""
    first = rows[0]
    for position, row in enumerate(rows):
        if (row.attempt, row.generation, row.round) != (first.attempt, first.generation, first.round):
            raise RanksDiffer(
                f"the ranks at positions 0 and {position} met in different rounds: {first.round} and {row.round}"
            )
        if row.layout_hash != first.layout_hash:
            raise RanksDiffer(f"the models of the ranks at positions 0 and {position} differ")
