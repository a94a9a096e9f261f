"""The tape of events since a saved state, and a row of each job, in a SQL database that one thread writes."""

import json
import logging
import pickle
import queue
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import sqlalchemy as sa

from elche_coordinator.core.messages.spec import JobSpec
from elche_coordinator.core.records.histogram import PERSIST_SECONDS, Histogram
from elche_coordinator.database import Database, Replaced, reason_of
from elche_coordinator.schema import jobs as _jobs
from elche_coordinator.schema import parts as _parts
from elche_coordinator.schema import sources as _sources
from elche_coordinator.schema import states as _states
from elche_coordinator.schema import store as _store
from elche_coordinator.schema import tape as _tape

log = logging.getLogger(__name__)

RETRY_S = 1.0

Record = dict[str, object]


@dataclass(frozen=True, slots=True)
class Identity:
    """What tells one store from every other."""

    id: str
    secret: bytes
    """The key from which ranks' secrets are made."""


@dataclass(frozen=True, slots=True)
class SavedState:
    """The state after event number `last`, and the code that made it."""

    last: int
    code: str
    state: bytes
    """What the jobs have in common."""
    parts: Mapping[str, bytes] = field(default_factory=dict)
    """By job, its own; when it is written, of those alone that have changed."""
    gone: Collection[str] = ()
    """Jobs that have a part in the database, and have none any more."""

    def after(self, before: "SavedState | None") -> "SavedState":
        """This state, and what was to be written of the one before it."""
        if before is None:
            return self
        gone = set(before.gone) | set(self.gone)
        parts = {job_id: part for job_id, part in before.parts.items() if job_id not in gone} | dict(self.parts)
        return replace(self, parts=parts, gone=gone - parts.keys())


class LoadedState(NamedTuple):
    """What a former coordinator has left."""

    saved: SavedState | None
    pieces: list[bytes]
    """Of the tape since."""
    age_s: float
    """How long ago it wrote the last of it, by the database's clock, in seconds."""


class EncodedRow(NamedTuple):
    """A job's row as it is written."""

    id: str
    record: str
    spec: str | None = None
    """Of a new job; None: it stays what it is."""
    source: str | None = None
    """Hash of its file."""


PUT_JOB = sa.text(
    "INSERT INTO jobs (id, record, spec, source) VALUES (:id, :record, :spec, :source) "
    "ON CONFLICT (id) DO UPDATE SET record = excluded.record, spec = coalesce(excluded.spec, jobs.spec), "
    "source = coalesce(excluded.source, jobs.source)"
)
ADD_SOURCE = sa.text("INSERT INTO sources (hash, text) VALUES (:hash, :text) ON CONFLICT (hash) DO NOTHING")


@dataclass(slots=True, kw_only=True)
class Batch:
    """What becomes durable together: all or nothing of it."""

    last: int
    """The number of its last event."""
    entries: list[Any] = field(default_factory=list)
    """The events, with what is needed to repeat them; pickled on the writer's thread."""
    rows: dict[str, Record] = field(default_factory=dict)
    """The newest row of each job that has changed."""
    specs: dict[str, JobSpec] = field(default_factory=dict)
    """The specs of new jobs."""
    sources: dict[str, str] = field(default_factory=dict)
    """The texts of new files, by their hash."""
    forgotten: set[str] = field(default_factory=set)
    """Jobs whose rows are removed."""
    saved: SavedState | None = None

    def forget(self, job_ids: Iterable[str]) -> None:
        """Nothing of these jobs is kept."""
        self.forgotten |= set(job_ids)
        for job_id in job_ids:
            self.rows.pop(job_id, None)
            self.specs.pop(job_id, None)

    def add(self, later: "Batch") -> None:
        """Takes in what comes after it."""
        self.last = later.last
        self.entries = [] if later.saved else self.entries + later.entries
        self.forget(later.forgotten)
        self.rows |= later.rows
        self.specs |= later.specs
        self.sources |= later.sources
        self.saved = self.saved if later.saved is None else later.saved.after(self.saved)


class Records:
    """The database: the tape of events, and a saved state; of each job its spec and its newest row; users' files.

    Only `load_spec` and `load_source` may run beside another method on another thread.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._connection: sa.Connection | None = None
        """The writer's."""

    def load(self) -> dict[str, Record]:
        """All rows by job id, oldest first, each with its `spec`. What cannot be read is logged and left alone."""
        with self._database.connect() as connection:
            query = sa.select(_jobs.c.id, _jobs.c.record, _jobs.c.spec).order_by(_jobs.c.id)
            rows = [(row.id, row.record, row.spec) for row in connection.execute(query)]
        loaded: dict[str, Record] = {}
        for job_id, record, spec in rows:
            try:
                loaded[job_id] = _with_spec(record, spec)
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                log.warning("job=%s the record is damaged and is ignored: %r", job_id, error)
        return dict(sorted(loaded.items(), key=lambda item: _when(item[1])))

    def load_spec(self, job_id: str) -> Record:
        """A job's spec. Raises `KeyError` for an unknown job."""
        with self._database.connect() as connection:
            row = connection.execute(sa.select(_jobs.c.record, _jobs.c.spec).where(_jobs.c.id == job_id)).first()
        if row is None:
            raise KeyError(job_id)
        spec: Record = _with_spec(row.record, row.spec)["spec"]  # type: ignore[assignment]
        return spec

    def load_source(self, name: str) -> str:
        """The text of the file with this hash. Raises `KeyError` when it is not there."""
        with self._database.connect() as connection:
            text = connection.execute(sa.select(_sources.c.text).where(_sources.c.hash == name)).scalar()
        if text is None:
            raise KeyError(name)
        return str(text)

    def identity(self) -> Identity:
        """The store's own, made when it is first asked for."""
        with self._database.writing() as connection:
            row = connection.execute(sa.select(_store.c.id, _store.c.secret)).first()
            if row is None:
                identity = Identity(secrets.token_hex(8), secrets.token_bytes(32))
                connection.execute(_store.insert().values(id=identity.id, secret=identity.secret))
                return identity
        return Identity(row.id, row.secret)

    def load_state(self) -> LoadedState:
        """The newest saved state, and the tape since, in pieces."""
        with self._database.connect() as connection:
            row = connection.execute(sa.select(_states).order_by(_states.c.last.desc())).first()
            parts = connection.execute(sa.select(_parts)).all()
            pieces = connection.execute(sa.select(_tape.c.entries, _tape.c.written_at).order_by(_tape.c.last)).all()
            now = connection.execute(sa.select(self._database.now)).scalar_one()
        times = [one.written_at for one in (*pieces, *([row] if row else [])) if one.written_at is not None]
        saved = SavedState(row.last, row.code, row.state, {part.job: part.state for part in parts}) if row else None
        return LoadedState(saved, [piece.entries for piece in pieces], max(0.0, now - max(times, default=now)))

    def drop_tape(self) -> None:
        """Removes the saved state and the tape, of which nothing can be made."""
        with self._database.writing() as connection:
            connection.execute(_states.delete())
            connection.execute(_parts.delete())
            connection.execute(_tape.delete())

    def write(
        self,
        rows: Sequence[EncodedRow],
        *,
        last: int = 0,
        entries: bytes = b"",
        saved: SavedState | None = None,
        forgotten: Iterable[str] = (),
        sources: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Writes, in one transaction, rows of jobs, each with its spec if that is new, files and a piece of the tape. A
        saved state replaces the tape up to it. Nothing of `forgotten` jobs is left. Raises `SQLAlchemyError` and
        `Replaced`.
        """
        connection = self._connected()
        try:
            with self._database.writing(connection):
                if sources:
                    connection.execute(ADD_SOURCE, [{"hash": name, "text": text} for name, text in sources.items()])
                if rows:
                    connection.execute(PUT_JOB, [row._asdict() for row in rows])
                for job_id in forgotten:
                    connection.execute(_jobs.delete().where(_jobs.c.id == job_id))
                if forgotten:
                    used = sa.select(_jobs.c.source).where(_jobs.c.source.is_not(None))
                    connection.execute(_sources.delete().where(_sources.c.hash.not_in(used)))
                if saved is not None:
                    for job_id in {*saved.parts, *saved.gone}:
                        connection.execute(_parts.delete().where(_parts.c.job == job_id))
                    if saved.parts:
                        parts = [{"job": job_id, "state": part} for job_id, part in saved.parts.items()]
                        connection.execute(_parts.insert(), parts)
                    connection.execute(_states.delete())
                    connection.execute(_tape.delete().where(_tape.c.last <= saved.last))
                    connection.execute(
                        _states.insert().values(
                            last=saved.last, code=saved.code, state=saved.state, written_at=self._database.now
                        )
                    )
                if entries:  # they may be there: the answer to the first attempt may have been lost
                    connection.execute(_tape.delete().where(_tape.c.last == last))
                    connection.execute(_tape.insert().values(last=last, entries=entries, written_at=self._database.now))
        except sa.exc.DBAPIError:
            self._connection = None  # the next attempt has another one
            connection.invalidate()
            connection.close()
            raise

    def _connected(self) -> sa.Connection:
        if self._connection is None:
            connection = self._database.connect()
            if not self._database.is_shared:
                connection.execute(sa.text("PRAGMA journal_mode = WAL"))
                connection.execute(sa.text("PRAGMA synchronous = FULL"))
                connection.commit()
            self._connection = connection
        return self._connection

    def close(self) -> None:
        """Closes the database."""
        if self._connection is not None:
            self._connection.close()
        self._database.close()


def _when(record: Record) -> float:
    """When the job was submitted; an unreadable time is the oldest."""
    at = record.get("submitted_at")
    return at if isinstance(at, float) else 0.0


def _with_spec(record: str, spec: str | None) -> Record:
    """A row as one record. In rows of an older version the spec is inside the record."""
    whole: Record = json.loads(record)
    if spec is not None:
        whole["spec"] = json.loads(spec)
    if not isinstance(whole["spec"], dict):
        raise TypeError("its spec is no table")
    return whole


class Writer:
    """A thread that writes batches, as many at a time as have come while it wrote.

    `on_written` is called on the thread with the number of the last event that is now durable; `on_refused` with a job
    whose record is no JSON, and the reason: its older record stays. A write is retried until it succeeds.
    """

    def __init__(
        self,
        records: Records,
        on_written: Callable[[int], None],
        on_refused: Callable[[str, str], None] = lambda job_id, reason: None,
    ) -> None:
        self._records = records
        self._on_written = on_written
        self._on_refused = on_refused
        self._queue: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self.num_failures = 0
        self.failing = ""
        """Why the last write failed; empty when it succeeded."""
        self.durations = Histogram(PERSIST_SECONDS)
        self._thread = threading.Thread(target=self._run, name="records", daemon=True)
        self._thread.start()

    def write(self, batch: Batch) -> None:
        """Queues a batch to be written."""
        self._queue.put(batch)

    def stop(self) -> None:
        """Writes what is queued and ends the thread."""
        self._stopped.set()
        self._queue.put(None)
        self._thread.join(timeout=5)
        self._records.close()

    def _run(self) -> None:
        while (batch := self._queue.get()) is not None:
            while not self._queue.empty() and (more := self._queue.get()) is not None:
                batch.add(more)
            if self._write_until_done(batch):
                self._on_written(batch.last)
            if self._stopped.is_set() and self._queue.empty():
                return

    def _encode(self, batch: Batch) -> list[EncodedRow]:
        """The newest row of each job as JSON, and its spec if the batch has one."""
        encoded = []
        for job_id, row in batch.rows.items():
            spec = batch.specs.get(job_id)
            try:
                encoded.append(
                    EncodedRow(
                        id=job_id,
                        record=json.dumps(row),
                        spec=None if spec is None else json.dumps(asdict(replace(spec, replay=()))),
                        source=None if spec is None else spec.source_hash or None,
                    )
                )
            except (TypeError, ValueError, RecursionError) as error:
                self._on_refused(job_id, f"its record cannot be written: {error}")
        return encoded

    def _write_until_done(self, batch: Batch) -> bool:
        rows, entries = self._encode(batch), pickle.dumps(batch.entries) if batch.entries else b""
        while True:
            started_s = time.perf_counter()
            try:
                self._records.write(
                    rows,
                    last=batch.last,
                    entries=entries,
                    saved=batch.saved,
                    forgotten=batch.forgotten,
                    sources=batch.sources,
                )
                self.durations.extend([time.perf_counter() - started_s])
                self.failing = ""
                return True
            except sa.exc.SQLAlchemyError as error:
                self.num_failures += 1
                self.failing = reason_of(error)
                log.error("records cannot be written, jobs wait until they can: %s", self.failing)
                if self._stopped.wait(RETRY_S):
                    return False
            except Replaced as error:
                log.error("nothing is written any more: %s", error)
                return False
