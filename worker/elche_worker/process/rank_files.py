"""Opens files in folders that ranks may change, for the agent, which has more permissions than ranks.

A rank may replace its log, its model or a folder by a link or a pipe. Through a link, the agent of confined ranks would
read or write files that these must not see; on a pipe it would hang.
"""

import errno
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from elche.folders import IGNORES_ALL, NAME, keep_out


class RankFiles:
    """Opens regular files only; for confined ranks only in folders that they may change, and through no link."""

    def __init__(self, changeable: Sequence[Path] | None = None) -> None:
        """`changeable`: the folders that confined ranks may change; None where ranks are not confined."""
        self._changeable = changeable

    def read(self, path: Path) -> BinaryIO:
        """Opens a file for reading. Raises `OSError`."""
        return os.fdopen(self._open(path, os.O_RDONLY), "rb")

    def append(self, path: Path) -> BinaryIO:
        """Opens a file for appending, and creates it if needed. Raises `OSError`."""
        return os.fdopen(self._open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab")

    def empty(self, path: Path) -> None:
        """Creates or empties a file. Raises `OSError`."""
        os.close(self._open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC))

    def make_folder(self, folder: Path) -> None:
        """Creates a folder and its parents, accessible to the agent's user only. Raises `OSError`."""
        if folder.exists():
            return
        if self._changeable is None:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            keep_out(folder)
            return
        os.close(self._enter(folder, makes=True))
        with self.append(folder / NAME) as file:
            file.write(IGNORES_ALL.encode())

    def _open(self, path: Path, flags: int) -> int:
        # Without `O_NONBLOCK` the agent would wait in here for a pipe's other end.
        flags |= os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
        if self._changeable is None:
            opened = os.open(path, flags, 0o600)
        else:
            folder = self._enter(path.parent)
            try:
                opened = os.open(path.name, flags | os.O_NOFOLLOW, 0o600, dir_fd=folder)
            finally:
                os.close(folder)
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            os.close(opened)
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return opened

    def _enter(self, folder: Path, *, makes: bool = False) -> int:
        """Opens a folder component by component, without following links, from the topmost that ranks may change."""
        way = [*reversed(folder.parents), folder]
        root = next((one for one in way if one.resolve() in (self._changeable or ())), None)
        if root is None or ".." in folder.parts:
            raise OSError(errno.EACCES, "confined ranks may not write there: see --writable", str(folder))
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        entered = os.open(root, flags)
        for name in folder.relative_to(root).parts:
            try:
                if makes:
                    with suppress(FileExistsError):
                        os.mkdir(name, 0o700, dir_fd=entered)
                inner = os.open(name, flags | os.O_NOFOLLOW, dir_fd=entered)
            finally:
                os.close(entered)
            entered = inner
        return entered
