"""Times each batch on the device without synchronising with it."""

import time
from collections import deque
from typing import Any

import torch

MAX_AHEAD = 2
"""Batches that the host may queue ahead: more would delay control, fewer could leave the device idle."""


Interval = tuple[float, float]
"""(start, end), times of `time.perf_counter` in seconds."""


class BatchTimer:
    """Times batches in order. This one is for the CPU, on which a batch has ended when its call returns."""

    def __init__(self, *, keeps_intervals: bool = False) -> None:
        self._ended: list[float] = []
        """Times in ms of batches that have ended and were not taken."""
        self._started_s = 0.0
        self._intervals: list[Interval] | None = [] if keeps_intervals else None

    def start(self) -> None:
        """Begins a batch."""
        self._started_s = time.perf_counter()

    def stop(self) -> None:
        """Ends the batch: all its work is queued."""
        ended_s = time.perf_counter()
        self._ended.append((ended_s - self._started_s) * 1000)
        if self._intervals is not None:
            self._intervals.append((self._started_s, ended_s))

    def drop(self) -> None:
        """Discards the batch that began."""

    def take(self) -> list[float]:
        """Times in ms of batches that have ended since the last call. Does not synchronise."""
        ended, self._ended = self._ended, []
        return ended

    def finish(self) -> list[float]:
        """Like `take`, after waiting for the last batch."""
        return self.take()

    def take_intervals(self) -> list[Interval]:
        """Intervals in which those batches ran, if recorded."""
        ended = self._intervals or []
        if ended:
            self._intervals = []
        return ended


class DeviceTimer(BatchTimer):
    """Timer for CUDA, by events that have passed. Intervals are relative to one at the latest `finish`."""

    def __init__(self, *, keeps_intervals: bool = False) -> None:
        super().__init__(keeps_intervals=keeps_intervals)
        self._base: Any = None
        self._base_s = 0.0
        """Host time at which the event `_base` had passed. Events know only the time between two of them."""
        if keeps_intervals:
            self._rebase()
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        """Start and end of each batch that has not ended on the device yet."""
        self._free: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        """Pairs to use again: creating an event takes longer than recording one."""

    def start(self) -> None:
        if len(self._pending) >= MAX_AHEAD:
            self._pending[0][1].synchronize()
            self._collect()
        pair = self._free.pop() if self._free else _new_pair()
        self._pending.append(pair)
        pair[0].record()

    def stop(self) -> None:
        self._pending[-1][1].record()

    def drop(self) -> None:
        self._free.append(self._pending.pop())

    def take(self) -> list[float]:
        self._collect()
        return super().take()

    def finish(self) -> list[float]:
        if self._pending:
            self._pending[-1][1].synchronize()
        ended = self.take()
        if self._intervals is not None:
            self._rebase()
        return ended

    def _rebase(self) -> None:
        self._base, _ = _new_pair()
        self._base.record()
        self._base.synchronize()
        self._base_s = time.perf_counter()

    def _collect(self) -> None:
        while self._pending and self._pending[0][1].query():  # type: ignore[no-untyped-call]
            pair = self._pending.popleft()
            self._ended.append(pair[0].elapsed_time(pair[1]))
            if self._intervals is not None:
                start_s = self._base_s + self._base.elapsed_time(pair[0]) / 1000
                self._intervals.append((start_s, start_s + self._ended[-1] / 1000))
            self._free.append(pair)


def _new_pair() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    event: Any = torch.cuda.Event  # untyped
    # `blocking`: the host is up to two batches ahead and waits for most of a batch; it would spin, which takes a core.
    return event(enable_timing=True, blocking=True), event(enable_timing=True, blocking=True)


def new_timer(device: torch.device, *, keeps_intervals: bool) -> BatchTimer:
    """The timer for a device; with `keeps_intervals` it also records the interval of each batch."""
    kind = DeviceTimer if device.type == "cuda" else BatchTimer
    return kind(keeps_intervals=keeps_intervals)
