"""Ctrl-C for commands that poll a coordinator.

A `KeyboardInterrupt` that is raised within a call of grpc may be lost. So the signal sets an event, on which the
command waits between its calls.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupted() -> Iterator[threading.Event]:
    """An event that is set by SIGINT and SIGTERM inside the context; the signals do nothing else there."""
    event = threading.Event()
    before = {number: signal.signal(number, lambda *_: event.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
