"""Reports of a framework's callback to the coordinator: epochs, losses and metrics."""

import os
from collections.abc import Mapping
from typing import Any

from elche.errors import Misuse
from elche_worker.trainer import Trainer
from elche_worker.user.scalars import MAX_NAME_CHARS, number_of, record_scalar

MAX_METRICS = 100
"""Most metrics of one log or evaluation; more are dropped, since metrics must not end a training."""


def leave_resume_to_framework(num_steps: int, way: str) -> None:
    """Unsets ELCHE_RESUME, so that `Trainer.setup` does not load elche's checkpoint over the framework's own.

    `num_steps` is the framework's step: 0 if it has not resumed. Then raises `Misuse` if ELCHE_RESUME is set, since
    elche's checkpoint lacks the framework's position, and all steps would be trained again. `way` says, in the error,
    how to resume with the framework.
    """
    path = os.environ.get("ELCHE_RESUME")
    if path and not num_steps:
        raise Misuse(f"{path} lacks the framework's own state, its step, schedule and data: go on with {way}")
    os.environ.pop("ELCHE_RESUME", None)


def of_rank_0(trainer: Trainer, own: Any) -> Any:
    """Rank 0's value, of plain values and tensors, on every rank. Every rank calls it, at the end of training."""
    world = trainer._world
    if world.size == 1:
        return own
    return trainer._together.run(lambda: world.share_state(own, 0), "ends its training")


class Reporting:
    """Reports a framework's epochs and metrics as those of a user-owned loop; does nothing without a coordinator."""

    def __init__(self, trainer: Trainer, num_epochs: int) -> None:
        """`num_epochs`: the number that the framework trains; 0 if unknown."""
        self._trainer = trainer
        self._progress = trainer._progress
        self._progress.num_epochs = num_epochs

    @property
    def is_attached(self) -> bool:
        """True if there is a coordinator."""
        return self._progress.attachment.is_attached

    def begin_epoch(self, epoch: int) -> None:
        """Begins an epoch and ends the one before, including metrics logged after its last batch."""
        self._progress.end_epoch()
        self._progress.begin_epoch(epoch)

    def record(self, values: Mapping[str, Any]) -> None:
        """Adds values to the means of the epoch; "loss" is the batches' loss."""
        if self.is_attached:
            for name, value in _reported(values).items():
                record_scalar(name, value)

    def evaluated(self, metrics: Mapping[str, Any]) -> None:
        """Reports an evaluation's metrics; those of rank 0 count."""
        if numbers := _reported(metrics):
            self._trainer.report(**numbers)

    def end(self) -> None:
        """Ends the last epoch at the end of training."""
        self._progress.end_epoch()


def _reported(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that are numbers or tensors with one element; the latter are not read from the device here."""
    kept = {
        name: value
        for name, value in values.items()
        if len(name) <= MAX_NAME_CHARS and (getattr(value, "numel", int)() == 1 or number_of(value) is not None)
    }
    return dict(list(kept.items())[:MAX_METRICS])
