"""Opens files in folders that ranks may change, for the agent, who may do more than they.

A rank may put a link or a pipe where its log, its model or a folder was. Links would lead the agent of confined ranks
to what these are not to see; a pipe would have it wait.
"""

import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from elche.folders import IGNORES_ALL, NAME, keep_out


class RankFiles:
    """Opens plain files only; where ranks are confined, only in folders that they may change, and through no link."""

    def __init__(self, changeable: Sequence[Path] | None = None) -> None:
        """`changeable`: the folders that confined ranks may change; None where ranks are not confined."""
        self._changeable = changeable

    def read(self, path: Path) -> BinaryIO:
        """Opens a file to read it. Raises `OSError`."""
        return os.fdopen(self._open(path, os.O_RDONLY), "rb")

    def append(self, path: Path) -> BinaryIO:
        """Opens a file, which is made if it is not there, to add to it. Raises `OSError`."""
        return os.fdopen(self._open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab")

    def empty(self, path: Path) -> None:
        """Makes a file, or makes it empty. Raises `OSError`."""
        os.close(self._open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC))

    def make_folder(self, folder: Path) -> None:
        """Makes a folder, and those that it is in, for the agent's user alone. Raises `OSError`."""
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
            raise OSError(errno.EINVAL, "it is no plain file", str(path))
        return opened

    def _enter(self, folder: Path, *, makes: bool = False) -> int:
        """Opens a folder step by step, from the first that ranks may change: what leads there is not theirs."""
        way = [*reversed(folder.parents), folder]
        root = next((one for one in way if one.resolve() in (self._changeable or ())), None)
        if root is None or ".." in folder.parts:
            raise OSError(errno.EACCES, "confined ranks may not write there: see --writable", str(folder))
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        entered = os.open(root, flags)
        for name in folder.relative_to(root).parts:
            try:
                if makes:
                    _make(name, entered)
                inner = os.open(name, flags | os.O_NOFOLLOW, dir_fd=entered)
            finally:
                os.close(entered)
            entered = inner
        return entered


def _make(name: str, parent: int) -> None:
    try:
        os.mkdir(name, 0o700, dir_fd=parent)
    except FileExistsError:
        pass
