"""Has hosts put what ended jobs have left into the artifact store, and reads it from there (`elche.artifacts`).

A job's record, in the database, says by host where its files are, and what they were. Hosts are asked until each has
stored what it has; what is at its place in the meantime is fetched from the host.
"""

import asyncio
import hashlib
import json
import logging
import re
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import PurePath
from queue import SimpleQueue
from typing import Any, TypeVar

from elche.artifacts import (
    CHECKPOINTS,
    MANIFEST,
    NOT_STORED,
    RECORD,
    StoreFolder,
    check_known,
    problem_of,
    rank_log,
    reason_of,
)
from elche.errors import ElcheError, HostAway, InvalidJob
from elche.manifest import EMA, WEIGHTS
from elche.v1 import agent_pb2
from elche_coordinator.archive.catalogue import JobCatalogue
from elche_coordinator.config import CannotStart
from elche_coordinator.core.describe import JobView
from elche_coordinator.core.messages.ids import AgentId, JobId
from elche_coordinator.core.messages.reports import JobResult
from elche_coordinator.driver import Driver
from elche_coordinator.storage.sql.store import SqlStore
from elche_coordinator.storage.store import Replaced
from elche_coordinator.streams.transfers import Rest, Transfers

log = logging.getLogger(__name__)

RETRY_S = 1.0
"""Seconds until a failed attempt is repeated; doubled with each further failure, up to `MAX_RETRY_S`."""
MAX_RETRY_S = 300.0
LOOK_EVERY_S = 1.0
"""Seconds between two looks for jobs whose turn has come, unless an event wakes the loop sooner."""
MAX_AT_ONCE = 16
"""Jobs whose hosts store at the same time."""
MAX_MANIFEST_BYTES = 1 << 20
"""Largest manifest that is accepted of a host."""
MAX_RECORD_CHARS = 1 << 20
"""A longer record, of a job of very many ranks, is stored without its last view: it must fit into a message."""
STAMP_CHARS = 21
"""Before each line of a log in the store: the time, and a space."""

Result = TypeVar("Result")
Ask = Callable[[str], bool]
"""Asks a host to deliver a file to the transfer of a name. Returns False if no host with the file is connected."""


@dataclass(slots=True)
class _Part:
    """The files of a job that one host has."""

    agent_id: AgentId
    folder: str
    host: str
    ranks: list[int] = field(default_factory=list)
    has_model: bool = False

    @property
    def key(self) -> str:
        return self.folder or self.agent_id

    @property
    def name(self) -> str:
        host = re.sub("[^A-Za-z0-9-]", "-", self.host)[:40] or "host"
        return f"{host}-{hashlib.sha256(self.key.encode()).hexdigest()[:8]}"


@dataclass(slots=True)
class _Wait:
    """A job of which a host has something that is not stored yet."""

    due_s: float = 0.0
    retry_s: float = RETRY_S
    reason: str = ""
    is_own: bool = False
    """True if the job names a store of its own."""
    is_away: bool = False
    """True if the job waits only for hosts that are not connected."""


class _Away(ElcheError):
    """The host is not connected."""


class _Threads:
    """At most `MAX_AT_ONCE` threads. This process ends without them, unlike with those of `concurrent.futures`: a store
    may never answer.
    """

    def __init__(self) -> None:
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._num = 0

    async def run(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Calls the function on one of the threads; returns its result."""
        future: Future[Result] = Future()
        self._work.put((future, partial(function, *arguments)))
        if self._num < MAX_AT_ONCE:
            self._num += 1
            threading.Thread(target=self._run, name="artifacts", daemon=True).start()
        return await asyncio.wrap_future(future)

    def _run(self) -> None:
        while True:
            future, function = self._work.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)


class Artifacts:
    """The artifact store of a coordinator, or what was stored while it had one. Used on the event loop only."""

    def __init__(
        self, root: str, store: SqlStore, driver: Driver, catalogue: JobCatalogue, transfers: Transfers
    ) -> None:
        """`root`: folder or URL for jobs that name no store of their own; empty: there is none. Raises `CannotStart`
        and `StoreFailed`.
        """
        if problem := problem_of(root) if root else "":
            raise CannotStart(f"--artifacts: {problem}")
        try:
            check_known(root)  # now, since a store is written to when a job has ended
        except InvalidJob as error:
            raise CannotStart(f"--artifacts: {error}") from None
        self._root, self._store = root.rstrip("/"), store
        self._driver, self._catalogue, self._transfers = driver, catalogue, transfers
        rows = store.load_artifacts()
        catalogue.manifest_bytes |= {job_id: len(text) for job_id, text in rows.items()}
        self._kept: dict[str, dict[str, dict[str, Any]]] = _read(rows)
        """By job and by host's key: the store's address, the folder in it, and the manifest's files."""
        self._waiting: dict[str, _Wait] = {}
        self._busy: dict[str, asyncio.Task[None]] = {}
        self._wake = asyncio.Event()
        self._threads = {is_own: _Threads() for is_own in (False, True)}
        """For jobs' own stores, and for others: a store that hangs holds its kind's threads, and no others."""
        self.num_failures = 0
        for job_id in self._kept:
            self._update_text(job_id)

    @property
    def num_waiting(self) -> int:
        """Jobs that have ended, and are not all in the store."""
        return len(self._waiting)

    async def run(self) -> None:
        """Has what jobs leave stored, until it is cancelled."""
        self._waiting = {
            job_id: self._new_wait(job_id) for job_id in self._catalogue.job_ids() if self._lacking(job_id)
        }
        for job_id in self._waiting:
            self._update_text(job_id)
        self._driver.watchers.on_ended(self._add)
        known: set[AgentId] = set()
        while True:
            connected = {host.agent_id for host in self._driver.agents.hosts()}
            is_new, known = not connected <= known, connected
            now_s = asyncio.get_running_loop().time()
            num_busy = Counter(self._waiting[job_id].is_own for job_id in self._busy)
            for job_id, wait in self._waiting.items():
                has_turn = num_busy[wait.is_own] < MAX_AT_ONCE and job_id not in self._busy
                if has_turn and (wait.due_s <= now_s or (is_new and wait.is_away)):
                    self._busy[job_id] = asyncio.create_task(self._store_job(job_id, wait))
                    num_busy[wait.is_own] += 1
            for job_id in self._kept.keys() - self._catalogue.artifacts.keys() - self._busy.keys():
                del self._kept[job_id]  # the job is forgotten
            self._wake.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EVERY_S):
                    await self._wake.wait()

    def _store_of(self, job_id: str) -> str:
        """The job's artifact store, or else that of the coordinator; empty: there is none."""
        spec = self._catalogue.spec(job_id)
        return spec.artifacts.rstrip("/") if spec is not None and spec.artifacts else self._root

    def _new_wait(self, job_id: str) -> _Wait:
        return _Wait(is_own=self._store_of(job_id) != self._root)

    def _add(self, job_id: JobId) -> None:
        if not self._store_of(job_id):
            return
        self._waiting[job_id] = self._new_wait(job_id)
        self._update_text(job_id)
        self._wake.set()

    async def _store_job(self, job_id: str, wait: _Wait) -> None:
        """Asks the hosts for what is not stored. The job waits on, and longer each time, if that is not all."""
        reasons: list[str] = []
        wait.is_away = True
        try:
            for view, part in self._lacking(job_id):
                try:
                    await self._store_part(view, part)
                except ElcheError as error:
                    reasons.append(str(error))
                    if not isinstance(error, _Away):
                        wait.is_away = False
                        self.num_failures += 1
        except Exception:
            log.exception("job=%s what it left cannot be stored; this is a bug", job_id)
            reasons, wait.is_away = ["a bug in the coordinator; see its log"], False
        finally:
            del self._busy[job_id]
        if not reasons:
            self._waiting.pop(job_id, None)
            if self._kept.get(job_id):
                log.info("job=%s what it left is stored in %s", job_id, self._place_of(job_id))
        else:
            reason = "; ".join(reasons)
            if reason != wait.reason:
                log.warning("job=%s not all that it left is stored, which is tried again: %s", job_id, reason)
            wait.reason = reason
            wait.due_s = asyncio.get_running_loop().time() + wait.retry_s
            wait.retry_s = min(2 * wait.retry_s, MAX_RETRY_S)
            self._waiting[job_id] = self._waiting.pop(job_id)  # behind those that wait for their turn
        if self._catalogue.result(job_id) is not None:  # it is not forgotten
            self._update_text(job_id)
        self._wake.set()

    def _lacking(self, job_id: str) -> list[tuple[JobView, _Part]]:
        """The parts of a job that are not stored yet; none of one without a store, or that is no longer kept."""
        view, result = self._catalogue.view(job_id), self._catalogue.result(job_id)
        if view is None or result is None or not self._store_of(job_id):
            return []
        return [(view, part) for part in _parts_of(view, result) if part.key not in self._kept.get(job_id, {})]

    async def _store_part(self, view: JobView, part: _Part) -> None:
        """Has one host store what it has. Raises `ElcheError`."""
        holders = self._driver.agents.holders(view.job_id, part.agent_id, part.folder)
        if not holders:
            raise _Away(f"{part.host} is not connected, which has {_described(part)}")
        kept = self._kept.get(view.job_id, {})
        there = {name for one in kept.values() for name in one["files"]}
        # One copy of the record suffices: it goes to the first host that stores something.
        record = "" if RECORD in there else await asyncio.to_thread(self._record, view.job_id)
        root = self._store_of(view.job_id)
        order = agent_pb2.StoreArtifacts(
            job_id=view.job_id,
            transfer=self._transfers.begin(),
            root=root,
            is_of_job=root != self._root,
            folder=f"{view.job_id}/{part.name}",
            ranks=part.ranks,
            has_model=part.has_model,
            checkpoints=[path for path in _wanted_checkpoints(view) if _manifest_of(path) not in there],
            record=record,
        )
        if not self._driver.agents.ask(holders[0], agent_pb2.AttendResponse(store_artifacts=order)):
            self._transfers.drop(order.transfer)
            raise _Away(f"{part.host} has disconnected, which has {_described(part)}")
        try:
            answer = await self._transfers.whole(order.transfer, MAX_MANIFEST_BYTES)
            if not answer:
                raise _Away(f"{part.host} has disconnected, which has {_described(part)}")
            manifest = json.loads(answer)
            files = {
                str(name): {"bytes": int(one["bytes"]), "sha256": str(one["sha256"])}
                for name, one in manifest["files"].items()
            }
            missing = [str(name) for name in manifest["missing"]]
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            raise InvalidJob(f"the worker on {part.host} has sent something other than a manifest") from None
        except _Away:
            raise
        except ElcheError as error:
            raise InvalidJob(f"{part.host}: {error}") from None
        await self._in_thread(root, _check, root, order.folder, part.host, answer)
        entry = {"root": root, "folder": order.folder, "files": files, "missing": missing}
        text = json.dumps({**self._kept.get(view.job_id, {}), part.key: entry})
        try:
            await asyncio.to_thread(self._store.save_artifacts, view.job_id, text)
        except Replaced as error:
            raise InvalidJob(str(error)) from None
        # Only once the database has it: what a restart would forget must not be served (protocol P13.7).
        self._kept.setdefault(view.job_id, {})[part.key] = entry
        self._catalogue.manifest_bytes[view.job_id] = len(text)

    def _record(self, job_id: str) -> str:
        """The job's record as JSON, without its environment variables. Raises `StoreFailed`."""
        try:
            row = self._store.load_row(job_id)
        except KeyError:
            return ""
        spec, known = json.loads(row.spec) if row.spec else {}, json.loads(row.record)
        record = {"job": job_id, "spec": {**spec, "environment": {}}, **known}
        text = json.dumps(record, indent=1)
        return text if len(text) <= MAX_RECORD_CHARS else json.dumps({**record, "view": None}, indent=1)

    def _update_text(self, job_id: str) -> None:
        """Updates the text for people that says where the job's artifacts are, or why they are not stored yet."""
        kept, wait = self._kept.get(job_id, {}), self._waiting.get(job_id)
        lacks = [f"{name} was not on its host" for one in kept.values() for name in one["missing"]]
        told = [self._place_of(job_id), *lacks] if kept else []
        told += [f"{NOT_STORED}: {wait.reason}" if wait.reason else NOT_STORED] if wait is not None else []
        if told:
            self._catalogue.artifacts[job_id] = "; ".join(told)
        else:
            self._catalogue.artifacts.pop(job_id, None)

    def _place_of(self, job_id: str) -> str:
        """The address of the folder in which a job's files are stored."""
        return f"{next(iter(self._kept[job_id].values()))['root']}/{job_id}"

    # What is there

    async def _in_thread(self, root: str, function: Callable[..., Result], *arguments: Any) -> Result:
        """Calls a function that uses the store at `root` on a thread; returns its result."""
        return await self._threads[root != self._root].run(function, *arguments)

    def has(self, job_id: str, name: str) -> bool:
        """True if the store has the file of a job."""
        return self._find(job_id, name) is not None

    def _find(self, job_id: str, name: str) -> dict[str, Any] | None:
        return next((one for one in self._kept.get(job_id, {}).values() if name in one["files"]), None)

    async def chunks(self, job_id: str, name: str, rest: Rest | None = None) -> AsyncGenerator[bytes]:
        """Yields a file that the store has, or the rest of it. Raises `InvalidJob` when it cannot be read, or is not
        what was stored.
        """
        entry = self._find(job_id, name)
        if entry is None:
            raise InvalidJob(f"the artifact store has no {name} of job {job_id}")
        rest = rest or Rest()
        rest.begins(entry["files"][name]["sha256"])
        skip = rest.offset
        try:
            place = await self._in_thread(entry["root"], StoreFolder, entry["root"], entry["folder"])
            reading = place.read(name, entry["files"][name])
            while (data := await self._in_thread(entry["root"], next, reading, None)) is not None:
                if len(data) > skip:
                    yield data[skip:]
                skip = max(0, skip - len(data))
        except ElcheError:
            raise
        except Exception as error:  # packages of fsspec raise what they like
            where = f"{entry['root']}/{entry['folder']}/{name}"
            raise InvalidJob(f"{where} cannot be read from the artifact store: {reason_of(error)}") from None

    async def from_host(
        self,
        asks: Iterable[Ask],
        job_id: str,
        name: str,
        absent: str,
        stored: Callable[[], AsyncGenerator[bytes]] | None = None,
        rest: Rest | None = None,
    ) -> AsyncGenerator[bytes]:
        """Yields a file, or the `rest` of it: from the first host that delivers a chunk, else from the artifact store,
        by `stored` if that is given. Raises `ElcheError`: that of a host which broke off, else that of the last host
        asked, or `HostAway` with the text `absent` if none could be asked.
        """
        problem: ElcheError = HostAway(absent)
        for ask in asks:
            transfer, has_begun = self._transfers.begin(rest), False
            if not ask(transfer):
                self._transfers.drop(transfer)
                continue
            try:
                async with aclosing(self._transfers.chunks(transfer)) as chunks:
                    async for data in chunks:
                        has_begun = True
                        yield data
                return
            except ElcheError as error:
                if has_begun:
                    raise
                problem = error
        if not self.has(job_id, name):
            raise problem
        async with aclosing(stored() if stored is not None else self.chunks(job_id, name, rest)) as chunks:
            async for data in chunks:
                yield data

    def log_end(
        self,
        asks: Iterable[Ask],
        job_id: str,
        rank: int,
        max_bytes: int,
        absent: str,
        rest: Rest | None = None,
        *,
        with_times: bool = False,
    ) -> AsyncGenerator[bytes]:
        """Yields the end of a rank's log, as `from_host` does."""
        stored = partial(self._stored_log_end, job_id, rank, max_bytes, with_times=with_times)
        return self.from_host(asks, job_id, rank_log(rank), absent, stored, rest)

    async def _stored_log_end(
        self, job_id: str, rank: int, max_bytes: int, *, with_times: bool
    ) -> AsyncGenerator[bytes]:
        """The last whole lines of a stored log, at most `max_bytes` of it."""
        end, is_cut = b"", False
        async with aclosing(self.chunks(job_id, rank_log(rank))) as chunks:
            async for data in chunks:
                is_cut |= len(end) + len(data) > max_bytes
                end = (end + data)[-max_bytes:]
        if is_cut:
            end = end.partition(b"\n")[2]
        yield end if with_times else b"\n".join(line[STAMP_CHARS:] for line in end.split(b"\n"))

    def weights_of(self, job_id: str, path: str) -> str:
        """The name of the weights of the checkpoint that was at a path; "" where the store has none, or has parts."""
        folder = f"{CHECKPOINTS}/{PurePath(path).name}"
        entry = self._find(job_id, f"{folder}/{MANIFEST}")
        if entry is None or any(name.startswith(f"{folder}/pieces/") for name in entry["files"]):
            return ""
        return next((name for one in (EMA, WEIGHTS) if (name := f"{folder}/{one}") in entry["files"]), "")

    def checkpoints_place(self, job_id: str, path: str) -> str:
        """Returns the place in the store of the checkpoint that was at a path; empty if it is not there, or a host that
        had it is connected and so can be asked.
        """
        entry = self._find(job_id, _manifest_of(path))
        if entry is None:
            return ""
        view, result = self._catalogue.view(job_id), self._catalogue.result(job_id)
        parts = {part.key: part for part in (_parts_of(view, result) if view and result else [])}
        key = next(key for key, one in self._kept[job_id].items() if one is entry)
        part = parts.get(key)
        if part is not None and self._driver.agents.holders(job_id, part.agent_id, part.folder):
            return ""
        return f"{entry['root']}/{entry['folder']}/{CHECKPOINTS}"


def _read(rows: Mapping[str, str]) -> dict[str, dict[str, dict[str, Any]]]:
    found = {}
    for job_id, text in rows.items():
        try:
            found[job_id] = {
                key: {**one, "files": dict(one["files"]), "missing": list(one["missing"])}
                for key, one in json.loads(text).items()
            }
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            log.warning("job=%s the record of its artifacts is damaged and is ignored: %r", job_id, error)
    return found


def _parts_of(view: JobView, result: JobResult) -> list[_Part]:
    """Returns the hosts' parts of a job's output; the host with the model comes first."""
    parts: dict[str, _Part] = {}
    if result.model and result.model_agent_id:
        at = (AgentId(result.model_agent_id), result.model_folder)
        host = next((rank.host for rank in view.ranks if (rank.agent_id, rank.folder) == at), "")
        first = _Part(*at, host, has_model=True)
        parts[first.key] = first
    for rank in view.ranks:
        if rank.log_path:
            part = _Part(AgentId(rank.agent_id), rank.folder, rank.host)
            parts.setdefault(part.key, part).ranks.append(rank.rank)
    return list(parts.values())


def _described(part: _Part) -> str:
    logs = [f"the log of rank {part.ranks[0]}"] if len(part.ranks) == 1 else [f"the logs of {len(part.ranks)} ranks"]
    return " and ".join([*(["the model"] if part.has_model else []), *(logs if part.ranks else [])])


def _wanted_checkpoints(view: JobView) -> list[str]:
    """The folders of the newest checkpoint and of the best one, except those that are at URLs and outlive hosts."""
    wanted = [*view.checkpoints[-1:], *(one for one in view.checkpoints if one.is_best)]
    return list(dict.fromkeys(one.path for one in wanted if "://" not in one.path))


def _manifest_of(path: str) -> str:
    return f"{CHECKPOINTS}/{PurePath(path).name}/{MANIFEST}"


def _check(root: str, folder: str, host: str, manifest: bytes) -> None:
    """Raises `InvalidJob` unless this process finds what the host says that it has stored."""
    place = StoreFolder(root, folder)
    entry = {"bytes": len(manifest), "sha256": hashlib.sha256(manifest).hexdigest()}
    try:
        for _ in place.read(MANIFEST, entry):
            pass
    except InvalidJob:
        raise InvalidJob(
            f"{place.address}/{MANIFEST} is not what {host} has written: is the store the same on both?"
        ) from None
    except Exception as error:  # packages of fsspec raise what they like
        raise InvalidJob(
            f"{place.address}/{MANIFEST}, which {host} has written, cannot be read here: {reason_of(error)}"
        ) from None
