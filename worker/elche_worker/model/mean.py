"""An exponential moving average of a model's weights (the setting `ema`).

It covers trained parameters and floating-point buffers that rounds average, in the precision of rounds. All other
tensors are the model's own.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch

from elche_worker.model.layout import DTYPES, Layout


@dataclass(frozen=True, slots=True)
class Decay:
    """Decay of the average. Equal on all ranks, so that all compute the same average."""

    per_batch: float
    """The factor of the earlier average for each batch that is trained; in [0, 1)."""
    batch_size: int
    """Samples of a batch: the job's nominal number. Incomplete batches count by their samples."""

    @torch.no_grad()
    def move(self, mean: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor], num_samples: int) -> None:
        """Moves the average, in place, towards weights of the same names, which contain `num_samples` more samples.
        Tensor by tensor, so that the result does not depend, bit for bit, on their places in memory.
        """
        kept = self.per_batch ** (num_samples / self.batch_size)
        if mean:
            torch._foreach_lerp_(list(mean.values()), list(weights.values()), 1.0 - kept)


def decay_of(ema: float | None, batch_size: int) -> Decay | None:
    """The decay of a job's setting; None if it has none."""
    return None if ema is None else Decay(ema, batch_size)


def ema_notice(ema: float | None, *, has_mean: bool) -> str:
    """A warning if a job with an average resumes from a checkpoint without one, or the reverse; else ""."""
    if has_mean and ema is None:
        return "the checkpoint has a moving average of the weights (ema), which the job does not use"
    if ema is not None and not has_mean:
        return "the checkpoint has no moving average of the weights (ema): it begins at the checkpoint's weights"
    return ""


@contextmanager
def mean_in_model(layout: Layout, mean: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Context in which the model has the average, given by the layout's names; an empty one changes nothing."""
    entries = [entry for entry in layout.entries if entry.name in mean]
    own = [entry.tensor.clone() for entry in entries]
    for entry in entries:
        entry.tensor.copy_(mean[entry.name])
    try:
        yield
    finally:
        for entry, tensor in zip(entries, own, strict=True):
            entry.tensor.copy_(tensor)


class MeanOfModel:
    """The average of a model trained without rounds: it moves after every batch. Without a decay there is none."""

    def __init__(self, layout: Layout, decay: Decay | None) -> None:
        self._decay = decay
        self._layout = layout
        self._mean = {name: one.clone() for name, one in self._weights().items()} if decay else {}

    def _weights(self) -> dict[str, torch.Tensor]:
        """The weights in the precision of rounds."""
        entries = [entry for kind in DTYPES for entry in self._layout.of_kind(kind)]
        return {entry.name: entry.tensor.to(DTYPES[entry.kind]) for entry in entries}

    def move(self, num_samples: int) -> None:
        """Moves the average after a batch of `num_samples` samples."""
        if self._decay is not None:
            self._decay.move(self._mean, self._weights(), num_samples)

    def in_model(self) -> AbstractContextManager[None]:
        """Context in which the model has the average."""
        return mean_in_model(self._layout, self._mean)
