"""Output that accepts any text, since printing must never end a process."""

import io
import os
import sys
from contextlib import suppress


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
    """Executes the program anew in Python's UTF-8 mode, if the locale has another encoding for files' names: names
    go between processes and hosts, which may have other locales.
    """
    if sys.getfilesystemencoding() == "utf-8" or not sys.executable or sys.flags.ignore_environment:
        return
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, "PYTHONUTF8": "1"})


def take_any_text(*, encoding: str | None = None) -> None:
    """Has `sys.stdout` and `sys.stderr` escape characters that their encoding, or the given one, lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with suppress(OSError, ValueError):  # a closed or replaced file
                stream.reconfigure(encoding=encoding, errors="replace" if encoding is None else "backslashreplace")
