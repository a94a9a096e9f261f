"""Times this rank's batches and steps."""

import os
import time
from collections import deque
from collections.abc import Sequence

import torch

from elche_worker.telemetry.slowdown import Slowdown
from elche_worker.telemetry.timing import Interval, new_timer


class StepClock:
    """Times the batches that `epoch` gives out, and whole steps of loops over their own loader."""

    def __init__(self, device: torch.device, *, keeps_intervals: bool = False) -> None:
        self._device = device
        self._timer = new_timer(device, keeps_intervals=keeps_intervals)
        self._sizes: deque[int] = deque()
        """Samples of the batches whose times are not known yet."""
        self._is_running = False
        self._step_started_s = time.perf_counter()
        self._slowdown = Slowdown(float(os.environ.get("ELCHE_SLOW") or 1))

    def begin_step(self) -> None:
        """Starts timing a step."""
        self._step_started_s = time.perf_counter()

    def begin_batch(self, num_samples: int) -> None:
        """Starts timing a batch."""
        self._sizes.append(num_samples)
        self._timer.start()
        self._is_running = True

    def end_batch(self) -> None:
        """Stops timing the batch, if one is being timed."""
        if self._is_running:
            self._timer.stop()
            self._is_running = False

    def drop_batch(self) -> None:
        """Forgets the batch that is being timed, if there is one."""
        if self._is_running:
            self._timer.drop()
            self._sizes.pop()
            self._is_running = False

    def take_step_ms(self) -> list[float]:
        """Host time in ms since the step began."""
        return [(time.perf_counter() - self._step_started_s) * 1000]

    def take_batch_ms(self, *, waits: bool) -> list[float]:
        """Times in ms of batches that have ended since the last call; `waits` for the last one's end."""
        return self._timer.finish() if waits else self._timer.take()

    def take_intervals(self) -> list[Interval]:
        """Intervals in which those batches were computed, for the timeline."""
        return self._timer.take_intervals()

    def take_sizes(self, batch_ms: Sequence[float]) -> list[tuple[int, float]]:
        """Pairs the times, in ms, with the sizes of the oldest batches: (samples, ms)."""
        return [(self._sizes.popleft(), ms) for ms in batch_ms]

    def forget_sizes(self) -> None:
        """Forgets the sizes of batches, which are used only with several ranks."""
        self._sizes.clear()

    def slow_down(self) -> None:
        """Simulates a slower device: the step takes `ELCHE_SLOW` times as long."""
        if self._slowdown.is_on:
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
            self._slowdown.sleep(time.perf_counter() - self._step_started_s)
