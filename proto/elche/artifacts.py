"""Artifact stores: folders, or URLs that fsspec knows, in which what jobs leave outlives the hosts that made it.

    ROOT/JOB/HOST-1a2b3c4d/model.safetensors   the final model; the best or last one beside it where it is another
    ROOT/JOB/HOST-1a2b3c4d/rank-0.log          the logs of its ranks there, with the time before each line
    ROOT/JOB/HOST-1a2b3c4d/checkpoints/NAME/   its newest checkpoint, and the best one
    ROOT/JOB/HOST-1a2b3c4d/record.json         what was asked for, and what came of it
    ROOT/JOB/HOST-1a2b3c4d/manifest.json       every file's size and SHA-256

When a job has ended the coordinator orders each host that has something of it to store that (`StoreArtifacts`). The
agent writes the files, each under its name when it is whole, then the manifest, and delivers the manifest. The
coordinator reads it back, keeps it in its database, and from then on serves the files from the store when no host can.
What an order names that has no manifest is not there. An order is repeated until it has succeeded: it begins by
removing the manifest.

Whoever starts the coordinator names the store, or whoever submits a job names the job's own. Workers write it, and the
coordinator reads it.
"""

import errno
import hashlib
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from elche.errors import InvalidJob

MANIFEST = "manifest.json"
MODEL = "model.safetensors"
BEST = "best.safetensors"
LAST = "last.safetensors"
RECORD = "record.json"
CHECKPOINTS = "checkpoints"
CHUNK_BYTES = 1 << 20
NOT_STORED = "not stored yet"
"""In the text on an ended job's artifacts while a host has something of it that the store has not."""
DRAFT = re.compile(r"\..*\.draft")
MAX_REASON_CHARS = 300
MAX_SCHEME_CHARS = 40
HIDDEN = re.compile("KEY|SECRET|TOKEN|PASSWORD|CREDENTIAL|SIGNATURE", re.IGNORECASE)
"""In names of environment variables whose values no message may contain."""
MIN_HIDDEN_CHARS = 8


def rank_log(rank: int) -> str:
    """The name of a rank's log."""
    return f"rank-{rank}.log"


def problem_of(root: str) -> str:
    """Returns why a text cannot be the address of a store; empty if it can. It repeats no secret of the text."""
    path = root.removeprefix("file://").removeprefix("local://")
    if "://" not in path:
        return "" if os.path.isabs(path) else f"{root!r} is neither an absolute path nor a URL"
    parts = urlsplit(root)
    if parts.password or parts.query:
        return (
            f"the {parts.scheme} URL has credentials: leave them to the environment of the workers and the coordinator"
        )
    return ""


def check_known(root: str) -> None:
    """Raises `InvalidJob` for a URL whose scheme fsspec does not know here. Packages of known ones may be missing."""
    try:
        from fsspec.registry import known_implementations, registry
    except ImportError:
        return
    scheme, is_url, _ = root.partition("://")
    if is_url and not is_folder(root) and scheme not in {*known_implementations, *registry}:
        raise InvalidJob(
            f"the artifact store cannot be used: fsspec knows no URL that begins with {scheme[:MAX_SCHEME_CHARS]}://"
        )


def check_place(place: str) -> None:
    """Raises `InvalidJob` for a text that cannot be a job's own artifact store. An empty one is the coordinator's."""
    if "\0" in place or "::" in place:
        raise InvalidJob("the artifact store is one folder or URL, without '::' and zero bytes")
    if place and (problem := problem_of(place)):
        raise InvalidJob(f"the artifact store cannot be used: {problem}")


def is_folder(place: str) -> bool:
    """True for a store in the file system of whoever reads and writes it."""
    scheme, is_url, _ = place.rpartition("://")
    return not is_url or scheme in ("file", "local")


def reason_of(error: BaseException) -> str:
    """An error of a store in one line, without the values of secret environment variables."""
    text = (error.strerror if isinstance(error, OSError) and error.strerror else str(error)) or type(error).__name__
    for name, value in os.environ.items():
        if len(value) >= MIN_HIDDEN_CHARS and HIDDEN.search(name):
            text = text.replace(value, "***")
    return " ".join(text.split())[:MAX_REASON_CHARS]


class StoreFolder:
    """One folder of a store. Calls raise what the store raises: `OSError`, or other errors of fsspec's packages."""

    def __init__(self, root: str, folder: str) -> None:
        """Raises `InvalidJob` where fsspec, or what it needs for the URL, is missing."""
        self.address = f"{root.rstrip('/')}/{folder}"
        path = Path(root.rpartition("://")[2])
        self._files: _Folder | _Remote = _Folder(path, folder) if is_folder(root) else _Remote(self.address)

    def begin(self) -> None:
        """Removes the manifest: the folder's files are not used until a new manifest is written."""
        self._files.begin()

    def write(self, name: str, chunks: Iterable[bytes]) -> dict[str, Any]:
        """Writes a file, which gets its name when it is whole and durable; returns its size and SHA-256."""
        digest, size_bytes = hashlib.sha256(), 0
        with self._files.writing(name) as file:
            for data in chunks:
                digest.update(data)
                size_bytes += file.write(data)
        return {"bytes": size_bytes, "sha256": digest.hexdigest()}

    def read(self, name: str, entry: Mapping[str, Any] | None = None) -> Iterator[bytes]:
        """A file's bytes. With its `entry` in the manifest, raises `InvalidJob` when they are not what was stored; the
        last chunk is given when that is known.
        """
        digest, size_bytes, last = hashlib.sha256(), 0, b""
        with self._files.reading(name) as file:
            while data := file.read(CHUNK_BYTES):
                digest.update(data)
                size_bytes += len(data)
                if entry is not None and size_bytes > entry["bytes"]:
                    break  # whoever names a store may have it send without end
                if last:
                    yield last
                last = data
        if entry is not None and digest.hexdigest() != entry["sha256"]:
            more = " or more" if size_bytes > entry["bytes"] else ""
            differs = f"it has {size_bytes} bytes{more} and had {entry['bytes']}"
            if size_bytes == entry["bytes"]:
                differs = "its SHA-256 is not that of what was stored"
            raise InvalidJob(f"{self.address}/{name} in the artifact store is damaged: {differs}")
        yield last


class _Folder:
    """In a file system. No link in it is followed: who may write there must not lead others elsewhere."""

    def __init__(self, root: Path, folder: str) -> None:
        self._root = root
        self._folder = PurePosixPath(folder)

    def begin(self) -> None:
        if not self._root.is_dir():
            raise FileNotFoundError(
                f"{self._root} is not a folder on this host: mount it where all workers and the coordinator see it"
            )
        with self._entered(self._folder, makes=True) as handle:
            with suppress(FileNotFoundError):
                os.unlink(MANIFEST, dir_fd=handle)
            for _, _, names, inner in os.fwalk(".", dir_fd=handle):
                for name in names:
                    if DRAFT.fullmatch(name):  # of an agent that was killed
                        os.unlink(name, dir_fd=inner)

    @contextmanager
    def writing(self, name: str) -> Iterator[BinaryIO]:
        path = self._folder / name
        draft = f".{path.name}.{secrets.token_hex(4)}.draft"
        with self._entered(path.parent, makes=True) as handle:
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
                with os.fdopen(os.open(draft, flags, 0o640, dir_fd=handle), "wb") as file:
                    yield file
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(draft, path.name, src_dir_fd=handle, dst_dir_fd=handle)
            except BaseException:
                with suppress(OSError):  # the first error is the one to tell
                    os.unlink(draft, dir_fd=handle)
                raise
            os.fsync(handle)

    @contextmanager
    def reading(self, name: str) -> Iterator[BinaryIO]:
        path = self._folder / name
        with self._entered(path.parent) as handle:
            opened = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=handle)
            with os.fdopen(opened, "rb") as file:
                if not stat.S_ISREG(os.fstat(opened).st_mode):
                    raise OSError(errno.EINVAL, "it is not a plain file")
                yield file

    @contextmanager
    def _entered(self, folder: PurePosixPath, *, makes: bool = False) -> Iterator[int]:
        flags = os.O_RDONLY | os.O_DIRECTORY
        handle = os.open(self._root, flags)
        try:
            for name in folder.parts:
                if makes:
                    with suppress(FileExistsError):
                        os.mkdir(name, 0o750, dir_fd=handle)
                inner = os.open(name, flags | os.O_NOFOLLOW, dir_fd=handle)
                os.close(handle)
                handle = inner
            yield handle
        finally:
            os.close(handle)


class _Remote:
    """At a URL, by fsspec."""

    def __init__(self, url: str) -> None:
        self._fs, self._root = filesystem_of(url)

    def begin(self) -> None:
        if self._fs.exists(f"{self._root}/{MANIFEST}"):
            self._fs.rm(f"{self._root}/{MANIFEST}")

    @contextmanager
    def writing(self, name: str) -> Iterator[BinaryIO]:
        path = f"{self._root}/{name}"
        self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        with self._fs.open(path, "wb") as file:
            yield file

    @contextmanager
    def reading(self, name: str) -> Iterator[BinaryIO]:
        self._fs.invalidate_cache()
        with self._fs.open(f"{self._root}/{name}", "rb") as file:
            yield file


def filesystem_of(url: str) -> tuple[Any, str]:
    """The filesystem of a URL, as fsspec has it, and the path in it. Raises `InvalidJob` if it has none."""
    try:
        import fsspec
    except ImportError:
        raise InvalidJob(f"{url} needs fsspec: pip install fsspec, and what it names for this kind of URL") from None
    try:
        filesystem, root = fsspec.core.url_to_fs(url)
    except Exception as error:  # its filesystems raise what they like where a URL lacks something
        raise InvalidJob(f"{url} cannot be reached: {reason_of(error)}") from None
    return filesystem, root.rstrip("/")
