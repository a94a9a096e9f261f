"""Uploads a bundle, and resumes when the connection breaks."""

import ast
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from elche.bundle import CHUNK_BYTES
from elche.errors import InvalidJob, Unreachable
from elche.package import needs_root, package_of
from elche.script import check_module
from elche.status import calling
from elche.v1 import bundle_pb2 as pb
from elche.v1.bundle_pb2_grpc import BundleServiceStub
from elche_client.transport.bundle import Bundle

ALONE = "none"
"""Value instead of a folder: the file is sent alone."""
VARIABLE = "ELCHE_FOLDER"
FIND_TIMEOUT_S = 10.0
RETRY_AFTER_S = (0.2, 0.5, 1.0, 2.0, 4.0)
"""Pauses in seconds between attempts in a row without progress."""


def upload(
    stub: BundleServiceStub,
    bundle: Bundle,
    *,
    address: str,
    metadata: tuple[tuple[str, str], ...],
    on_progress: Callable[[int], None] = lambda num_bytes: None,
) -> int:
    """Uploads the part of a bundle that the coordinator lacks; returns its number of bytes. Calls `on_progress` with
    the number of bytes that the coordinator has.

    Raises `Unreachable` after six broken connections without progress, `InvalidJob` if the coordinator refuses the
    bundle, and `TooMuch` if it has no room.
    """
    best = first = -1
    num_failures = 0
    while True:
        try:
            with calling(address):
                # Also after an upload without error: only the coordinator can say that the bundle is complete.
                found = stub.FindBundle(
                    pb.FindBundleRequest(bundle=bundle.name), timeout=FIND_TIMEOUT_S, metadata=metadata
                )
                first = found.size_bytes if first < 0 else first
                on_progress(found.size_bytes)
                if found.is_complete:
                    return bundle.size_bytes - first
                if found.size_bytes > best:
                    best, num_failures = found.size_bytes, 0
                stub.UploadBundle(_requests(bundle, found.size_bytes, on_progress), metadata=metadata)
        except Unreachable:
            if num_failures == len(RETRY_AFTER_S):
                raise
            time.sleep(RETRY_AFTER_S[num_failures])
            num_failures += 1


def _requests(bundle: Bundle, offset: int, on_progress: Callable[[int], None]) -> Iterator[pb.UploadBundleRequest]:
    yield pb.UploadBundleRequest(bundle=bundle.name, offset=offset, size_bytes=bundle.size_bytes)
    for data in _chunks(bundle.archive, offset):
        yield pb.UploadBundleRequest(data=data)
        offset += len(data)
        on_progress(offset)


def _chunks(path: Path, offset: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(offset)
        while data := file.read(CHUNK_BYTES):
            yield data


def folder_of(path: str | os.PathLike[str], folder: str | os.PathLike[str] | None) -> Path | None:
    """The folder that is sent with a file: the given one, else that of ELCHE_FOLDER, else the file's own, or that of
    the packages around it which it imports from; None for "none". Raises `InvalidJob` if the file is not in it.
    """
    chosen = os.fspath(folder if folder is not None else os.environ.get(VARIABLE) or _own_folder(Path(path)))
    if chosen == ALONE:
        return None
    entry_of(Path(path), Path(chosen))
    return Path(chosen)


def _own_folder(path: Path) -> Path:
    try:
        source = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError):  # whoever reads the file says so
        return path.parent
    package, root = package_of(source, str(path))
    return Path(root) if package and needs_root(source, package) else path.parent


def file_of_module(name: str, folder: str | os.PathLike[str] | None) -> tuple[Path, Path]:
    """(file, folder) of a job given as PACKAGE.MODULE:NAME in a folder, by default this one. Raises `InvalidJob`."""
    module, attribute = check_module(name)
    root = Path(folder or os.environ.get(VARIABLE) or ".")
    stem = root.joinpath(*module.split("."))
    for path in (stem.with_suffix(".py"), stem / "__init__.py"):
        if path.is_file():
            if not _may_define(path, attribute):
                raise InvalidJob(f"{path} defines no {attribute!r}")
            return path, root
    raise InvalidJob(f"{root} has no module {module}: there is no file {stem.with_suffix('.py')}")


def _may_define(path: Path, name: str) -> bool:
    """True if a file's text may define a name; only the ranks, which run it, can tell for certain."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return True
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=found) | ast.FunctionDef(name=found) | ast.ClassDef(name=found) if found == name:
                return True
            case ast.alias(name=found, asname=other) if name in (other, found.partition(".")[0]) or found == "*":
                return True
            case _:
                continue
    return False


def entry_of(path: Path, folder: Path) -> str:
    """The file's path in its folder's bundle. Raises `InvalidJob` if it is not in the folder."""
    if not folder.is_dir():
        raise InvalidJob(f"the folder {folder} does not exist")
    try:
        return path.resolve().relative_to(folder.resolve()).as_posix()
    except ValueError:
        raise InvalidJob(f"{path} is not in the folder {folder}, which is sent with it") from None
