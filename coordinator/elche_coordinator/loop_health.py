"""How the coordinator itself does: how late its event loop wakes, and how many messages pass."""

import asyncio
from collections import Counter, deque

EVERY_S = 0.1
WINDOW_S = 10.0


class LoopHealth:
    """Counts what passes, and measures the loop while `beat` runs on it."""

    def __init__(self) -> None:
        self.messages: Counter[tuple[str, str]] = Counter()
        """(kind of stream, "in" or "out") to messages."""
        self._lags_s: deque[float] = deque(maxlen=round(WINDOW_S / EVERY_S))

    @property
    def lag_s(self) -> float:
        """How late the loop woke, at most, lately."""
        return max(self._lags_s, default=0.0)

    async def measure(self) -> None:
        """Measures, without end."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + EVERY_S
            await asyncio.sleep(EVERY_S)
            self._lags_s.append(max(0.0, loop.time() - due_s))
