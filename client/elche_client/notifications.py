"""Everything that a command waits for, in one queue: a job's events, its own processes, and signals."""

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

from elche.errors import ElcheError
from elche_client.client import JobHandle
from elche_client.events import Event, JobResult
from elche_client.rank_output import LinesPrinted

SHOW_CURSOR = b"\x1b[?25h"


@dataclass(frozen=True, slots=True, kw_only=True)
class LineWritten:
    """A process of this run wrote a line."""

    process: str
    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEnded:
    """A process of this run has ended. A negative code is the number of the signal that ended it."""

    process: str
    code: int
    log: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalReceived:
    """Somebody wants this command to end."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchBroken:
    """The job's events stopped coming before its result."""

    error: Exception


Happening = Event | LineWritten | LinesPrinted | ProcessEnded | SignalReceived | WatchBroken
Inbox = SimpleQueue[Happening]


class Interrupted(BaseException):
    """A signal asked this command to end."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.exit_code = 128 + number


def take(inbox: Inbox, *, timeout_s: float | None = None) -> Event | LineWritten | LinesPrinted | ProcessEnded:
    """The next happening. Raises `Interrupted`, what broke the watch, or `TimeoutError`."""
    try:
        happening = inbox.get(timeout=timeout_s)
    except Empty as error:
        raise TimeoutError from error
    match happening:
        case SignalReceived():
            raise Interrupted(happening.number)
        case WatchBroken():
            raise happening.error
        case _:
            return happening


def follow(
    inbox: Inbox,
    show: Callable[[Event | LinesPrinted], None],
    ended: Callable[[ProcessEnded], ElcheError] | None = None,
    *,
    timeout_s: float | None = None,
) -> JobResult:
    """Shows a job's events, and what its ranks print, until its result.

    `ended` makes the error of a process that ends first.
    Raises what `take` raises, `TimeoutError` after `timeout_s` in all.
    """
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        left_s = None if deadline_s is None else max(deadline_s - time.monotonic(), 0.0)
        happening = take(inbox, timeout_s=left_s)
        match happening:
            case LineWritten():
                pass
            case ProcessEnded():
                if ended is not None:
                    raise ended(happening)
            case JobResult():
                show(happening)
                return happening
            case _:
                show(happening)


def start_watch(handle: JobHandle, inbox: Inbox) -> None:
    """Puts the job's events into the inbox, from a thread that ends with the watch."""

    def watch() -> None:
        try:
            for event in handle.watch():
                inbox.put(event)
        except Exception as error:
            inbox.put(WatchBroken(error=error))

    Thread(target=watch, name=f"watch {handle.id}", daemon=True).start()


@contextmanager
def signals_into(inbox: Inbox, kill: Callable[[], None] = lambda: None) -> Iterator[None]:
    """The first SIGINT, SIGTERM or SIGHUP goes to the inbox; the second kills, and ends this process."""
    received: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1:
            kill()
            _show_cursor()
            os._exit(128 + number)
        inbox.put(SignalReceived(number=number))

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # ignored under nohup
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _show_cursor() -> None:
    for descriptor in (1, 2):
        if os.isatty(descriptor):
            os.write(descriptor, SHOW_CURSOR)
