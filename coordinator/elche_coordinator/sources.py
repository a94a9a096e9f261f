"""The texts of users' files, by their hash: each is in the database once, however many jobs have it.

Those of jobs that have not ended are in memory, too: a rank is started at once, whether the database answers or not.
"""

import hashlib
from collections.abc import Callable
from contextlib import suppress


class Sources:
    """Texts of files. Jobs hold theirs; what is new becomes durable with the event that brings it."""

    def __init__(self, load: Callable[[str], str]) -> None:
        """`load` reads a text from the database, and raises `KeyError` for one that is not there."""
        self._load = load
        self._texts: dict[str, str] = {}
        self._holders: dict[str, set[str]] = {}
        """By hash, the jobs that have it."""
        self._hashes: dict[str, str] = {}
        """By job, that of its file."""
        self._new: dict[str, str] = {}

    def add(self, text: str) -> str:
        """Takes in a text that a client has sent, until a job holds it; returns its hash."""
        name = hashlib.sha256(text.encode()).hexdigest()
        if name not in self._texts:
            self._texts[name] = self._new[name] = text
        return name

    def load(self, name: str) -> None:
        """Has a text in memory until a job holds it. Raises `KeyError` when the database does not have it."""
        if name and name not in self._texts:
            self._texts[name] = self._load(name)

    def discard(self, name: str) -> None:
        """Drops a text that no job has come to hold: its submission was refused."""
        if name not in self._holders:
            self._texts.pop(name, None)
            self._new.pop(name, None)

    def text(self, name: str) -> str:
        """A text that some job holds. Raises `LookupError` for one that the database has lost."""
        if name and name not in self._texts:
            raise LookupError("its file is not in the database any more")
        return self._texts[name] if name else ""

    def size_bytes(self, name: str) -> int:
        """Of a text; 0 for one that the database has lost."""
        return len(self._texts.get(name, "").encode())

    def hold(self, job_id: str, name: str) -> None:
        """The job has this file. One that is in no database any more is missed when a rank is to be started."""
        if name:
            with suppress(KeyError):
                self.load(name)
            self._holders.setdefault(name, set()).add(job_id)
            self._hashes[job_id] = name

    def release(self, job_id: str) -> None:
        """The job needs its file no more: it has ended."""
        name = self._hashes.pop(job_id, None)
        if name is None:
            return
        holders = self._holders[name]
        holders.remove(job_id)
        if not holders:
            del self._holders[name]
            self._texts.pop(name, None)

    def take_new(self) -> dict[str, str]:
        """The texts that are not in the database yet, by hash; from now on they count as written."""
        new, self._new = self._new, {}
        return new
