"""Gives out the batches of epochs, from where a loaded checkpoint was."""

import time
from collections.abc import Callable, Iterator

from elche.errors import Misuse
from elche_worker.trainer.checkpoints import LoopCheckpoints
from elche_worker.trainer.data import Batch, Data
from elche_worker.trainer.progress import ProgressTracker
from elche_worker.trainer.stepping import Stepper


class Epochs:
    """The epochs of a loop. `check_open` raises when the loop is closed."""

    def __init__(
        self, progress: ProgressTracker, checkpoints: LoopCheckpoints, stepper: Stepper, check_open: Callable[[], None]
    ) -> None:
        self._progress = progress
        self._checkpoints = checkpoints
        self._stepper = stepper
        self._check_open = check_open
        self._in_progress: object | None = None
        """Stands for the epoch that gives out batches."""

    def batches(self, data: Data, epoch: int) -> Iterator[Batch]:
        """See `Trainer.epoch`."""
        progress, checkpoints, stepper = self._progress, self._checkpoints, self._stepper
        resumed = checkpoints.resumed
        if resumed is not None and epoch < resumed.epoch:
            return
        checkpoints.resumed = None
        start = resumed.done if resumed is not None and epoch == resumed.epoch else 0
        progress.begin_epoch(epoch, start)
        progress.epoch_size, progress.batch_size = data.num_samples, data.batch_size
        checkpoints.restore_rng_state(progress.num_steps)
        order = data.restore(checkpoints.take_loader())
        waited_s = time.perf_counter()
        if self._in_progress is not None:  # that epoch was left for this one
            stepper.forget_batches()
        own = self._in_progress = object()
        for batch, step in data.epoch(epoch, start, order if start else None):
            self._check_open()
            if self._in_progress is not own:
                raise Misuse(f"epoch {epoch} was left for another: take its batches before you begin that")
            progress.add_data_wait(waited_s)
            stepper.begin_batch(batch, step)
            yield batch
            stepper.clock.end_batch()
            waited_s = time.perf_counter()
        self._in_progress = None
        progress.end_epoch()

    def numbers(self, count: int) -> Iterator[int]:
        """See `Trainer.epochs`."""
        progress, resumed = self._progress, self._checkpoints.resumed
        self._checkpoints.restore_rng_state(progress.num_steps)
        progress.num_epochs = count
        for epoch in range(resumed.epoch if resumed is not None else 0, count):
            progress.begin_epoch(epoch, resumed.done if resumed is not None and resumed.epoch == epoch else 0)
            yield epoch
            self._checkpoints.resumed = None
            if progress.epoch == epoch:
                progress.end_epoch()
