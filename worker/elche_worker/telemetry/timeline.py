"""A rank's timeline: spans are recorded on any thread, and a thread sends them twice a second."""

import threading
import time
from collections import deque
from collections.abc import Callable

from elche.v1 import rank_pb2

EVERY_S = 0.5
"""Seconds between two messages."""
MAX_SPANS = 4000
"""Most spans in one message; further ones are counted and dropped."""

Span = tuple[int, float, float, int]
"""(kind, start, end, detail); times of `time.perf_counter` in seconds."""


class SpanRecorder:
    """Collects spans. `clock` returns the wall times at which the coordinator's last clock was sent and received."""

    def __init__(
        self, send: Callable[[rank_pb2.ConverseRequest], None], clock: Callable[[], tuple[float, float] | None]
    ) -> None:
        self._send = send
        self._clock = clock
        self._spans: deque[Span] = deque()
        self._wall_s = time.time() - time.perf_counter()
        """Wall time at which `perf_counter` was 0. Taken once: setting the clock must not move spans."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="timeline", daemon=True)
        self._thread.start()

    def add(self, kind: int, start_s: float, end_s: float, detail: int = 0) -> None:
        """Adds a span; from any thread."""
        self._spans.append((kind, start_s, end_s, detail))

    def stop(self) -> None:
        """Sends remaining spans and stops."""
        self._stopped.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        while not self._stopped.wait(EVERY_S):
            self._flush()
        self._flush()

    def _flush(self) -> None:
        # As many as there are now: other threads add spans meanwhile, and an empty deque raises.
        spans = [self._spans.popleft() for _ in range(len(self._spans))]
        kept = spans[:MAX_SPANS]
        message = rank_pb2.Spans(num_dropped=len(spans) - len(kept))
        base_s = min((start for _, start, _, _ in kept), default=0.0)
        message.base_us = round((base_s + self._wall_s) * 1e6)
        message.kinds.extend(kind for kind, _, _, _ in kept)
        message.starts_us.extend(round((start - base_s) * 1e6) for _, start, _, _ in kept)
        message.durations_us.extend(max(0, round((end - start) * 1e6)) for _, start, end, _ in kept)
        message.details.extend(max(0, detail) for _, _, _, detail in kept)
        if (clock := self._clock()) is not None:
            message.clock_sent_s, message.clock_received_s = clock
            message.sent_s = time.time()
        if kept or clock is not None:
            self._send(rank_pb2.ConverseRequest(spans=message))
