"""Tells when a job's own step sets learning rates, which in a job with several ranks are then others than meant."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.optim import Optimizer

from elche.output import notice

WATCHED_BATCHES = 20
"""Batches whose rates are compared. Who sets rates by hand does so for each batch."""
_NOTHING = nullcontext()


class RateWatch:
    """Compares the learning rates before and after each of the first batches, and says once that they were changed."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._num_left = WATCHED_BATCHES

    def batch(self) -> AbstractContextManager[None]:
        """Context in which a batch is trained."""
        return self._watched() if self._num_left else _NOTHING

    @contextmanager
    def _watched(self) -> Iterator[None]:
        self._num_left -= 1
        before = self._rates()
        yield
        changes = [(was, now) for was, now in zip(before, self._rates(), strict=False) if was != now]
        if changes:
            self._num_left = 0
            was, now = changes[0]
            notice(
                f"the learning rate was {was:g} before train_step and is {now:g} after it. If it follows a count of "
                "batches, each rank counts its own, fewer than the job has, and a resumed training counts anew: "
                "give schedule=, whose argument has the whole job's progress, or take that from this_rank().progress"
            )

    def _rates(self) -> list[float]:
        """The groups' rates. Not those on a device, for which the host would wait."""
        rates = [group.get("lr") for optimizer in self._optimizers for group in optimizer.param_groups]
        return [
            float(rate)
            for rate in rates
            if rate is not None and not (isinstance(rate, torch.Tensor) and rate.device.type != "cpu")
        ]
