"""Virtual time: things happen in the order of their times, and in the order of asking when these are equal."""

import heapq
from collections.abc import Callable
from functools import partial


class ProcessClock:
    """The clock of one process, which can be frozen: what was to happen then happens when it continues."""

    def __init__(self, clock: "VirtualClock") -> None:
        self.is_frozen = False
        self._clock = clock
        self._held: list[Callable[[], None]] = []

    @property
    def now_s(self) -> float:
        """The time of the world, which goes on."""
        return self._clock.now_s

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Does the action after a delay, or when the process continues."""
        self._clock.after(delay_s, partial(self.do, action))

    def do(self, action: Callable[[], None]) -> None:
        """Does the action now, or when the process continues."""
        if self.is_frozen:
            self._held.append(action)
        else:
            action()

    def freeze(self) -> None:
        """The process is stopped."""
        self.is_frozen = True

    def thaw(self) -> None:
        """The process continues."""
        self.is_frozen = False
        # Taken over first: an action may freeze the process again, and then the rest is held anew.
        held, self._held = self._held, []
        for action in held:
            self.do(action)


class VirtualClock:
    """A queue of what is to happen. Time passes only by doing it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Does the action at a time, or now when the time has passed."""
        # It also keeps heapq from comparing two actions, which have no order.
        self._count += 1
        heapq.heappush(self._queue, (max(time_s, self.now_s), self._count, action))

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Does the action after a delay."""
        self.at(self.now_s + delay_s, action)

    def run(self, *, until: Callable[[], bool], limit_s: float) -> None:
        """Lets time pass until the condition is true. Raises `TimeoutError` when it never does, or not in time."""
        while not until():
            if not self._queue or self._queue[0][0] > limit_s:
                raise TimeoutError(f"at {self.now_s:.3f} s nothing more happens, or the limit of {limit_s} s is near")
            self.now_s, _, action = heapq.heappop(self._queue)
            action()
