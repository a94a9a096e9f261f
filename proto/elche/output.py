"""Output that accepts any text, since printing must never end a process."""

import errno
import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any


def open_standard_streams() -> None:
    """Opens the null device in place of standard streams that are closed. Python has None for them, and the next file
    or socket would get their descriptors, to which child processes and libraries write.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free number: this one
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def use_utf8() -> None:
    """Re-executes the program in Python's UTF-8 mode, if the locale has another encoding for files' names: names
    go between processes and hosts, which may have other locales.
    """
    if sys.getfilesystemencoding() == "utf-8" or not sys.executable or sys.flags.ignore_environment:
        return
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, "PYTHONUTF8": "1"})


def take_any_text(*, encoding: str | None = None) -> None:
    """Has `sys.stdout` and `sys.stderr` print "?" for characters that their encoding lacks. With `encoding` they use
    that, and escape what it lacks.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with suppress(OSError, ValueError):  # a closed or replaced file
                stream.reconfigure(encoding=encoding, errors="replace" if encoding is None else "backslashreplace")


def notice(text: object) -> None:
    """Writes a line to standard error, if it can be written: a closed pipe or a full disk must not end a training."""
    if sys.stderr is not None:
        with suppress(OSError, ValueError):  # in one piece: another thread may write at the same time
            print(f"elche: {text}\n", end="", file=sys.stderr, flush=True)


def add_flush() -> None:
    """Gives `sys.stdout` and `sys.stderr` a `flush` where they only have `write`, as a script's copy to a file has."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not hasattr(stream, "flush"):
            stream.flush = lambda: None  # type: ignore[method-assign]


def use_empty_input() -> None:
    """Gives this process an empty standard input, and says so once the script reads it."""
    null = _EmptyInput(
        os.open(os.devnull, os.O_RDONLY), closefd=False
    )  # else Python warns at its end: nobody closes it
    sys.stdin = io.TextIOWrapper(io.BufferedReader(null), encoding="utf-8")


class _EmptyInput(io.FileIO):
    """The null device in place of standard input."""

    _has_said = False

    def readinto(self, buffer: Any) -> int:
        if not self._has_said:
            self._has_said = True
            notice("standard input is empty for ranks, and the script reads it: give it a file, or arguments after --")
        return 0


def outlive_readers(report: Callable[[str], None]) -> None:
    """Has `sys.stdout` and `sys.stderr` drop what cannot be written instead of raising, as when their reader (`head`)
    has ended, or the disk is full. `report` is called once with the reason, for `sys.stdout` only.
    """
    for name in ("stderr", "stdout"):
        stream = getattr(sys, name)
        with suppress(OSError):
            stream.flush()
        with suppress(OSError, ValueError):  # a replaced stream without a descriptor
            file = io.BufferedWriter(_Outlet(stream, report if name == "stdout" else None))
            encoding, errors = stream.encoding, stream.errors
            setattr(sys, name, io.TextIOWrapper(file, encoding=encoding, errors=errors, line_buffering=True))


class _Outlet(io.FileIO):
    """A standard stream's file, which drops what cannot be written."""

    def __init__(self, stream: io.TextIOWrapper, report: Callable[[str], None] | None) -> None:
        super().__init__(stream.fileno(), "wb", closefd=False)
        self._stream = stream  # closes the descriptor when nobody has it, and another file would get its number
        self._report = report

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            report, self._report = self._report, None
            if error.errno in (errno.EPIPE, errno.EIO):  # nobody will read it any more
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self.fileno())
                os.close(null)
            if report is not None:
                report(f"standard output cannot be written ({error.strerror}): what is printed there is lost")
            return len(data)
