"""Folders of elche's own, with records, logs and tokens."""

from contextlib import suppress
from pathlib import Path

NAME = ".gitignore"
IGNORES_ALL = "*\n"


def keep_out(folder: Path) -> None:
    """Keeps a folder of elche's own out of the user's repository and of jobs' bundles, by a `.gitignore` in it, unless
    it has one.
    """
    with suppress(OSError), (folder / NAME).open("x", encoding="utf-8") as file:
        file.write(IGNORES_ALL)
