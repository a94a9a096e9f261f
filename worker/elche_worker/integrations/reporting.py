"""What a framework's callback knows of its training, for the coordinator: epochs, losses and metrics."""

import os
from collections.abc import Mapping
from typing import Any

from elche.errors import Misuse
from elche_worker.trainer import Trainer
from elche_worker.user.scalars import MAX_NAME_CHARS, number_of, record_scalar

MAX_METRICS = 100
"""Of one log or evaluation; what is only shown must not end a training."""


def check_begins_anew(way: str) -> None:
    """Raises `Misuse` where a checkpoint of elche is to be resumed, which has nothing of the framework's own position:
    it would train all steps again, on top. `way`: how the framework goes on.
    """
    if path := os.environ.get("ELCHE_RESUME"):
        raise Misuse(f"{path} lacks the framework's own state, its step, schedule and data: go on with {way}")


class Reporting:
    """Reports what a framework measures as the coordinator has it of loops; without a coordinator, nothing."""

    def __init__(self, trainer: Trainer, num_epochs: int) -> None:
        """`num_epochs`: how many the framework trains; 0 if it does not know."""
        self._trainer = trainer
        self._progress = trainer._progress
        self._progress.num_epochs = num_epochs

    @property
    def is_heard(self) -> bool:
        """True if there is a coordinator."""
        return self._progress.attachment.is_attached

    def begin_epoch(self, epoch: int) -> None:
        """An epoch begins, and with it ends the one before, with what was logged and evaluated after its last batch."""
        self._progress.end_epoch()
        self._progress.begin_epoch(epoch)

    def record(self, values: Mapping[str, Any]) -> None:
        """Adds to the means of the epoch; "loss" is that of batches."""
        if self.is_heard:
            for name, value in _reported(values).items():
                record_scalar(name, value)

    def evaluated(self, metrics: Mapping[str, Any]) -> None:
        """An evaluation has made these; those of rank 0 count."""
        if numbers := _reported(metrics):
            self._trainer.report(**numbers)

    def end(self) -> None:
        """Training has ended, and with it its last epoch."""
        self._progress.end_epoch()


def _reported(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are numbers, or tensors of one, which are not read here."""
    kept = {
        name: value
        for name, value in values.items()
        if len(name) <= MAX_NAME_CHARS and (getattr(value, "numel", int)() == 1 or number_of(value) is not None)
    }
    return dict(list(kept.items())[:MAX_METRICS])
