"""Which of the signals that ask a process to stop also hurry it."""

import signal
import time

ONE_S = 0.5
"""Seconds in which two signals are one request: `timeout` sends SIGTERM to its command and then to all of its group."""


class StopSignals:
    """The signals that a process has got."""

    def __init__(self) -> None:
        self._told_s: float | None = None
        """Time of the first SIGINT or SIGTERM."""

    def hurries(self, number: int) -> bool:
        """True of a SIGINT or SIGTERM that comes after another one, and not with it. SIGHUP, of a terminal that is
        closed, never hurries: it may come twice, and who ends a session sends SIGTERM and SIGHUP together.
        """
        if number == signal.SIGHUP:
            return False
        now_s = time.monotonic()
        if self._told_s is None:
            self._told_s = now_s
            return False
        return now_s >= self._told_s + ONE_S
