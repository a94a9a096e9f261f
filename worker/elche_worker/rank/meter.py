"""Sums over a rank's batches: what the next progress report, and the next round, say of them."""

from dataclasses import dataclass, field

import torch

from elche.v1 import rank_pb2
from elche_worker.scalars import Sum

MAX_BATCH_TIMES = 64


@dataclass(slots=True)
class EpochSums:
    """One epoch's batches since the last round."""

    num_batches: int = 0
    num_samples: int = 0
    loss_sum: float | torch.Tensor = 0.0
    scalars: dict[str, Sum] = field(default_factory=dict)

    def to_message(self, epoch: int) -> rank_pb2.EpochWork:
        """As the wire has it. Reads values from the device."""
        scalars = {
            name: rank_pb2.ScalarSum(sum=float(total), count=count) for name, (total, count) in self.scalars.items()
        }
        return rank_pb2.EpochWork(
            epoch=epoch,
            num_batches=self.num_batches,
            num_samples=self.num_samples,
            loss_sum=float(self.loss_sum),
            scalars=scalars,
        )


class Meter:
    """Counts and sums of one rank. Losses on an accelerator are summed there and read at rounds only."""

    def __init__(self, *, reads_losses: bool) -> None:
        self.local_step = 0
        """Batches trained."""
        self.num_processed = 0
        """Samples trained, in the order of the leases."""
        self.weight = 0
        """Samples since the last round."""
        self.compute_ms = 0.0
        """Compute time since the last round."""
        self.data_wait_ms = 0.0
        """Time spent waiting for data since the session began."""
        self._reads_losses = reads_losses
        self._epochs: dict[int, EpochSums] = {}
        self._batch_ms: list[float] = []
        self._loss_sum = 0.0
        self._loss_count = 0

    def add_batch(self, epoch: int, num_samples: int, loss: torch.Tensor, scalars: dict[str, Sum]) -> None:
        """One more batch is trained."""
        self.local_step += 1
        self.num_processed += num_samples
        self.weight += num_samples
        sums = self._epochs.setdefault(epoch, EpochSums())
        sums.num_batches += 1
        sums.num_samples += num_samples
        value = loss.item() if self._reads_losses else loss.detach()
        sums.loss_sum = sums.loss_sum + value
        for name, (total, count) in scalars.items():
            old_total, old_count = sums.scalars.get(name, (0.0, 0))
            sums.scalars[name] = (old_total + total, old_count + count)
        if self._reads_losses:
            self._loss_sum += float(value)
            self._loss_count += 1

    def add_times(self, batch_ms: list[float]) -> None:
        """Compute times of batches that have ended."""
        self._batch_ms.extend(batch_ms)
        self.compute_ms += sum(batch_ms)

    @property
    def has_unreported(self) -> bool:
        """Whether batches have ended since the last report."""
        return bool(self._batch_ms)

    def take_report(self) -> rank_pb2.BatchesTrained:
        """Progress since the last report."""
        report = rank_pb2.BatchesTrained(
            local_step=self.local_step,
            num_processed=self.num_processed,
            batch_ms=self._batch_ms[-MAX_BATCH_TIMES:],
            data_wait_ms=self.data_wait_ms,
            loss_sum=self._loss_sum,
            loss_count=self._loss_count,
            peak_memory_bytes=self._peak_memory_bytes(),
        )
        self._batch_ms, self._loss_sum, self._loss_count = [], 0.0, 0
        return report

    def _peak_memory_bytes(self) -> int:
        return 0 if self._reads_losses else torch.cuda.max_memory_allocated()

    def take_work(self) -> list[rank_pb2.EpochWork]:
        """The epochs' sums since the last round; the next round starts from nothing."""
        work = [sums.to_message(epoch) for epoch, sums in sorted(self._epochs.items())]
        self._epochs = {}
        self.weight, self.compute_ms = 0, 0.0
        return work
