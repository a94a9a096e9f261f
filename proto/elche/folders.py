"""Folders that elche makes, which hold records, logs and tokens and are no code of the user's."""

from contextlib import suppress
from pathlib import Path

NAME = ".gitignore"
IGNORES_ALL = "*\n"


def keep_out(folder: Path) -> None:
    """Keeps a folder of elche's own out of the user's repository, and out of what is sent to ranks with a job: by a
    `.gitignore` in it, unless it has one.
    """
    with suppress(OSError), (folder / NAME).open("x", encoding="utf-8") as file:
        file.write(IGNORES_ALL)
