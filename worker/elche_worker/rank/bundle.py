"""Fetches the folder of the user's file from the coordinator and unpacks it, once per host for all ranks."""

import fcntl
import hashlib
import os
import shutil
import sys
import tarfile
import time
from pathlib import Path
from typing import IO, Self

import grpc

from elche.bundle import MAX_ARCHIVE_BYTES, MAX_FILES, MAX_UNPACKED_BYTES, check_path
from elche.errors import ElcheError, InvalidJob, Unreachable
from elche.status import calling
from elche.v1 import bundle_pb2, bundle_pb2_grpc
from elche_worker.session.launch import Launch

RETRY_S = 1.0
"""Seconds between two attempts of a download."""
MAX_HEADER_BYTES = 64 << 10
"""Most bytes of what an archive says of one file besides its data; the longest path in it takes a third of that."""
GIVE_UP_S = 60.0
"""Seconds without a byte, over all attempts, after which a download fails."""


def code_folder(bundle: str) -> str:
    """The name of the folder into which a bundle is unpacked, in the job's folder on each host."""
    return f"code-{bundle[:12]}"


def enter_folder(launch: Launch, channel: grpc.Channel) -> None:
    """Makes the job's folder the working directory of this process, from which modules can be imported.

    Raises `InvalidJob` for a bundle that cannot be unpacked, `Unreachable`, and `ElcheError` when the disk has no room.
    """
    if not launch.bundle:
        return
    folder = Path(launch.output_dir) / code_folder(launch.bundle)
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (folder.parent / f".{folder.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed, also by a kill
            if not folder.is_dir():
                _fetch(launch, channel, folder)
        os.chdir(folder)
        sys.path.append(str(folder.absolute()))
    except OSError as error:
        raise ElcheError(f"the folder of the job cannot be written to {folder}: {error.strerror}") from error


def _fetch(launch: Launch, channel: grpc.Channel, folder: Path) -> None:
    """Downloads and checks the bundle, and unpacks it into the folder, which is complete or not there."""
    archive, draft = folder.with_name(f".{folder.name}.tar.gz"), folder.with_name(f".{folder.name}.draft")
    with archive.open("w+b") as file:
        _download(launch, channel, file)
        file.seek(0)
        if hashlib.file_digest(file, "sha256").hexdigest() != launch.bundle:
            raise ElcheError("the folder of the job was damaged in transfer from the coordinator: its checksum differs")
        file.seek(0)
        shutil.rmtree(draft, ignore_errors=True)  # left by a process that was killed while it unpacked
        draft.mkdir(mode=0o700)
        unpack(file, draft)
    draft.rename(folder)
    archive.unlink()


def _download(launch: Launch, channel: grpc.Channel, file: IO[bytes]) -> None:
    """Downloads the bundle to a file; resumes at the same byte when the connection breaks. Raises `Unreachable` when
    nothing has come for `GIVE_UP_S`, and `InvalidJob` when it is too large.
    """
    stub = bundle_pb2_grpc.BundleServiceStub(channel)
    answered_s = time.monotonic()
    while True:
        try:
            with calling(launch.coordinator):
                request = bundle_pb2.FetchBundleRequest(offset=file.tell())
                for part in stub.FetchBundle(request, metadata=(("elche-secret", launch.secret),)):
                    file.write(part.data)
                    answered_s = time.monotonic()
                    if file.tell() > MAX_ARCHIVE_BYTES:
                        raise InvalidJob(f"the folder of the job has more than {MAX_ARCHIVE_BYTES >> 20} MiB")
            file.flush()
            return
        except Unreachable:
            if time.monotonic() - answered_s > GIVE_UP_S:
                raise
            time.sleep(RETRY_S)


_NO_ARCHIVE = (
    *(tarfile.TarError, EOFError, ValueError, TypeError, FileExistsError, NotADirectoryError),
    RecursionError,  # headers of headers
)
"""What reading raises for a file that is no archive, or a damaged one."""


class _Header(tarfile.TarInfo):
    """The header of an entry; checked before tarfile reads, whole into memory, what the entry says of the next one."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """As of `TarInfo`. Raises `InvalidJob` for what `elche submit` does not pack."""
        info = super().frombuf(buf, encoding, errors)
        # Not `isreg`: it is also true of sparse files, which list their parts in further blocks.
        if info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.XHDTYPE):
            raise InvalidJob(f"the folder of the job has {info.name[:200]!a}, which is not a regular file")
        if info.type == tarfile.XHDTYPE and info.size > MAX_HEADER_BYTES:
            raise InvalidJob(
                f"the folder of the job has a header of {info.size} bytes: {MAX_HEADER_BYTES} are possible"
            )
        return info

    def _proc_gnusparse_10(self, *_: object) -> None:
        """Called by tarfile before it reads the parts of a sparse file, a number for each, from the file's data."""
        raise InvalidJob("the folder of the job has a sparse file")


def unpack(archive: IO[bytes], folder: Path) -> None:
    """Unpacks a bundle into an empty folder. Raises `InvalidJob` for anything that `elche submit` does not pack: an
    entry that is not a regular file, a path outside of the folder, more files or bytes than the limits.
    """
    num_files = num_bytes = 0
    try:
        with tarfile.open(fileobj=archive, mode="r|gz", tarinfo=_Header) as tar:
            for info in tar:
                tar.members.clear()  # type: ignore[attr-defined]  # else tarfile would keep them all
                # A file that has less than no bytes would make room for others.
                num_files, num_bytes = num_files + 1, num_bytes + max(0, info.size)
                # Checked by the sizes in the archive's headers before anything is written: a small archive may unpack
                # to a full disk.
                if num_files > MAX_FILES or num_bytes > MAX_UNPACKED_BYTES:
                    limit = f"{MAX_FILES:,} files or {MAX_UNPACKED_BYTES >> 20:,} MiB"
                    raise InvalidJob(f"the folder of the job has more than {limit}")
                path = folder / check_path(info.name)
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                source = tar.extractfile(info)
                assert source is not None
                # `O_EXCL`: an archive with one path twice is refused, since nobody knows which of the files is meant.
                with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, info.mode & 0o700), "wb") as file:
                    shutil.copyfileobj(source, file, 1 << 20)
    except _NO_ARCHIVE as error:
        raise InvalidJob(f"the folder of the job is not an archive that `elche submit` makes: {error}") from error
