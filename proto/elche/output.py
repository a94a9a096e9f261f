"""Output that accepts any text, since printing must never end a process."""

import io
import sys
from contextlib import suppress


def take_any_text(*, encoding: str | None = None) -> None:
    """Has `sys.stdout` and `sys.stderr` escape characters that their encoding, or the given one, lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with suppress(OSError, ValueError):  # a closed or replaced file
                stream.reconfigure(encoding=encoding, errors="replace" if encoding is None else "backslashreplace")
