"""Puts this host's part of an ended job into the artifact store, when the coordinator orders it (`elche.artifacts`)."""

import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

from elche.artifacts import (
    BEST,
    CHECKPOINTS,
    CHUNK_BYTES,
    LAST,
    MANIFEST,
    MODEL,
    RECORD,
    StoreFolder,
    is_folder,
    rank_log,
    reason_of,
)
from elche.errors import InvalidJob
from elche.v1 import agent_pb2
from elche_worker.agent.job_folders import JobFolders
from elche_worker.agent.processes import Processes
from elche_worker.process.log_times import TimesReader
from elche_worker.process.rank_files import RankFiles

log = logging.getLogger(__name__)

ALIVE_EVERY_S = 5.0
"""Interval of empty messages while files are written, in seconds: stores may take long over one."""
EXIT_S = 60.0
"""Seconds for which a job's ranks may take to exit; then their logs are stored as they are."""
LOOK_EVERY_S = 0.1
"""Seconds between two looks if a job's ranks have exited."""
MAX_MANIFEST_BYTES = 1 << 20
TRIES = 3
"""How often one file is tried: with a store that fails now and then, no attempt at all files would succeed."""
AGAIN_S = 0.5
"""Seconds until it is tried again."""
FORMAT = 1
"""Version of the manifest's format."""


class ArtifactWriter:
    """Stores jobs' artifacts: one job at a time in the coordinator's store, and one in stores of jobs' own."""

    def __init__(self, folders: JobFolders, processes: Processes, *, is_confined: bool) -> None:
        """`is_confined`: False if jobs may write to any folder that the agent may write to."""
        self._is_confined = is_confined
        self._folders = folders
        self._processes = processes
        self._turns = {is_of_job: threading.Lock() for is_of_job in (False, True)}
        """Held while an order is carried out: several uploads at once would slow down training ranks. A job's own store
        (True) may hang, and then must only make other such jobs wait.
        """
        self._changed = threading.Condition()
        self._num_open = 0
        """Orders that are not answered yet. Guarded by `_changed`."""

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Context in which an order is carried out and answered. An agent that leaves waits for its end, since the
        coordinator would not learn of the stored files otherwise.
        """
        with self._changed:
            self._num_open += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_open -= 1
                self._changed.notify_all()

    @property
    def is_idle(self) -> bool:
        """True if nothing is being stored."""
        return not self._num_open

    def wait_until_idle(self, limit_s: float) -> bool:
        """Waits until nothing is being stored; returns False when the time is over first."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._num_open, timeout=limit_s)

    def answers(self, order: agent_pb2.StoreArtifacts) -> Iterator[agent_pb2.DeliverRequest]:
        """Carries out an order on a thread; yields empty messages meanwhile, and at the end the manifest, or why there
        is none. The order is completed even if the caller stops iterating.
        """
        answer: list[agent_pb2.DeliverRequest] = []
        thread = threading.Thread(target=self._run, args=(order, answer), daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(ALIVE_EVERY_S)
            yield agent_pb2.DeliverRequest()
        yield from answer

    def _run(self, order: agent_pb2.StoreArtifacts, answer: list[agent_pb2.DeliverRequest]) -> None:
        try:
            with self._turns[order.is_of_job]:
                answer.append(agent_pb2.DeliverRequest(data=self._store(order)))
        except InvalidJob as error:
            answer.append(agent_pb2.DeliverRequest(error=str(error)))
        except Exception as error:  # packages of fsspec raise errors of any type
            reason = f"{order.root} cannot be written: {reason_of(error)}"
            answer.append(agent_pb2.DeliverRequest(error=reason))

    def _store(self, order: agent_pb2.StoreArtifacts) -> bytes:
        """Writes the files and the manifest; returns the manifest. Raises `InvalidJob`, and the store's errors."""
        folder = self._folders.find(order.job_id)
        if folder is None or not folder.is_dir():
            raise InvalidJob(f"the folder of job {order.job_id} is not there" if folder else "the job has not run here")
        if self._is_confined and order.is_of_job and is_folder(order.root):
            raise InvalidJob(f"jobs are confined here (--confine) and may name a URL to store in, not {order.root}")
        limit_s = time.monotonic() + EXIT_S
        while any(self._processes.has(order.job_id, rank) for rank in order.ranks) and time.monotonic() < limit_s:
            time.sleep(LOOK_EVERY_S)
        place = StoreFolder(order.root, order.folder)
        place.begin()
        written: dict[str, Any] = {}
        missing: list[str] = []
        files = self._processes.files
        wanted = {rank_log(rank): partial(_stamped, folder / rank_log(rank), files) for rank in order.ranks}
        if order.has_model:
            wanted |= {name: partial(_chunks, folder / name, files) for name in (MODEL, BEST, LAST)}
        for name, chunks in wanted.items():
            if (entry := _write(place, name, chunks)) is not None:
                written[name] = entry
            elif name not in (BEST, LAST):
                missing.append(name)
        for path in order.checkpoints:
            written |= _store_checkpoint(Path(path), place, files)
        if order.record:
            written[RECORD] = _write(place, RECORD, lambda: iter((order.record.encode(),)))
        about = {"format": FORMAT, "job": order.job_id, "host": socket.gethostname()}
        manifest = json.dumps({**about, "files": written, "missing": missing}, indent=1).encode()
        _write(place, MANIFEST, lambda: iter((manifest,)))  # last: a folder with a manifest is complete
        log.info("job=%s %d files are stored in %s", order.job_id, len(written), place.address)
        return manifest


def _store_checkpoint(folder: Path, place: StoreFolder, files: RankFiles) -> dict[str, Any]:
    """Stores a checkpoint, its own manifest last. Does nothing if the checkpoint is not on this host."""
    try:
        with files.read(folder / MANIFEST) as file:
            manifest = file.read(MAX_MANIFEST_BYTES)
        names = [PurePosixPath(name) for name in json.loads(manifest)["files"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    # user code may have written the manifest, with paths outside of the folder
    if any(name.is_absolute() or ".." in name.parts for name in names):
        return {}
    written = {}
    for name in (*map(str, names), MANIFEST):
        stored = f"{CHECKPOINTS}/{folder.name}/{name}"
        if (entry := _write(place, stored, partial(_chunks, folder / name, files))) is None:
            return {}  # it is being removed
        written[stored] = entry
    return written


def _write(place: StoreFolder, name: str, chunks: Callable[[], Iterator[bytes]]) -> dict[str, Any] | None:
    """Writes a file, if need be several times; `chunks` begins to read it. None if there is no such file."""
    for _ in range(TRIES - 1):
        try:
            return _write_once(place, name, chunks)
        except Exception as error:  # packages of fsspec raise errors of any type
            log.info("%s/%s is tried again: %s", place.address, name, reason_of(error))
            time.sleep(AGAIN_S)
    return _write_once(place, name, chunks)


def _write_once(place: StoreFolder, name: str, chunks: Callable[[], Iterator[bytes]]) -> dict[str, Any] | None:
    begun = _begun(chunks())
    return None if begun is None else place.write(name, begun)


def _begun(chunks: Iterator[bytes]) -> Iterator[bytes] | None:
    """The chunks of a file; None if the file does not exist."""
    try:
        return chain((next(chunks, b""),), chunks)
    except FileNotFoundError:
        return None


def _chunks(path: Path, files: RankFiles) -> Iterator[bytes]:
    with files.read(path) as file:
        while data := file.read(CHUNK_BYTES):
            yield data


def _stamped(path: Path, files: RankFiles) -> Iterator[bytes]:
    """A log, with the time before each line."""
    times, offset = TimesReader(path, files), 0
    for data in _chunks(path, files):
        yield times.stamped(offset, data)
        offset += len(data)
