"""One queue for all events of a command: the job's, its own processes', and signals."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from types import FrameType
from typing import TYPE_CHECKING

from elche.errors import ElcheError
from elche.stopping import StopSignals
from elche_client.events import Event, JobResult
from elche_client.transport.rank_output import RankOutput

if TYPE_CHECKING:
    from elche_client.client import JobHandle

SHOW_CURSOR = b"\x1b[?25h"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessOutput:
    """A process of this run has written a line to stdout."""

    process: str
    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessExited:
    """A process of this run has exited. A negative code is the number of the signal that killed it."""

    process: str
    code: int
    log: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRestarted:
    """A process of this run was killed by a signal, and is restarted."""

    process: str
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalReceived:
    """A signal asks this command to end."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchFailed:
    """The watch of the job has failed before its result."""

    error: Exception


Shown = Event | RankOutput | ProcessRestarted
"""Notifications that are shown."""
Notification = Shown | ProcessOutput | ProcessExited | SignalReceived | WatchFailed
NotificationQueue = SimpleQueue[Notification]


class Interrupted(BaseException):
    """A signal has asked this command to end."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.exit_code = 128 + number


def next_notification(
    notifications: NotificationQueue, *, timeout_s: float | None = None
) -> Shown | ProcessOutput | ProcessExited:
    """The next notification. Raises `Interrupted`, the error of a failed watch, or `TimeoutError`."""
    try:
        notification = notifications.get(timeout=timeout_s)
    except Empty as error:
        raise TimeoutError from error
    match notification:
        case SignalReceived():
            raise Interrupted(notification.number)
        case WatchFailed():
            raise notification.error
        case _:
            return notification


def wait_for_result(
    notifications: NotificationQueue,
    show: Callable[[Shown], None],
    ended: Callable[[ProcessExited], ElcheError] | None = None,
    *,
    timeout_s: float | None = None,
) -> JobResult:
    """Passes a job's events and the output of its ranks to `show`, until the job's result, which it returns.

    `ended` makes the error to raise for a process that exits first. Raises what `next_notification` raises, and
    `TimeoutError` after `timeout_s` in all.
    """
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        left_s = None if deadline_s is None else max(deadline_s - time.monotonic(), 0.0)
        notification = next_notification(notifications, timeout_s=left_s)
        match notification:
            case ProcessOutput():
                pass
            case ProcessExited():
                if ended is not None:
                    raise ended(notification)
            case JobResult():
                show(notification)
                return notification
            case _:
                show(notification)


def start_watch(handle: "JobHandle", put: Callable[[Notification], None]) -> None:
    """Watches the job on a thread, which calls `put` with each of its events."""

    def watch() -> None:
        try:
            for event in handle.watch():
                put(event)
        except Exception as error:
            put(WatchFailed(error=error))

    Thread(target=watch, name=f"watch {handle.id}", daemon=True).start()


@contextmanager
def forward_signals(notifications: NotificationQueue, kill: Callable[[], None] = lambda: None) -> Iterator[None]:
    """The first SIGINT, SIGTERM or SIGHUP goes to the queue; one that hurries kills the processes and exits at once.
    With SIGHUP writing to the terminal fails before the queue is read: `Interrupted` is raised then, too.
    """
    received: list[int] = []
    stop_signals = StopSignals()

    def on_signal(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if stop_signals.hurries(number):
            kill()
            _show_cursor()
            os._exit(128 + number)
        if len(received) == 1:
            notifications.put(SignalReceived(number=number))

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # ignored under nohup
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield
    except OSError:
        if received:
            raise Interrupted(received[0]) from None
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _show_cursor() -> None:
    for descriptor in (1, 2):
        if os.isatty(descriptor):
            os.write(descriptor, SHOW_CURSOR)
