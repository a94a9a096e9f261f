"""Ends a process in which user code has run, by `os._exit`: the destructors of a stuck collective would block it.

As in an ordinary exit, open files are flushed, and `atexit` handlers run, in which experiment trackers write their last
values.
"""

import atexit
import gc
import io
import os
import threading
from contextlib import suppress
from typing import NoReturn

HANDLERS_S = 3.0
"""Seconds after which the process ends even if a file or a handler still blocks."""


def forget_handlers() -> None:
    """Drops the `atexit` handlers of the process from which this one was forked."""
    atexit._clear()


def end(code: int) -> NoReturn:
    """Ends the process with this exit code, at most `HANDLERS_S` from now."""
    timer = threading.Timer(HANDLERS_S, os._exit, (code,))
    timer.daemon = True
    timer.start()
    _flush_files()  # first, since a handler may not return
    with suppress(BaseException):
        atexit._run_exitfuncs()
    # Again: handlers have written their last lines.
    _flush_files()
    os._exit(code)


def _flush_files() -> None:
    """Flushes open files: text files before the binary ones that they write to."""
    # Not `isinstance`, which asks `__class__`: lazy objects and proxies of user code load what they stand for then.
    files = [one for one in gc.get_objects() if issubclass(type(one), io.IOBase)]
    for one in sorted(files, key=lambda file: not isinstance(file, io.TextIOBase)):
        with suppress(Exception):  # closed, full, or a class of the user's
            one.flush()
