"""Bundles on the coordinator's disk: packed folders of user code, by their checksum."""

import asyncio
import hashlib
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from weakref import WeakValueDictionary

from elche.bundle import CHUNK_BYTES, MAX_ARCHIVE_BYTES, check_name
from elche.errors import InvalidJob, TooMuch, Unreachable
from elche_coordinator.storage.sql.store import SqlStore
from elche_coordinator.storage.store import StoreFailed

log = logging.getLogger(__name__)

MAX_TOTAL_BYTES = 10 << 30
"""Most bytes of all bundles; beyond, the least recently used ones are removed."""
MAX_BUNDLES = 5_000
"""Most bundles, incomplete ones among them: each upload looks at all."""
STALL_S = 30.0
"""Seconds in which an upload must send `CHUNK_BYTES`, or its rest: others wait for it and the room reserved for it."""
WHOLE, PART = ".tar.gz", ".part"
"""Suffixes of complete and incomplete bundles: only a complete one, with the right checksum, is renamed."""
UNFINISHED_S = 24 * 3600.0
"""Seconds for which an incomplete bundle is kept for an upload that resumes."""


class SharedBundles:
    """Bundles in a store that several coordinators share. Copies them between it and this one's folder."""

    def __init__(self, store: SqlStore, folder: Path) -> None:
        self._store = store
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def save(self, name: str, path: Path) -> None:
        """Copies the file to the store. Raises `OSError` if it cannot be written."""
        with _writing(), path.open("rb") as file:
            self._store.save_bundle(name, iter(lambda: file.read(CHUNK_BYTES), b""))

    def remove(self, name: str) -> None:
        """Removes a bundle from the store. Raises `OSError`."""
        with _writing():
            self._store.remove_bundle(name)

    def restore(self) -> None:
        """Copies bundles that are only in the store to the folder. Raises `StoreFailed` and `OSError`."""
        for name in self._store.bundle_names():
            path = self._folder / f"{name}{WHOLE}"
            if not path.exists():
                self._restore(name, path)

    def _restore(self, name: str, path: Path) -> None:
        part = path.with_suffix(".copy")
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.writelines(self._store.load_bundle(name))
        part.rename(path)
        log.info("bundle=%s copied from the database", name[:12])


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except StoreFailed as error:
        raise OSError(0, "the database cannot be written") from error


class Bundles:
    """The bundles in a folder. `in_use` names those of jobs that have not ended, which are never removed."""

    def __init__(
        self,
        folder: Path,
        in_use: Callable[[], Collection[str]],
        max_total_bytes: int = MAX_TOTAL_BYTES,
        shared: SharedBundles | None = None,
        stall_s: float = STALL_S,
    ) -> None:
        """`shared`: the store that other coordinators share. `stall_s`: seconds in which an upload must send
        `CHUNK_BYTES`.
        """
        self._stall_s = stall_s
        self._shared = shared
        self._folder = folder
        self._in_use = in_use
        self._max_total_bytes = max_total_bytes
        self._uploads: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._coming: dict[str, int] = {}
        """Sizes of the bundles that are being uploaded."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for part in folder.glob(f"*{PART}"):
            if time.time() - part.stat().st_mtime > UNFINISHED_S:
                part.unlink()

    def _path(self, name: str) -> Path:
        return self._folder / f"{check_name(name)}{WHOLE}"

    def _part(self, name: str) -> Path:
        return self._folder / f"{check_name(name)}{PART}"

    def find(self, name: str) -> tuple[int, bool]:
        """Returns the bytes of the bundle that are here, and True if these are all. Raises `InvalidJob` for an invalid
        name.
        """
        if (size_bytes := _size(self._path(name))) is not None:
            return size_bytes, True
        return _size(self._part(name)) or 0, False

    def require(self, name: str) -> None:
        """Marks the bundle as used now. Raises `InvalidJob` if it is not here."""
        path = self._path(name)
        try:
            os.utime(path)
        except FileNotFoundError:
            raise InvalidJob(
                f"the coordinator does not have the folder {name[:12]} of this job (any more): submit its file again"
            ) from None

    async def write(self, name: str, offset: int, size_bytes: int, chunks: AsyncIterator[bytes]) -> None:
        """Writes a bundle from byte `offset` on. Received bytes are kept if the upload breaks.

        Another upload of the same bundle waits. Raises `Unreachable` if the client must ask for the offset again,
        `InvalidJob` if the checksum is not the name, and `TooMuch` if there is no room.
        """
        if not 0 <= offset <= size_bytes <= MAX_ARCHIVE_BYTES:
            raise InvalidJob(f"a bundle has at most {MAX_ARCHIVE_BYTES >> 20} MiB, not {size_bytes} bytes")
        lock = self._uploads.setdefault(name, asyncio.Lock())
        async with lock:
            found, is_complete = self.find(name)
            if is_complete:
                return
            if found != offset:
                raise Unreachable("another upload of this folder is further: continue from there")
            try:
                # Before room is made, so that other uploads that begin meanwhile count it.
                self._coming[name] = size_bytes
                await asyncio.to_thread(self._make_room)
                await self._append(name, size_bytes - found, chunks)
                await asyncio.to_thread(self._complete, name)
            except OSError as error:
                raise TooMuch(f"the coordinator cannot write the folder to its disk: {error.strerror}") from error
            finally:
                self._coming.pop(name, None)

    async def _append(self, name: str, num_bytes: int, chunks: AsyncIterator[bytes]) -> None:
        part = self._part(name)
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb") as file:
            num_counted, left_s = 0, self._stall_s
            while True:
                began_s = time.monotonic()
                if (data := await self._next(chunks, left_s)) is None:
                    break
                num_bytes, num_counted = num_bytes - len(data), num_counted + len(data)
                left_s -= time.monotonic() - began_s
                if num_counted >= CHUNK_BYTES:
                    num_counted, left_s = 0, self._stall_s
                if num_bytes < 0:
                    raise InvalidJob("the upload has more bytes than were announced")
                await asyncio.to_thread(file.write, data)
            if num_bytes:
                raise Unreachable(f"the upload has ended {num_bytes} bytes before its end")
            file.flush()
            # On the disk before it gets its name: after a power cut that must not stand for half of a folder.
            await asyncio.to_thread(os.fsync, file.fileno())

    async def _next(self, chunks: AsyncIterator[bytes], left_s: float) -> bytes | None:
        """The next chunk; None at the end. Raises `Unreachable` if it does not come in `left_s`."""
        try:
            async with asyncio.timeout(left_s):
                while (data := await anext(chunks, None)) == b"":
                    pass
                return data
        except TimeoutError:
            least = f"less than {CHUNK_BYTES >> 10} KiB of the folder have come in {self._stall_s:g} s"
            raise Unreachable(f"{least}: send the rest again") from None

    def _complete(self, name: str) -> None:
        part = self._part(name)
        with part.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != name:
            part.unlink()
            raise InvalidJob(f"the folder was damaged in transfer: its checksum is {digest[:12]}, not {name[:12]}")
        if self._shared is not None:
            # Before the rename: with its name it counts as uploaded, and after a crash nobody would copy it to the
            # store any more.
            self._shared.save(name, part)
        part.rename(self._path(name))
        log.info("bundle=%s complete, %d bytes", name[:12], self._path(name).stat().st_size)

    def _make_room(self) -> None:
        """Removes unused bundles, abandoned uploads first, until there is room for all uploads. Raises `TooMuch`,
        without removing any.
        """
        # A copy: this is a thread, and uploads begin and end on the event loop.
        coming, kept = dict(self._coming), []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if _name(entry.name) not in coming:
                    with suppress(FileNotFoundError):
                        stat = entry.stat()
                        kept.append((entry.name.endswith(WHOLE), stat.st_mtime, entry.name, stat.st_size))
        excess = sum(coming.values()) + sum(size_bytes for *_, size_bytes in kept) - self._max_total_bytes
        num_excess = len(coming) + len(kept) - MAX_BUNDLES
        is_full, removed = excess > 0 or num_excess > 0, []
        in_use = {*self._in_use(), *coming} if is_full else set()
        for _, _, file_name, size_bytes in sorted(kept) if is_full else ():  # the least needed first
            if (excess > 0 or num_excess > 0) and _name(file_name) not in in_use:
                removed.append(file_name)
                excess, num_excess = excess - size_bytes, num_excess - 1
        if excess > 0 or num_excess > 0:
            most = f"{self._max_total_bytes >> 20} MiB" if excess > 0 else f"{MAX_BUNDLES} folders"
            raise TooMuch(
                f"the folders of the jobs that have not ended, and those that others send now, take all of the {most} "
                "that the coordinator has room for: try again later"
            )
        for file_name in removed:
            if self._shared is not None and file_name.endswith(WHOLE):
                # First: after a crash, a folder that is only in the store would come back (`SharedBundles.restore`).
                self._shared.remove(_name(file_name))
            (self._folder / file_name).unlink(missing_ok=True)
            log.info("bundle=%s removed: there is no room for it any more", file_name[:12])

    async def chunks(self, name: str, offset: int) -> AsyncIterator[bytes]:
        """The bundle's bytes from a position on. Raises `InvalidJob` when it is not here."""
        self.require(name)
        with self._path(name).open("rb") as file:
            file.seek(offset)
            while data := await asyncio.to_thread(file.read, CHUNK_BYTES):
                yield data


def _size(path: Path) -> int | None:
    with suppress(FileNotFoundError):
        return path.stat().st_size
    return None


def _name(file_name: str) -> str:
    return file_name.partition(".")[0]
