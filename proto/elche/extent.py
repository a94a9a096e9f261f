"""How much a job trains: its epochs' samples, what `drop_last` leaves out, and where `max_steps` ends it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """The samples of a whole job. Coordinator and ranks compute them alike."""

    dataset_size: int
    batch_size: int
    epochs: int
    drop_last: bool = False
    max_steps: int | None = None

    @property
    def kept_size(self) -> int:
        """Samples of a whole epoch that are trained."""
        return self.dataset_size - self.dataset_size % self.batch_size if self.drop_last else self.dataset_size

    @property
    def total_samples(self) -> int:
        """Samples of all epochs that are trained."""
        total = self.kept_size * self.epochs
        return total if self.max_steps is None else min(total, self.max_steps * self.batch_size)

    @property
    def num_epochs(self) -> int:
        """Epochs that are begun."""
        return -(-self.total_samples // self.kept_size) if self.kept_size else 0

    def epoch_size(self, epoch: int) -> int:
        """Samples of one epoch that are trained; `max_steps` may end the last one early."""
        return max(0, min(self.kept_size, self.total_samples - epoch * self.kept_size))
