"""Folders and files of elche's own and of its users: records, logs, tokens, settings."""

import os
from contextlib import suppress
from pathlib import Path

NAME = ".gitignore"
IGNORES_ALL = "*\n"


def without_waiting(path: str, flags: int) -> int:
    """An opener, for `open`, of a file to read. A named pipe into which nobody writes is empty, instead of waited for
    without end; one with a writer, such as `<(pass show elche)` of a shell, is read to its end.
    """
    opened = os.open(path, flags | os.O_NONBLOCK)
    os.set_blocking(opened, True)
    return opened


def keep_out(folder: Path) -> None:
    """Keeps a folder of elche's own out of the user's repository and of jobs' bundles, by a `.gitignore` in it, unless
    it has one.
    """
    with suppress(OSError), (folder / NAME).open("x", encoding="utf-8") as file:
        file.write(IGNORES_ALL)
