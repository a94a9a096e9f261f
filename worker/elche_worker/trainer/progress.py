"""The position of a loop: steps, epoch and samples, for checkpoints and the coordinator."""

import time
from typing import Any

import torch

from elche import timeline
from elche.v1 import rank_pb2
from elche_worker.trainer.attachment import Attachment
from elche_worker.trainer.plans import Step
from elche_worker.trainer.saving import Position
from elche_worker.user.scalars import take_scalars, wide


class ProgressTracker:
    """The loop's position, equal on every rank, and this rank's reports on it to the coordinator."""

    def __init__(self) -> None:
        self.attachment: Attachment = Attachment()
        self.num_steps = 0
        self.epoch = 0
        self.done = 0
        """Samples of the epoch that all ranks have trained."""
        self.epoch_steps = 0
        """Steps that were made in the epoch."""
        self.num_epochs = 0
        """Number of epochs that the loop trains; 0 if not known."""
        self.gives_samples = True
        """True if elche decides which samples are trained, so that the loop can resume within an epoch."""
        self.epoch_size = 0
        self.batch_size = 0
        self._is_epoch_open = False
        self._epoch_started_s = 0.0
        self._loss_sum: Any = 0.0
        self._num_losses = 0
        self._averaging_ms = 0.0

    @property
    def position(self) -> Position:
        """The position for a checkpoint. The end of an epoch is the beginning of the next one."""
        return Position(self.num_steps, self.epoch, self.done, self.epoch_steps)

    @property
    def has_whole_epoch(self) -> bool:
        """True if all samples of the open epoch are trained."""
        return self._is_epoch_open and self.gives_samples and 0 < self.epoch_size <= self.done

    def where(self, num_batches: int) -> str:
        """The position as text; `num_batches` were given out to each rank."""
        batches = f" and {num_batches} batches" if num_batches else ""
        return f"after {self.num_steps} steps{batches} (epoch {self.evaluated_epoch})"

    def restore(self, position: Position) -> None:
        """Continues from a checkpoint's position."""
        self.num_steps, self.epoch = position.num_steps, position.epoch
        self.done, self.epoch_steps = position.done, position.epoch_steps

    def has_left(self, epoch: int) -> bool:
        """True if the loop has left this epoch, or a later one, before its end, with steps that are in the model."""
        return self._is_epoch_open and self.epoch >= epoch and self.epoch_steps > 0

    def begin_epoch(self, epoch: int, resumed: Position | None = None) -> None:
        """Opens an epoch; that of the resumed position goes on from there."""
        if not self._is_epoch_open or epoch != self.epoch:
            self._is_epoch_open, self._epoch_started_s = True, time.perf_counter()
        self.epoch, self.done, self.epoch_steps = epoch, 0, 0
        if resumed is not None and resumed.epoch == epoch:
            self.done, self.epoch_steps = resumed.done, resumed.epoch_steps

    def end_epoch(self) -> None:
        """Ends the open epoch. Idempotent."""
        if not self._is_epoch_open:
            return
        self._is_epoch_open = False
        self._add_rest()
        self.attachment.end_epoch(self.epoch, self.done, time.perf_counter() - self._epoch_started_s)
        self.epoch, self.done, self.epoch_steps = self.epoch + 1, 0, 0

    @property
    def evaluated_epoch(self) -> int:
        """The epoch that an evaluation made now belongs to: the open one, else the last one."""
        return self.epoch if self._is_epoch_open else max(0, self.epoch - 1)

    def add_loss(self, loss: torch.Tensor) -> None:
        """Adds one batch's loss, without waiting for the device."""
        if self.attachment.is_attached:
            self._loss_sum = self._loss_sum + wide(loss)
            self._num_losses += 1

    def add_step(
        self,
        step: Step | None,
        number: int,
        told_samples: int | None,
        batch_ms: list[float],
        sync_ms: float,
        *,
        is_same_batch: bool = False,
    ) -> None:
        """Counts a step; `is_same_batch`: another optimizer was stepped with the same batches before."""
        self.num_steps += 1
        is_given = step is not None and self.gives_samples
        if not is_given or self._is_epoch_open:  # else it is of the last batches of an epoch that has ended
            self.epoch_steps += 1
            self.done += sum(step.samples) if step is not None and is_given else 0
        if not self.attachment.is_attached:
            return
        self._averaging_ms += sync_ms
        own = step.of(number) if step is not None else ()
        num_samples = sum(size for _, size in own) if step is not None else told_samples or 0
        num_batches = len(own) if step is not None else int(not is_same_batch)
        if len(batch_ms) == 1 and num_batches > 1:  # one time for all batches
            batch_ms = [batch_ms[0] / num_batches] * num_batches
        self._add_batches(num_batches, num_samples)
        self.attachment.add_times(batch_ms, sync_ms, 0.0)

    def _add_batches(self, num_batches: int, num_samples: int) -> None:
        """Adds batches, with the losses and scalars recorded since the last ones."""
        scalars = take_scalars()
        if not self._num_losses and "loss" in scalars:
            self._loss_sum, self._num_losses = scalars.pop("loss")
        self.attachment.add_batches(num_batches, num_samples, self._loss_sum, self._num_losses, scalars)
        self._loss_sum, self._num_losses = 0.0, 0

    def _add_rest(self) -> None:
        """Adds losses and scalars that were recorded after the last step."""
        if self.attachment.is_attached:
            self._add_batches(0, 0)

    def report(self, anchor: int, learning_rate: float | None, *, is_last: bool = False) -> None:
        """Reports the position, at most once per interval."""
        if not self.attachment.is_attached:
            return
        if is_last:
            self._add_rest()
        progress = rank_pb2.LoopProgress(
            num_steps=self.num_steps,
            epoch=self.epoch,
            num_epochs=self.num_epochs,
            epoch_size=self.epoch_size,
            epoch_done=self.done,
            batch_size=self.batch_size,
            anchor=anchor,
            averaging_ms=self._averaging_ms,
        )
        self.attachment.report(progress, learning_rate, is_last=is_last)

    def add_data_wait(self, started_s: float) -> None:
        """Adds a wait for data from `started_s` until now."""
        if self.attachment.is_attached:
            ended_s = time.perf_counter()
            self.attachment.add_times([], 0.0, (ended_s - started_s) * 1000)
            self.attachment.add_span(timeline.WAIT_DATA, started_s, ended_s)

    def add_span(self, kind: int, started_s: float, detail: int = 0) -> None:
        """Adds a span from `started_s` until now to the timeline."""
        self.attachment.add_span(kind, started_s, time.perf_counter(), detail)
