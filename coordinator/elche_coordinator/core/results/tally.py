"""Sums of an epoch's work, throughput, and the bound: the throughput if no rank ever waited."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from math import nan
from typing import Any

from elche.sums import added
from elche_coordinator.core.messages.ids import Attempt, Rank
from elche_coordinator.core.messages.reports import EpochReport, RankResult
from elche_coordinator.core.messages.spec import EpochWork
from elche_coordinator.core.records.ranks import RankRecord, RankRecords

FIRST = Attempt(1)
"""The attempt of a loop, which resumes by itself."""


@dataclass(slots=True)
class EpochTally:
    """Sums over the committed work of one epoch."""

    num_batches: int = 0
    """Batches of all ranks, those without a known loss too."""
    loss_sum: float = 0.0
    """Sum of the known losses of batches."""
    num_losses: int = 0
    """Number of batches whose losses are in the sum."""
    scalars: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Recorded scalars as (sum, count), by name."""
    duration_s: float = 0.0
    """Seconds of the rounds that trained it; a round of several epochs counts for each by its part of the samples."""
    rank_batches: dict[Rank, int] = field(default_factory=dict)
    """Batches that each rank has trained."""
    rank_samples: dict[Rank, int] = field(default_factory=dict)
    """Committed samples of each rank."""
    rank_skipped: dict[Rank, int] = field(default_factory=dict)
    """Batches of each rank that were not trained, since the data gave None for them."""

    def add(self, rank: Rank, work: EpochWork) -> None:
        """Adds one rank's part of a committed round."""
        self.num_batches += work.num_batches
        if work.has_loss:
            self.loss_sum += work.loss_sum
            self.num_losses += work.num_batches
        self.rank_batches[rank] = self.rank_batches.get(rank, 0) + work.num_batches
        self.rank_samples[rank] = self.rank_samples.get(rank, 0) + work.num_samples
        if work.num_skipped:
            self.rank_skipped[rank] = self.rank_skipped.get(rank, 0) + work.num_skipped
        for name, (total, count) in work.scalars.items():
            old_total, old_count = self.scalars.get(name, (0.0, 0))
            self.scalars[name] = (old_total + total, old_count + count)

    def report(
        self, *, epoch: int, ranks: list[Rank], committed: int, dropped: int, attempt: Attempt = FIRST
    ) -> EpochReport:
        """The epoch's report."""
        return EpochReport(
            epoch=epoch,
            attempt=attempt,
            loss=self.loss_sum / self.num_losses if self.num_losses else None,
            scalars={name: total / count for name, (total, count) in sorted(self.scalars.items()) if count},
            duration_s=self.duration_s,
            committed=committed,
            dropped=dropped,
            rank_batches=tuple(self.rank_batches.get(rank, 0) for rank in ranks),
            rank_samples_per_s=tuple(self.rank_samples.get(rank, 0) / max(self.duration_s, 1e-9) for rank in ranks),
        )

    @property
    def is_all_skipped(self) -> bool:
        """True if no batch was trained, since the data gave None for each."""
        return bool(self.rank_skipped) and not self.num_batches

    def notice_of_skipped(self, epoch: int) -> tuple[Rank, str] | None:
        """The rank that has skipped the most batches, with a message for people about all ranks; None if none has."""
        if not self.rank_skipped:
            return None
        rank, most = max(self.rank_skipped.items(), key=lambda item: (item[1], -item[0]))
        num = sum(self.rank_skipped.values())
        others = f" ({num} on all ranks)" if num > most else ""
        return (
            rank,
            f"skipped {most} batches{others} in epoch {epoch + 1}: collate_fn or the data set gave None for them",
        )

    def to_json(self) -> dict[str, object]:
        """As values that JSON has: ranks become texts there."""
        return asdict(self)

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> "EpochTally":
        """The inverse of `to_json`."""
        return cls(
            num_batches=state["num_batches"],
            loss_sum=state["loss_sum"],
            num_losses=state.get("num_losses", state["num_batches"]),
            duration_s=state.get("duration_s", 0.0),
            scalars={name: (total, count) for name, (total, count) in state["scalars"].items()},
            rank_batches={Rank(int(rank)): num for rank, num in state["rank_batches"].items()},
            rank_samples={Rank(int(rank)): num for rank, num in state["rank_samples"].items()},
            rank_skipped={Rank(int(rank)): num for rank, num in state.get("rank_skipped", {}).items()},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Figures of training at one moment; two of them give the throughput in between."""

    at_s: float
    samples: int
    """Samples committed so far."""
    rank_batches: dict[Rank, int]
    """Batches that each rank has committed so far."""
    rank_compute_ms: dict[Rank, float]
    """Time that each rank has computed so far."""


def bound_samples_per_s(start: Mark, end: Mark, batch_sizes: Mapping[Rank, int]) -> float:
    """Samples per second if no rank ever waited: the sum of batch size over mean compute time per batch."""
    bound = 0.0
    for rank, batches in end.rank_batches.items():
        num_batches = batches - start.rank_batches.get(rank, 0)
        compute_ms = end.rank_compute_ms[rank] - start.rank_compute_ms.get(rank, 0.0)
        if num_batches > 0 and compute_ms > 0:
            bound += batch_sizes[rank] * num_batches / compute_ms * 1000
    return bound


def mark_of(ranks: RankRecords, at_s: float, samples: int) -> Mark:
    """The mark at a time at which `samples` of the job are committed."""
    return Mark(
        at_s=at_s,
        samples=samples,
        rank_batches={rank: record.num_batches for rank, record in ranks.items()},
        rank_compute_ms={rank: record.compute_ms for rank, record in ranks.items()},
    )


def samples_per_s(start: Mark, end: Mark) -> float:
    """Samples committed per second between two marks; 0 when no time has passed."""
    return (end.samples - start.samples) / (end.at_s - start.at_s) if end.at_s > start.at_s else 0.0


def rank_result(record: RankRecord) -> RankResult:
    """What the rank has done, for the job's result."""
    return RankResult(
        device=record.device,
        batches=record.num_batches,
        ms_per_batch=record.compute_ms / record.num_batches if record.num_batches else 0.0,
        waited_s=record.waited_ms / 1000,
        samples=record.num_samples,
    )


def mean_loss(work: Iterable[EpochWork]) -> float:
    """Mean over the batches whose losses are known; NaN without any."""
    known = [one for one in work if one.has_loss and one.num_batches]
    num_batches = sum(one.num_batches for one in known)
    return added(one.loss_sum for one in known) / num_batches if num_batches else nan
