"""Gives out the batches of epochs, from the position of a loaded checkpoint on."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from elche.errors import Misuse
from elche.output import notice
from elche_worker.collectives.world import World
from elche_worker.trainer.checkpoints import LoopCheckpoints
from elche_worker.trainer.comparison import LEAST_COMPARED
from elche_worker.trainer.data import Batch, Data
from elche_worker.trainer.iterations import Iterations
from elche_worker.trainer.progress import ProgressTracker
from elche_worker.trainer.saving import Position
from elche_worker.trainer.stepping import Stepper


class EpochBatches(Iterator[Batch]):
    """The batches of one epoch, with a length where it is known, as progress bars need it."""

    def __init__(self, batches: Iterator[Batch], count: Callable[[], int]) -> None:
        self._batches = batches
        self._count = count

    def __next__(self) -> Batch:
        return next(self._batches)

    def __len__(self) -> int:
        """This rank's batches of the epoch, without those before a resume. Raises `TypeError` under El Che: there each
        has several of the loader's, and speeds decide how many.
        """
        return self._count()


class LoopEpochs:
    """The epochs of a loop. `check_open` raises when the loop is closed."""

    def __init__(
        self,
        progress: ProgressTracker,
        checkpoints: LoopCheckpoints,
        stepper: Stepper,
        iterations: Iterations,
        check_open: Callable[[], None],
    ) -> None:
        self._progress = progress
        self._checkpoints = checkpoints
        self._stepper = stepper
        self._iterations = iterations
        self._check_open = check_open
        self._in_progress: object | None = None
        """Token of the iterator that gives out batches now; an older iterator that is used again finds another."""

    def count(self, data: Data, epoch: int, resumed: Position | None) -> int:
        """Number of batches that each rank gets of an epoch; see `EpochBatches.__len__`."""
        if self._stepper.el_che is not None:
            raise TypeError("under El Che the number of an epoch's steps follows from the ranks' speed")
        if resumed is None or epoch > resumed.epoch:
            return data.num_batches
        return data.num_batches - resumed.done // data.batch_size if epoch == resumed.epoch else 0

    def batches(self, data: Data, epoch: int) -> Iterator[Batch]:
        """See `Trainer.epoch`."""
        progress, checkpoints, stepper = self._progress, self._checkpoints, self._stepper
        resumption = checkpoints.resumption
        resumed = resumption.position
        if resumed is not None and epoch < resumed.epoch:
            return
        if resumed is None:
            self._warn_if_again(epoch)
        self._iterations.end()
        resumption.begin()
        resumption.position = None
        progress.begin_epoch(epoch, resumed)
        start = progress.done
        progress.epoch_size, progress.batch_size = data.num_samples, data.batch_size
        order = data.restore(checkpoints.take_loader())
        waited_s = time.perf_counter()
        own = self._begin(gives_samples=True)
        for batch, step in data.epoch(epoch, start, order if start else None):
            self._check_open()
            if self._in_progress is not own:
                raise Misuse(f"epoch {epoch} was left for another: take all its batches before you begin the next")
            progress.add_data_wait(waited_s)
            progress.epoch_size = data.num_samples  # its sampler may give others in each epoch
            stepper.begin_batch(batch.size, step)
            with self._given():
                yield batch
            stepper.clock.end_batch()
            waited_s = time.perf_counter()
        self._in_progress = None
        stepper.end_epoch(epoch)
        stepper.comparison.compare("ends epoch()", least=LEAST_COMPARED)
        stepper.comparison.leave()
        progress.end_epoch()

    def shares(self, world: World, batch_size: int, num_steps: int | None) -> Iterator[int]:
        """See `Trainer.shares`."""
        progress, stepper = self._progress, self._stepper
        steps = stepper.share_batches(batch_size)
        if self._checkpoints.resumption.position is not None and num_steps is not None:
            self._warn_if_complete(progress.num_steps, num_steps, "steps", "shares()")
        self._checkpoints.resumption.begin()
        progress.batch_size = batch_size
        own = self._begin(gives_samples=False)
        while num_steps is None or progress.num_steps < num_steps:
            self._check_open()
            if self._in_progress is not own:
                raise Misuse(
                    "this shares() was left for another, or for an epoch: take all its steps before you begin the next"
                )
            step = next(steps)
            share = sum(size for _, size in step.of(world.number))
            stepper.begin_batch(share, step)
            with self._given():
                yield share
            stepper.clock.end_batch()
        self._in_progress = None
        stepper.comparison.compare("ends shares()")

    def _warn_if_complete(self, num_made: int, num_asked: int, what: str, call: str) -> None:
        """Says so if a resumed loop has nothing left to train."""
        if num_made >= num_asked and not self._checkpoints.rank:
            notice(
                f"the checkpoint has {num_made} {what} already, and {call} asks for {num_asked}: nothing is left to "
                "train; ask for more to train on"
            )

    def _warn_if_again(self, epoch: int) -> None:
        """Says so if an epoch is begun that was interrupted, as in a notebook whose cell is run again."""
        progress = self._progress
        if progress.has_left(epoch) and not self._checkpoints.rank:
            notice(
                f"epoch {epoch} begins again: this loop was left in epoch {progress.epoch}, after "
                f"{progress.epoch_steps} of its steps, and the model keeps all {progress.num_steps} that were made. "
                "To go on from a checkpoint instead, call trainer.load(FOLDER) first"
            )

    @contextmanager
    def _given(self) -> Iterator[None]:
        """Around the loop's work on a batch. It may be left there, too."""
        with self._iterations.given():
            try:
                yield
            except GeneratorExit:
                self._stepper.comparison.leave()
                raise
            finally:
                self._stepper.leave_batch()

    def _begin(self, *, gives_samples: bool) -> object:
        """Returns the token of a new iterator, and forgets batches of the one before that were not trained."""
        if self._in_progress is not None or self._stepper.has_only_looked:
            self._stepper.forget_batches()
        self._in_progress, self._progress.gives_samples = object(), gives_samples
        return self._in_progress

    def numbers(self, count: int) -> Iterator[int]:
        """See `Trainer.epochs`."""
        progress, resumption = self._progress, self._checkpoints.resumption
        progress.num_epochs = count
        if resumption.position is not None:
            self._warn_if_complete(resumption.position.epoch, count, "epochs", "epochs()")
        for epoch in range(resumption.position.epoch if resumption.position is not None else 0, count):
            if resumption.position is None:
                self._warn_if_again(epoch)
            resumption.begin_epoch(epoch)
            progress.begin_epoch(epoch, resumption.position)
            try:
                yield epoch
            except GeneratorExit:
                self._stepper.comparison.leave()
                raise
            resumption.position = None
            if progress.epoch == epoch:
                progress.end_epoch()
            self._iterations.end()
        self._stepper.comparison.compare("ends epochs()")
