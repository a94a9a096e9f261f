"""Packs the folder of a job's file, so that its ranks can import and read the other files in it.

Equal folders make equal archives, whenever and wherever they are packed; the archive's name is its checksum.
"""

import gzip
import hashlib
import os
import stat
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pathspec import GitIgnoreSpec

from elche.artifacts import reason_of
from elche.bundle import MAX_ARCHIVE_BYTES, MAX_DEPTH, MAX_FILES, MAX_UNPACKED_BYTES, check_path
from elche.errors import InvalidJob

IGNORE_FILES = (".gitignore", ".elcheignore")
"""Files with patterns to exclude, in Git's syntax; the latter has precedence."""
ALWAYS_IGNORED = (
    *(".git/", ".hg/", ".svn/", ".venv/", "venv/", "node_modules/", "__pycache__/", "*.pyc", ".DS_Store"),
    *(".ipynb_checkpoints/", ".mypy_cache/", ".pytest_cache/", ".ruff_cache/", ".tox/"),
)
"""Patterns that are excluded unless an ignore file includes them again."""
WHAT_TO_DO = (
    "put the file in a folder of its own, name what is not needed in .elcheignore (as in .gitignore), "
    "or send the file alone with --folder none"
)
LEVEL = 1
"""Level of compression: code is small, and data seldom compresses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """A packed folder."""

    name: str
    """SHA-256 of the archive, in hex."""
    archive: Path
    size_bytes: int
    """Size of the archive in bytes."""
    left_out: tuple[str, ...]
    """Excluded links that lead out of the folder, as "NAME -> TARGET"."""


@contextmanager
def packed(folder: Path) -> Iterator[Bundle]:
    """Context with the folder's bundle, in a temporary file.

    Excludes files that Git would ignore, and caches. Raises `InvalidJob` if the folder is too large, or a file in it
    cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="elche-") as temporary:
        archive = Path(temporary) / "bundle.tar.gz"
        left_out: list[str] = []
        names = _listed(folder, left_out)
        try:
            _pack(folder, names, archive)
            with archive.open("rb") as file:
                name = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise InvalidJob(f"the folder {folder} cannot be packed in {temporary}: {error.strerror}") from error
        size_bytes = archive.stat().st_size
        yield Bundle(name=name, archive=archive, size_bytes=size_bytes, left_out=tuple(left_out))


def _pack(folder: Path, names: Sequence[str], archive: Path) -> None:
    # A name and a time in gzip's header would give equal folders other checksums, so that each one is uploaded again.
    with archive.open("wb") as raw, gzip.GzipFile("", "wb", LEVEL, raw, mtime=0) as zipped:  # noqa: SIM117
        with tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for name in names:
                _add(tar, folder, name)
                _check_size(folder, archive_bytes=archive.stat().st_size)
    _check_size(folder, archive_bytes=archive.stat().st_size)


def _listed(folder: Path, left_out: list[str]) -> list[str]:
    """The files to pack. Raises `InvalidJob` for a folder that is too large before any is packed."""
    names, num_bytes = [], 0
    for name in _files(folder, left_out):
        names.append(name)
        with suppress(OSError):  # removed meanwhile: `_add` skips it
            num_bytes += (folder / name).stat().st_size
        _check_size(folder, num_files=len(names), num_bytes=num_bytes)
    return names


def _files(folder: Path, left_out: list[str]) -> Iterator[str]:
    """Relative paths of the files to pack, in order; adds links that lead out of the folder to `left_out`."""
    specs: dict[str, list[GitIgnoreSpec]] = {}
    root = folder.resolve()

    def fail(error: OSError) -> None:
        raise InvalidJob(f"{error.filename} cannot be read: {error.strerror}; {WHAT_TO_DO}") from error

    for path, folders, files in os.walk(root, onerror=fail):
        prefix = "" if Path(path) == root else f"{Path(path).relative_to(root).as_posix()}/"
        if prefix.count("/") > MAX_DEPTH:
            raise InvalidJob(f"{prefix[:200]}... is deeper than {MAX_DEPTH} folders; {WHAT_TO_DO}")
        specs[prefix] = [_spec(Path(path) / name) for name in IGNORE_FILES if name in files]
        links = [name for name in folders if (Path(path) / name).is_symlink()]
        left_out += [f"{prefix}{name} -> {os.readlink(Path(path) / name)}" for name in sorted(links)]
        folders[:] = sorted(
            name for name in folders if name not in links and not _is_ignored(f"{prefix}{name}/", specs)
        )
        for name in sorted(files):
            if _is_ignored(f"{prefix}{name}", specs) or not _is_file(Path(path) / name):
                continue
            if (Path(path) / name).is_symlink() and not (Path(path) / name).resolve().is_relative_to(root):
                left_out.append(f"{prefix}{name} -> {os.readlink(Path(path) / name)}")
                continue
            yield check_path(f"{prefix}{name}")


def _spec(path: Path) -> GitIgnoreSpec:
    try:
        return GitIgnoreSpec.from_lines(path.read_text(encoding="utf-8").splitlines())
    except (OSError, ValueError) as error:
        raise InvalidJob(f"{path} cannot be read: {reason_of(error)}") from error


def _is_ignored(name: str, specs: dict[str, list[GitIgnoreSpec]]) -> bool:
    """True if a file, or a folder with a final slash, is excluded. The nearest matching pattern counts."""
    at = name.rstrip("/").rfind("/") + 1
    while True:
        prefix = name[:at]
        for spec in reversed(specs.get(prefix, [])):
            is_included = spec.check_file(name[at:]).include
            if is_included is not None:
                return is_included
        if not at:
            return _ALWAYS.match_file(name)
        at = name[: at - 1].rfind("/") + 1


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return False


def _add(tar: tarfile.TarFile, folder: Path, name: str) -> None:
    """Adds a file, with only the executable bit of its attributes."""
    path = folder / name
    try:
        name.encode("utf-8")
        with path.open("rb") as file:
            about = os.fstat(file.fileno())
            info = tarfile.TarInfo(name)
            # The size of the open file: if it grows meanwhile, the rest is left out; if it shrinks, `addfile` raises an
            # OSError.
            info.size = about.st_size
            info.mode = 0o755 if about.st_mode & stat.S_IXUSR else 0o644
            tar.addfile(info, file)
    except UnicodeEncodeError as error:
        raise InvalidJob(f"the name {str(path)!a} is not UTF-8; {WHAT_TO_DO}") from error
    except FileNotFoundError:
        return  # removed meanwhile by a process that works in the folder
    except OSError as error:
        reason = error.strerror or "it has changed meanwhile"
        raise InvalidJob(f"{path} cannot be packed: {reason}; {WHAT_TO_DO}") from error


def _check_size(folder: Path, num_files: int = 0, num_bytes: int = 0, archive_bytes: int = 0) -> None:
    limits = (
        (num_files, MAX_FILES, f"{MAX_FILES:,} files"),
        (num_bytes, MAX_UNPACKED_BYTES, f"{MAX_UNPACKED_BYTES >> 20:,} MiB"),
        (archive_bytes, MAX_ARCHIVE_BYTES, f"{MAX_ARCHIVE_BYTES >> 20:,} MiB when packed"),
    )
    for value, limit, text in limits:
        if value > limit:
            raise InvalidJob(f"the folder {folder} has more than {text}, too much to send to the ranks: {WHAT_TO_DO}")


_ALWAYS = GitIgnoreSpec.from_lines(ALWAYS_IGNORED)
