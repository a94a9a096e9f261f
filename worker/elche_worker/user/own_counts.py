"""Tells what a job's step does by counting batches, of which each rank makes a part: learning rates and counters that
it changes itself are then others than on one device.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn
from torch.optim import Optimizer

from elche.output import notice

WATCHED_BATCHES = 20
"""Batches whose rates are compared. Who sets rates by hand does so for each batch."""
OF_BATCHNORM = "num_batches_tracked"
"""The counter of BatchNorm, on which nothing depends that rounds do not average."""
_NOTHING = nullcontext()


class OwnCounts:
    """Compares learning rates before and after each of the first batches, and the model's counters before and after the
    very first. Says once what has changed.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._num_left = WATCHED_BATCHES
        self._counters = {
            f"{prefix}.{name}".lstrip("."): (module, name)
            for prefix, module in model.named_modules()
            if not type(module).__module__.startswith("torch.")  # what PyTorch's own modules count is not the job's
            for name, buffer in module.named_buffers(recurse=False)
            if name != OF_BATCHNORM and _is_whole_number(buffer)
        }
        """Module and attribute of each whole number among the buffers, by name; empty after the first batch."""

    def batch(self) -> AbstractContextManager[None]:
        """Context in which a batch is trained."""
        return self._watched() if self._num_left else _NOTHING

    @contextmanager
    def _watched(self) -> Iterator[None]:
        rates, counts = self._rates(), self._counts()
        yield
        self._num_left -= 1
        changes = [(was, now) for was, now in zip(rates, self._rates(), strict=False) if was != now]
        if changes:
            self._num_left = 0
            was, now = changes[0]
            notice(
                f"the learning rate was {was:g} before train_step and is {now:g} after it. If it follows a count of "
                "batches: of several ranks each counts its own, and a resumed training counts anew. Give schedule=, "
                "whose argument has the whole job's progress, or take that from this_rank().progress"
            )
        counting = [name for name, count in self._counts().items() if count == counts[name] + 1]
        if counting:
            notice(
                f"the model's {counting[0]} counts batches: of several ranks each counts its own, and rounds copy "
                "one rank's count, so that it is lower than on one device. Let what depends on it, such as a warm-up, "
                "follow this_rank().progress"
            )
        self._counters = {}

    def _rates(self) -> list[float]:
        """The groups' rates. Not those on a device, for which the host would wait."""
        rates = [group.get("lr") for optimizer in self._optimizers for group in optimizer.param_groups]
        return [
            float(rate)
            for rate in rates
            if rate is not None and not (isinstance(rate, torch.Tensor) and rate.device.type != "cpu")
        ]

    def _counts(self) -> dict[str, int]:
        """The counters' values. In the first batch the host may wait for a device."""
        return {name: int(getattr(*place)) for name, place in self._counters.items()}


def _is_whole_number(buffer: torch.Tensor) -> bool:
    is_number = not buffer.dim() and not buffer.is_meta and buffer.dtype != torch.bool
    return is_number and not buffer.is_floating_point() and not buffer.is_complex()
