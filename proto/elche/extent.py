"""The number of samples that a job trains, by its epochs, `drop_last` and `max_steps`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """A job's numbers of samples, computed equally by the coordinator and the ranks."""

    dataset_size: int
    batch_size: int
    epochs: int
    drop_last: bool = False
    max_steps: int | None = None

    @property
    def kept_size(self) -> int:
        """Samples that are trained in a whole epoch."""
        return self.dataset_size - self.dataset_size % self.batch_size if self.drop_last else self.dataset_size

    @property
    def total_samples(self) -> int:
        """Samples that are trained in all epochs."""
        total = self.kept_size * self.epochs
        return total if self.max_steps is None else min(total, self.max_steps * self.batch_size)

    @property
    def num_epochs(self) -> int:
        """Number of epochs that are begun; the last one may be incomplete."""
        return -(-self.total_samples // self.kept_size) if self.kept_size else 0

    def epoch_size(self, epoch: int) -> int:
        """Samples that are trained in one epoch, from 0; `max_steps` may end the last one early."""
        return max(0, min(self.kept_size, self.total_samples - epoch * self.kept_size))
