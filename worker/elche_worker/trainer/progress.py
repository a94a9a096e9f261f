"""Where a loop of the user's own is: steps, epoch, samples; what a checkpoint keeps of it, and what others are told."""

import time
from dataclasses import dataclass
from typing import Any

import torch

from elche import timeline
from elche.v1 import rank_pb2
from elche_worker.trainer.attached import Attachment
from elche_worker.trainer.plans import Step
from elche_worker.trainer.saving import Position
from elche_worker.user.scalars import take_scalars

REQUEST_DELAY_STEPS = 2
"""Steps between a wish and what all ranks do about it: by then it has come from the device without anybody waiting."""


@dataclass(frozen=True, slots=True)
class Requests:
    """What some rank wants, and all do after the same step."""

    cancel: bool = False
    checkpoint: bool = False
    pause: bool = False


class RequestConsensus:
    """Wishes of any rank travel with the gradients; `take` gives each to all ranks at the same step."""

    NUM_REQUESTS = 3

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._coming: list[tuple[torch.Tensor, Any]] = []

    def put(self, sums: torch.Tensor) -> None:
        """The requests of a step, added up over all ranks."""
        if not (self._is_cuda and sums.is_cuda):
            self._coming.append((sums.clone(), None))
            return
        copied = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
        copied.copy_(sums, non_blocking=True)
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._coming.append((copied, event))

    def take(self) -> Requests:
        """What is due now."""
        if len(self._coming) <= REQUEST_DELAY_STEPS:
            return Requests()
        sums, event = self._coming.pop(0)
        if event is not None:
            event.synchronize()
        return Requests(*(bool(one) for one in sums.tolist()))


class ProgressTracker:
    """The loop's position, alike on every rank, and what this rank says of it to a coordinator, if there is one."""

    def __init__(self, attachment: Attachment | None) -> None:
        self.attachment = attachment
        self.num_steps = 0
        self.epoch = 0
        self.done = 0
        """Samples of the epoch that all ranks have trained."""
        self.num_epochs = 0
        """0: nobody has said."""
        self.epoch_size = 0
        self.batch_size = 0
        self._is_epoch_open = False
        self._epoch_started_s = 0.0
        self._loss_sum: Any = 0.0
        self._num_losses = 0
        self._averaging_ms = 0.0

    @property
    def position(self) -> Position:
        """Where the loop is: an epoch that has ended is the next one's beginning."""
        return Position(self.num_steps, self.epoch, self.done)

    def restore(self, position: Position) -> None:
        """Goes on from there."""
        self.num_steps, self.epoch, self.done = position.num_steps, position.epoch, position.done

    def begin_epoch(self, epoch: int, done: int = 0) -> None:
        """An epoch begins, of which as many samples are trained already."""
        if not self._is_epoch_open or epoch != self.epoch:
            self._is_epoch_open, self._epoch_started_s = True, time.perf_counter()
        self.epoch, self.done = epoch, done

    def end_epoch(self) -> None:
        """It has ended; twice is as once."""
        if not self._is_epoch_open:
            return
        self._is_epoch_open = False
        if self.attachment is not None:
            self.attachment.end_epoch(self.epoch, time.perf_counter() - self._epoch_started_s)
        self.epoch, self.done = self.epoch + 1, 0

    @property
    def evaluated_epoch(self) -> int:
        """That of an evaluation that is made now: the epoch that is open, else the last one."""
        return self.epoch if self._is_epoch_open else max(0, self.epoch - 1)

    def add_loss(self, loss: torch.Tensor) -> None:
        """Of one batch."""
        if self.attachment is not None:
            self._loss_sum = self._loss_sum + loss.detach()
            self._num_losses += 1

    def add_step(
        self,
        step: Step | None,
        rank: int,
        told_samples: int | None,
        batch_ms: list[float],
        sync_ms: float,
        *,
        is_same_batch: bool = False,
    ) -> None:
        """A step is made; `is_same_batch`: with what a step of another optimizer was made with before."""
        self.num_steps += 1
        if step is not None:
            self.done += sum(step.samples)
        attachment = self.attachment
        if attachment is None:
            return
        self._averaging_ms += sync_ms
        scalars = take_scalars()
        if not self._num_losses and "loss" in scalars:
            self._loss_sum, self._num_losses = scalars.pop("loss")
        num_samples = step.samples[rank] if step is not None else told_samples or 0
        num_batches = step.batches[rank] if step is not None else int(not is_same_batch)
        if len(batch_ms) == 1 and num_batches > 1:  # of all of them
            batch_ms = [batch_ms[0] / num_batches] * num_batches
        attachment.add_batches(num_batches, num_samples, self._loss_sum, self._num_losses, scalars)
        attachment.add_times(batch_ms, sync_ms, 0.0)
        self._loss_sum, self._num_losses = 0.0, 0

    def report(self, anchor: int, learning_rate: float, *, is_last: bool = False) -> None:
        """Says where it is, now and then."""
        if self.attachment is None:
            return
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

    def note_wait(self, started_s: float) -> None:
        """The loop has waited for data since then."""
        if self.attachment is not None:
            ended_s = time.perf_counter()
            self.attachment.add_times([], 0.0, (ended_s - started_s) * 1000)
            if self.attachment.timeline is not None:
                self.attachment.timeline.add(timeline.WAIT_DATA, started_s, ended_s)

    def note(self, kind: int, started_s: float, detail: int = 0) -> None:
        """One span of the timeline, if there is one."""
        if self.attachment is not None and self.attachment.timeline is not None:
            self.attachment.timeline.add(kind, started_s, time.perf_counter(), detail)
