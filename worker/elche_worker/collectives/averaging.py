"""One round of averaging: header, collective on flat buffers, result into the model.

The collective runs on its own thread. A blocking round waits for it. In an overlapped round the rank trains on, and the
result is added as a correction to what it has trained since.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from enum import Enum
from math import nan
from typing import Any

import torch

from elche_worker.collectives.header import AveragingOptions, Row
from elche_worker.collectives.operations import Collectives
from elche_worker.collectives.outliers import StepWatch
from elche_worker.collectives.reduction import AverageResult, Reduction, Sent
from elche_worker.device.streams import DeviceStreams
from elche_worker.model.layout import CPU, Layout

ABORT_AGAIN_S = 0.5
"""Seconds between two attempts to abort a collective: one that comes before the collective has begun has no effect."""


class ValuesPlace(Enum):
    """The place at which a round holds its values."""

    DEVICE = "on the device of the group's collectives, which may be the host"
    PINNED = "in page-locked host memory, which a GPU copies from and to asynchronously"
    PAGEABLE = "in pageable host memory, which is freed after the round"


class Averaging:
    """A rank's rounds, one at a time. `wake` is called on the collective's thread when the collective has ended."""

    def __init__(
        self,
        layout: Layout,
        options: AveragingOptions,
        *,
        wake: Callable[[], None],
        streams: DeviceStreams | None = None,
        measures_divergence: bool = True,
        agree: Callable[[bool], bool] = bool,
    ) -> None:
        """`agree` returns True if a condition holds in all processes of the rank; called on the collective's thread."""
        # In a replica group each process has its own part of the values. If one took a result and another did not, or
        # one found its values finite and another did not, the parts of the model would be of different rounds.
        self._agree = agree
        self._layout = layout
        self._wake = wake
        self._streams = streams or DeviceStreams()
        self._measures_divergence = measures_divergence
        self.reduction = Reduction(layout, options, agree=agree)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="averaging")
        self._watch = StepWatch()
        self._waits_for_check = options.nonfinite == "skip"
        """With `nonfinite="skip"`, the rank does not train before its values are checked: steps on values that are left
        out could not be undone. (With "fail" the job ends.)
        """
        self._is_checked = threading.Event()
        self.is_unusual = False
        """True once this rank's values may be left out: it waits for the result, since further steps are dropped."""
        self.place = ValuesPlace.DEVICE
        """Where the next round holds its values."""
        self._gathered: Any = None
        """The device event after which the latest round's snapshot is complete; None once it is waited for."""
        self._is_alone = False
        """True if the round that was started last has this rank alone: its result is the model, as it is."""
        self._running: Future[AverageResult] | None = None
        """The round that was started and not completed; None between rounds."""
        self._group: Collectives | None = None
        """The group of the round that was started last."""
        self._abandoned: set[int] = set()
        """Generations whose rounds are aborted, running ones and such as start later."""
        self._aborted: Future[AverageResult] | None = None
        """The latest round that is being aborted."""
        self._starts_abort = threading.Lock()
        self._buffers: dict[str, torch.Tensor] = {}
        """Copies, made at the entry, of tensors that are broadcast from the source and that training changes."""
        self._put_back: Callable[[], None] | None = None
        """Puts the source's newer values of broadcast tensors back; None where there are none."""

    def num_copies(self, keeps_snapshot: bool) -> int:
        """Most copies of each averaged value that a round holds at once, the flat buffers included."""
        return 1 + keeps_snapshot + self.reduction.num_copies

    @property
    def is_running(self) -> bool:
        """True if a round was started and not completed."""
        return self._running is not None

    @property
    def is_done(self) -> bool:
        """True if the round's collective has ended, so that `complete` does not wait."""
        return self._running is not None and self._running.done()

    def start(
        self, group: Collectives, row: Row, *, keeps_snapshot: bool, keeps_result: bool = True, state: bytes = b""
    ) -> None:
        """Takes the snapshot and starts the collective. All else runs on the collective's thread and stream: this call
        does not wait for the device. The snapshot is kept when the rank may train on. `state` goes to ranks that join.

        A rank alone has its result at once, its own model, unless there is an outer step or a moving average. With
        `keeps_result` the model is copied, for readers of the result after the rank has trained on.
        """
        self._is_alone = group.size == 1 and not self.reduction.follows_one
        if self._is_alone:
            averaged = self._alone(group, row, keeps_result=keeps_result)
            self._running, self._group = Future(), group
            self._running.set_result(averaged)
            self._wake()
            return
        is_pinned = self.place is not ValuesPlace.PAGEABLE
        self._layout.place(group.device if self.place is ValuesPlace.DEVICE else CPU, is_pinned=is_pinned)
        # On the stream that computes: the next forward pass changes buffers, and `order_change` holds up only the step.
        self._layout.gather_buffers(keep=keeps_snapshot)
        # Copied now: the source broadcasts them only after the values, when it has trained on.
        self._buffers = self._layout.copied_buffers() if keeps_snapshot else {}
        # While training goes on, a sharded model's forward gathers its parameters: its shards are not accessible then.
        sent = Sent.of(self._layout) if self._layout.is_divided else None
        # The copy runs on a stream of its own, beside the next forward and backward pass, which only read parameters.
        # `order_change` keeps the next optimizer step behind it: else the snapshot would have parameters of two steps.
        self._streams.hand_over()
        with self._streams.communication():
            self._layout.gather_parameters()
        self._gathered = self._streams.communicated()
        self.is_unusual = False
        self._is_checked.clear()
        self._group = group
        self._running = self._thread.submit(self._run, group, row, sent, state)
        self._running.add_done_callback(self._on_ended)
        # `abandon` may have come before `_running` was set, and found nothing to abort: the loop would wait forever.
        if group.generation in self._abandoned:
            self._begin_abort(self._running, group)
        if self._waits_for_check:
            self._is_checked.wait()

    def order_change(self) -> None:
        """Has the device queue wait for the snapshot: call it before queueing work that changes parameters."""
        if self._gathered is not None:
            self._streams.receive(self._gathered)
            self._gathered = None

    def _alone(self, group: Collectives, row: Row, *, keeps_result: bool) -> AverageResult:
        """The round of a rank alone. Waits for the device, as its caller just has, to check the values. A copy is freed
        after the round; one to pageable host memory takes 30 ms for 400 MB on an H100.
        """
        started_s = time.perf_counter()
        if keeps_result:
            self._layout.place(group.device if self.place is ValuesPlace.DEVICE else CPU, is_pinned=False)
            self._layout.gather()
            self._streams.finish_compute()
        else:
            self._layout.release()
        # Weight 0: a newcomer, or a rank without new samples. Its values do not count, so they may be anything.
        is_finite = self._agree(not row.weight or self._layout.is_model_finite())
        self._watch.is_usual(nan, row.local_step)  # NaN: without a last result the step's length is not known
        self.is_unusual = False
        elapsed_ms = (time.perf_counter() - started_s) * 1000
        row = replace(row, finite=int(is_finite), frozen=self._layout.frozen_digest())
        return self.reduction.of_one(row, elapsed_ms)

    def abort(self, patience_s: float) -> bool:
        """Aborts a collective that waits for other ranks, and waits until it has returned: only then may the flat
        buffers be used again, and nothing on the device waits for it (W9). Returns True if it returned within
        `patience_s`. The abort itself may hang, so it runs on a thread; it is repeated until the collective has ended.

        No round can follow on the same group. `complete` returns the round's result, or raises its error.
        """
        running, group = self._running, self._group
        if running is None or group is None or running.done():
            return True
        self._begin_abort(running, group)
        wait([running], patience_s)
        return running.done()

    def abandon(self, generation: int) -> None:
        """Aborts the generation's round, also one that is about to start. May be called on any thread, and returns at
        once: the thread that trains may be blocked until the collective ends. CUDA loads a kernel when it is launched
        for the first time, and waits for running kernels then, such as a collective's that waits for a lost rank.
        """
        self._abandoned.add(generation)  # before `_running` is read, which `start` sets before it reads this
        running, group = self._running, self._group
        if running is not None and group is not None and group.generation == generation:
            self._begin_abort(running, group)

    def _begin_abort(self, running: Future[AverageResult], group: Collectives) -> None:
        # The loop and the session's thread may both come here with the same round: one thread aborts it.
        with self._starts_abort:
            if self._aborted is running:
                return
            self._aborted = running

        def end() -> None:
            while not running.done():
                # An abort that raises is repeated: if it ended this thread, the loop would wait for its collective
                # forever.
                with suppress(Exception):
                    group.abort()
                wait([running], ABORT_AGAIN_S)

        # A daemon: an abort that hangs in the driver must not keep the process from exiting.
        threading.Thread(target=end, name="abort", daemon=True).start()

    def _on_ended(self, ended: Future[AverageResult]) -> None:
        """Wakes the loop. Runs on the collective's thread."""
        self._is_checked.set()  # also when it failed before the check: the loop waits for this event
        self._wake()

    def _run(self, group: Collectives, row: Row, sent: Sent | None, state: bytes) -> AverageResult:
        with self._streams.communication():
            if self._layout.device.type == "cpu":
                self._streams.finish_communication()  # only now are values in host memory complete
            self._layout.fill()
            row = self._check(row)
            self._is_checked.set()
            averaged = self.reduction.run(group, row, sent or Sent.lazily(self._layout, self._buffers), state)
            return replace(averaged, distance=self._compared())

    def _compared(self) -> tuple[float, float] | None:
        """The L2 norms of `AverageResult.distance`, or None if not measured. `compare` also prepares the correction, so
        it runs whenever a snapshot is kept.
        """
        if not self._measures_divergence and not self._layout.is_kept:
            return None
        distance = self._layout.compare()
        return distance if self._measures_divergence else None

    def _check(self, row: Row) -> Row:
        """The row, with flags that say if this rank's values are finite and its step is unusually long."""
        is_finite = self._agree(not row.weight or self._layout.is_finite())
        # Values that are not finite are not judged by length too: `nonfinite` alone decides about them.
        is_usual = self._agree(self._watch.is_usual(self.reduction.step_norm(), row.local_step) or not is_finite)
        if not (is_finite and is_usual):
            self.is_unusual = True
            self._wake()
        return replace(row, finite=int(is_finite), unusual=int(not is_usual))

    def complete(self, *, has_newer_steps: bool) -> AverageResult:
        """Waits for the result and puts it into the model. Without newer steps it replaces the parameters bit for bit;
        with newer steps it is added as a correction. Newer steps on values that were left out are dropped.

        Raises `CollectiveFailed`, `RoundAborted` or `RanksDiffer`; the model is then unchanged.
        """
        assert self._running is not None
        running, self._running, self._group = self._running, None, None  # before `result`, which may raise
        self._put_back = None
        averaged = running.result()
        self._watch.learn(is_averaged=not averaged.is_discarded)
        if self._is_alone:
            return averaged
        self._streams.take_back(averaged.broadcast_bytes)
        if has_newer_steps and not averaged.is_discarded:
            # result + (parameters now - snapshot): the newer steps stay, as if they had been made on the result.
            self._layout.correct(self.reduction.bounds, is_alone=len(averaged.rows) == 1)
        else:
            self._layout.apply()
        if (raw := averaged.broadcast_bytes).numel():
            if averaged.is_source and has_newer_steps and not averaged.is_discarded:
                self._put_back = self._layout.own_values(raw)
            self._layout.apply_bytes(raw)
        return averaged

    def take_own(self) -> None:
        """Puts values that newer steps have made of broadcast tensors back into the source's model, once nobody reads
        the result any more. It would go back a part of each round otherwise, and with it a slow encoder, or a queue.
        """
        put_back, self._put_back = self._put_back, None
        if put_back is not None:
            put_back()
