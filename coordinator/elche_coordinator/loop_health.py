"""The coordinator's own health: the lag of its event loop, and counts of messages."""

import asyncio
from collections import Counter, deque

EVERY_S = 0.1
"""Seconds for which the measurement sleeps; by how much longer it took, the event loop was held up."""
WINDOW_S = 10.0
"""Seconds over which the largest lag is shown."""


class LoopHealth:
    """Counts messages, and measures the event loop's lag while `measure` runs on it."""

    def __init__(self) -> None:
        self.messages: Counter[tuple[str, str]] = Counter()
        """(kind of stream, "in" or "out") to messages."""
        self._lags_s: deque[float] = deque(maxlen=round(WINDOW_S / EVERY_S))

    @property
    def lag_s(self) -> float:
        """The largest lag of the event loop in the last 10 s, in seconds."""
        return max(self._lags_s, default=0.0)

    async def measure(self) -> None:
        """Measures until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            # By the loop's own clock, by which `sleep` wakes.
            due_s = loop.time() + EVERY_S
            await asyncio.sleep(EVERY_S)
            self._lags_s.append(max(0.0, loop.time() - due_s))
