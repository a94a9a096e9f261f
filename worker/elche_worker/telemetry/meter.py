"""Sums over a rank's batches, for progress reports and rounds."""

from dataclasses import dataclass, field
from typing import Any

import torch

from elche.v1 import rank_pb2
from elche_worker.user.scalars import MAX_SCALARS, Sum, wide

MAX_BATCH_TIMES = 64
"""Newest batch times that a report carries; `BatchesTrained.batch_ms` has this limit."""


@dataclass(slots=True)
class EpochSums:
    """One epoch's batches since the last round."""

    num_batches: int = 0
    num_samples: int = 0
    """Samples, those of skipped batches too."""
    loss_sum: float | torch.Tensor = 0.0
    """Sum of the batches' losses; a tensor on the device where reading it would make the host wait."""
    scalars: dict[str, Sum] = field(default_factory=dict)
    num_skipped: int = 0
    """Further batches, which were not trained."""

    def add(self, other: "EpochSums") -> None:
        """Adds another's batches."""
        self.num_batches += other.num_batches
        self.num_skipped += other.num_skipped
        self.num_samples += other.num_samples
        self.loss_sum = self.loss_sum + other.loss_sum
        for name, (total, count) in other.scalars.items():
            if name not in self.scalars and len(self.scalars) >= MAX_SCALARS:
                raise ValueError(f"record_scalar({name!r}): more than {MAX_SCALARS} names were recorded in one epoch")
            old_total, old_count = self.scalars.get(name, (0.0, 0))
            self.scalars[name] = (old_total + total, old_count + count)

    def to_message(self, epoch: int) -> rank_pb2.EpochWork:
        """As a protobuf message. Reads values from the device."""
        scalars = {
            name: rank_pb2.ScalarSum(sum=float(total), count=count) for name, (total, count) in self.scalars.items()
        }
        return rank_pb2.EpochWork(
            epoch=epoch,
            num_batches=self.num_batches,
            num_samples=self.num_samples,
            loss_sum=float(self.loss_sum),
            scalars=scalars,
            num_skipped=self.num_skipped,
        )


@dataclass(slots=True)
class RoundWork:
    """The work of one rank between two rounds."""

    weight: int = 0
    """Samples trained since the last round."""
    compute_ms: float = 0.0
    """Time of its batches in ms, without waits for data."""
    epochs: dict[int, EpochSums] = field(default_factory=dict)
    """By epoch: a round may have batches of two."""

    def part(self) -> list[Any]:
        """A follower's losses and scalars for the leader's sums, as plain values. Reads them from the device."""
        return [
            [epoch, float(sums.loss_sum), {name: [float(total), n] for name, (total, n) in sums.scalars.items()}]
            for epoch, sums in self.epochs.items()
        ]

    def add_part(self, part: list[Any]) -> None:
        """Adds a follower's losses and scalars."""
        for epoch, loss_sum, scalars in part:
            sums = {name: (total, count) for name, (total, count) in scalars.items()}
            self.epochs.setdefault(epoch, EpochSums()).add(EpochSums(0, 0, loss_sum, sums))

    def to_messages(self) -> list[rank_pb2.EpochWork]:
        """As a protobuf message. Reads values from the device."""
        return [sums.to_message(epoch) for epoch, sums in sorted(self.epochs.items())]


class Meter:
    """Counts and sums of one rank. Losses on an accelerator are summed there and read at rounds only."""

    def __init__(self, *, reads_losses: bool) -> None:
        self.local_step = 0
        """Batches trained or skipped."""
        self.num_skipped = 0
        """Batches skipped."""
        self.num_processed = 0
        """Samples trained, counted in the order of the leases."""
        self.work = RoundWork()
        """Work since the last round."""
        self.throttled_ms = 0.0
        """Time in ms spent waiting at the limit for slower ranks."""
        self._data_wait_ms = 0.0
        self._reads_losses = reads_losses
        self._new_wait_ms = 0.0
        """Wait in ms for the data of batches whose times are not known yet."""
        self._batch_ms: list[float] = []
        self._loss_sum = 0.0
        self._loss_count = 0
        self._has_skipped = False
        """True if a batch was skipped since the last report."""

    def add_batch(
        self, epoch: int, num_samples: int, loss: torch.Tensor, scalars: dict[str, Sum], fraction: float = 1.0
    ) -> None:
        """Adds a trained batch, of which `fraction`, with this loss, was trained by this process."""
        self.local_step += 1
        self.num_processed += num_samples
        self.work.weight += num_samples
        value = loss.item() if self._reads_losses else wide(loss)
        part = value if fraction == 1 else value * fraction if fraction else 0.0
        sums = EpochSums(1, num_samples, part, scalars if fraction else {})
        self.work.epochs.setdefault(epoch, EpochSums()).add(sums)
        if self._reads_losses:
            self._loss_sum += float(value)
            self._loss_count += 1

    def skip_batch(self, epoch: int, num_samples: int) -> None:
        """Counts a batch that was not trained: its samples are done, without a loss."""
        self.local_step += 1
        self.num_skipped += 1
        self.num_processed += num_samples
        self.work.weight += num_samples
        self.work.epochs.setdefault(epoch, EpochSums()).add(EpochSums(0, num_samples, num_skipped=1))
        self._has_skipped = True

    def add_times(self, batch_ms: list[float]) -> None:
        """Adds device times of batches, in ms. The reported time per batch includes the wait for its data."""
        self.work.compute_ms += sum(batch_ms)
        if batch_ms:
            self._batch_ms.append(batch_ms[0] + self._new_wait_ms)
            self._batch_ms.extend(batch_ms[1:])
            self._new_wait_ms = 0.0

    def add_data_wait(self, waited_ms: float) -> None:
        """Adds time in ms spent waiting for the next batch's data."""
        self._data_wait_ms += waited_ms
        self._new_wait_ms += waited_ms

    @property
    def has_unreported(self) -> bool:
        """True if batches have ended since the last report."""
        return bool(self._batch_ms) or self._has_skipped

    def take_report(self) -> rank_pb2.BatchesTrained:
        """Progress since the last report."""
        report = rank_pb2.BatchesTrained(
            local_step=self.local_step,
            num_processed=self.num_processed,
            batch_ms=self._batch_ms[-MAX_BATCH_TIMES:],
            data_wait_ms=self._data_wait_ms,
            loss_sum=self._loss_sum,
            loss_count=self._loss_count,
        )
        self._batch_ms, self._loss_sum, self._loss_count = [], 0.0, 0
        self._has_skipped = False
        return report

    def take_work(self) -> RoundWork:
        """Removes and returns the work since the last round."""
        work, self.work = self.work, RoundWork()
        return work

    def put_back(self, work: RoundWork) -> None:
        """Returns the work of an abandoned round, so that it goes into the next one."""
        self.work.weight += work.weight
        self.work.compute_ms += work.compute_ms
        for epoch, sums in work.epochs.items():
            self.work.epochs.setdefault(epoch, EpochSums()).add(sums)
