"""The texts of users' files by their hash, each in the database once, however many jobs have it.

Those of open jobs are in memory, too, so that ranks can be started even if the database does not answer.
"""

import hashlib
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from types import MappingProxyType


class Sources:
    """Texts of files, held by jobs. A new one becomes durable with the event of its submission."""

    def __init__(self, load: Callable[[str], str], sizes: Mapping[str, int] = MappingProxyType({})) -> None:
        """`load` reads a text from the database, and raises `KeyError` for a missing one. `sizes`, in bytes, are of
        those that it has.
        """
        self._load = load
        self._sizes = dict(sizes)
        """Size in bytes of each text that is in memory or in the database."""
        self._texts: dict[str, str] = {}
        self._holders: dict[str, set[str]] = {}
        """The jobs that have each text, by hash."""
        self._hashes: dict[str, str] = {}
        """The hash of each job's file."""
        self._new: dict[str, str] = {}

    def add(self, text: str) -> str:
        """Keeps a client's text until a job holds it; returns its hash."""
        name = hashlib.sha256(text.encode()).hexdigest()
        if name not in self._texts:
            self._texts[name] = self._new[name] = text
            self._sizes[name] = len(text.encode())
        return name

    def load(self, name: str) -> None:
        """Loads a text into memory until a job holds it. Raises `KeyError` if the database does not have it."""
        if name and name not in self._texts:
            self._texts[name] = self._load(name)

    def discard(self, name: str) -> None:
        """Drops a text that no job holds, since its submission was refused."""
        if name not in self._holders:
            self._texts.pop(name, None)
            self._new.pop(name, None)

    def text(self, name: str) -> str:
        """A text that some job holds. Raises `LookupError` for one that the database has lost."""
        if name and name not in self._texts:
            raise LookupError("its file is not in the database any more")
        return self._texts[name] if name else ""

    def found(self, name: str) -> str:
        """A text, perhaps of a job that has ended. Raises `KeyError` if neither memory nor database has it."""
        return (self._texts.get(name) or self._load(name)) if name else ""

    def size_bytes(self, name: str) -> int:
        """Size of a text in bytes; 0 for one that the database has lost."""
        return self._sizes.get(name, 0)

    def keep(self, names: Collection[str]) -> None:
        """Keeps the sizes of these texts and of held ones: the others are of no job, and leave the database."""
        self._sizes = {name: size for name, size in self._sizes.items() if name in names or name in self._holders}

    def hold(self, job_id: str, name: str) -> None:
        """Has a job hold a file. One that the database has lost is noticed when a rank is started."""
        if name:
            with suppress(KeyError):
                self.load(name)
            self._holders.setdefault(name, set()).add(job_id)
            self._hashes[job_id] = name

    def release(self, job_id: str) -> None:
        """Releases the file of an ended job."""
        name = self._hashes.pop(job_id, None)
        if name is None:
            return
        holders = self._holders[name]
        holders.remove(job_id)
        if not holders:
            del self._holders[name]
            self._texts.pop(name, None)

    def take_new(self) -> dict[str, str]:
        """Returns the texts that are not in the database yet, by hash, and counts them as written."""
        new, self._new = self._new, {}
        return new
