"""Output that takes any text: what is only shown must never end what it tells of."""

import io
import sys
from contextlib import suppress


def take_any_text(*, encoding: str | None = None) -> None:
    """Lets `sys.stdout` and `sys.stderr` replace what their encoding lacks, or the one that is given."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with suppress(OSError, ValueError):  # one whose file was replaced meanwhile, or closed: it stays as it is
                stream.reconfigure(encoding=encoding, errors="replace" if encoding is None else "backslashreplace")
