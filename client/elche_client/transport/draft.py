"""The file into which a model is downloaded, of which the part that has come stays when the download breaks off."""

import fcntl
import glob
import hashlib
import os
import re
from contextlib import suppress
from io import BufferedRandom
from pathlib import Path
from typing import Self
from urllib.parse import quote

from elche.errors import InvalidJob

SHA256 = re.compile("[0-9a-f]{64}")
MAX_NAME_BYTES = 255


class Draft:
    """Context with a job's model as far as it has come: `FILE.JOB.SHA256.part`, beside its target.

    The SHA-256 is that of the whole model, so that parts of two models never mix. One process at a time writes such a
    file. A second one writes another, which is removed when its download breaks off, as is one without a SHA-256 (from
    an older coordinator or worker). Methods raise `OSError`.
    """

    def __init__(self, target: Path, job_id: str) -> None:
        self._target = target
        self._prefix = f"{target.name}.{quote(job_id, safe='')}."
        self._path = target
        self._file: BufferedRandom | None = None
        self._stays = False
        """True if the part stays when the download breaks off."""
        self._has_begun = False
        self.sha256 = ""
        """SHA-256 of the model of which this is a part; "" before one is known."""
        self.size_bytes = 0
        """Bytes of it that have come."""
        self.has_grown = False
        """True if some have come into this draft, and stay."""

    def __enter__(self) -> Self:
        """Goes on with a part that an earlier download has left, if no other process writes it."""
        for path in self._target.parent.glob(f"{glob.escape(self._prefix)}*.part"):
            sha256 = path.name.removeprefix(self._prefix).removesuffix(".part")
            if SHA256.fullmatch(sha256) and (file := _owned(path)) is not None:
                self._path, self._file, self._stays = path, file, True
                self.sha256, self.size_bytes = sha256, file.seek(0, os.SEEK_END)
                break
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is None:
            return
        # Before the file is closed, and with it the lock is gone: another process may then have begun a part of this
        # name.
        if not self._stays or not self.size_bytes:
            self._path.unlink(missing_ok=True)
        self._file.close()

    def add(self, data: bytes, offset: int, sha256: str) -> None:
        """Adds the next bytes; begins anew if the first ones do not continue what has come."""
        if not self._has_begun and (not sha256 or (sha256, offset) != (self.sha256, self.size_bytes)):
            self._begin(sha256)
        self._has_begun = True
        assert self._file is not None
        self._file.write(data)
        self.size_bytes += len(data)
        self.has_grown = self._stays and (self.has_grown or bool(data))

    def finish(self) -> Path:
        """Gives the whole model its name; returns it. Raises `InvalidJob`, and drops the
        part, if its SHA-256 is another one.
        """
        if self._file is None:
            self._begin("")
        assert self._file is not None
        self._file.flush()
        self._file.seek(0)
        if self.sha256 and hashlib.file_digest(self._file, "sha256").hexdigest() != self.sha256:
            self._stays = False
            raise InvalidJob(f"what has come for {self._target} is not what was sent, and is removed: try again")
        self._path.replace(self._target)
        self._stays = True
        return self._target

    def _begin(self, sha256: str) -> None:
        """Begins a model in an empty file."""
        if self._file is not None:
            self._path.unlink(missing_ok=True)  # of a model that is no longer the one
            self._file.close()
        name = f"{self._prefix}{sha256}.part"
        is_kept = SHA256.fullmatch(sha256) and len(name.encode()) <= MAX_NAME_BYTES
        path = self._target.parent / name
        file = _owned(path) if is_kept else None
        self._stays = file is not None
        if file is None:
            path = self._target.with_name(f".{self._target.name}.{os.getpid()}")
            file = path.open("w+b")
        file.truncate(0)
        self._path, self._file, self.sha256, self.size_bytes = path, file, sha256, 0


def _owned(path: Path) -> BufferedRandom | None:
    """Opens the file, or makes it, with a lock until it is closed; None if another process holds the lock."""
    try:
        # Not "w+b": that would empty the part of a process that has the lock.
        file = path.open("a+b")
    except OSError:
        return None
    with suppress(OSError):  # another process has it, or has just finished it
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Between open and lock its former owner may have renamed it to the model: then the lock is one on the model.
        if os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
    file.close()
    return None
