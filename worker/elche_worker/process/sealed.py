"""Texts that one process passes to another by a file descriptor, and that no other process can read."""

import os
import sys
import tempfile
from typing import IO


def sealed(text: str) -> IO[bytes]:
    """An anonymous file that contains a text, at its beginning."""
    if sys.platform.startswith("linux"):
        file: IO[bytes] = os.fdopen(os.memfd_create("launch"), "w+b")
    else:
        file = tempfile.TemporaryFile()  # noqa: SIM115
    file.write(text.encode())
    file.seek(0)
    return file
