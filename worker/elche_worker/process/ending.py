"""The end of a process in which user code has run, without destructors: those of a stuck collective would block it.

What else an ordinary end does for that code is done: what it has written to files that it left open is in them, and
its handlers of `atexit` have run, by which trackers and libraries write their last figures.
"""

import atexit
import gc
import io
import os
import threading
from contextlib import suppress
from typing import NoReturn

HANDLERS_S = 3.0
"""Seconds after which the process ends whatever files and handlers are busy with."""


def forget_handlers() -> None:
    """Forgets the `atexit` handlers of the process from which this one was forked: they are for its own end."""
    atexit._clear()


def end(code: int) -> NoReturn:
    """Ends the process."""
    timer = threading.Timer(HANDLERS_S, os._exit, (code,))
    timer.daemon = True
    timer.start()
    _flush_files()  # first, since a handler may not return
    with suppress(BaseException):
        atexit._run_exitfuncs()
    _flush_files()
    os._exit(code)


def _flush_files() -> None:
    """Writes what open files hold in memory. Texts come before the buffers that are below them."""
    files = [one for one in gc.get_objects() if issubclass(type(one), io.IOBase)]
    for one in sorted(files, key=lambda file: not isinstance(file, io.TextIOBase)):
        with suppress(Exception):  # closed, full, or the user's own kind of file
            one.flush()
