"""Texts that one process passes to another by a file descriptor, and that no other process can read."""

import os
import sys
import tempfile
from typing import IO


def anonymous_file(text: str) -> IO[bytes]:
    """An anonymous file with a text, positioned at its beginning. In memory on Linux, else deleted already."""
    if sys.platform.startswith("linux"):
        file: IO[bytes] = os.fdopen(os.memfd_create("launch"), "w+b")
    else:
        file = tempfile.TemporaryFile()  # noqa: SIM115
    file.write(text.encode())
    file.seek(0)
    return file
