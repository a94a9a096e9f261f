"""Lines of the log about what fails again and again, such as writing to a full disk."""

import logging
import threading
import time
from collections.abc import Callable

AGAIN_S = 60.0
"""Seconds after which the log says again that something still fails."""


class Trouble:
    """Something that may fail many times a minute until somebody mends it. The log says so when it begins, when its
    reason changes, once a minute while it lasts, and when it is over. A failure that keeps ending and coming back is
    logged once a minute, too. May be used on any thread.
    """

    def __init__(
        self, log: logging.Logger, level: int, problem: str, over: str, *, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        """`problem` names what fails and where; the reason follows it. `over` says that it works again."""
        self._log, self._level, self._problem, self._over = log, level, problem, over
        self._now_s = now_s
        self._lock = threading.Lock()
        self.reason = ""
        """The last failure's; empty if the last attempt succeeded."""
        self._since_s = 0.0
        self._told = "", -AGAIN_S
        """The reason that the log has said last, and when."""
        self._is_end_due = False
        """True if the log has said that it fails, and not yet that it is over."""

    def failed(self, reason: str) -> None:
        """Takes note of a failure."""
        with self._lock:
            now_s = self._now_s()
            if not self.reason:
                self._since_s = now_s
            self.reason = reason
            told, told_s = self._told
            if reason == told and now_s - told_s < AGAIN_S:
                return
            self._told, self._is_end_due = (reason, now_s), True
            for_s = now_s - self._since_s
            since = f", for {for_s:.0f} s now" if for_s >= AGAIN_S else ""
            self._log.log(self._level, "%s%s: %s", self._problem, since, reason)

    def succeeded(self) -> None:
        """Takes note of a success."""
        if not self.reason:  # the usual case, without the lock
            return
        with self._lock:
            self.reason = ""
            if self._is_end_due:
                self._is_end_due = False
                self._log.info("%s, after %.0f s", self._over, self._now_s() - self._since_s)
