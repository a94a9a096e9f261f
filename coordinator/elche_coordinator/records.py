"""Durable records of jobs in a SQL database, written by one thread, many at a time."""

import json
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import sqlalchemy as sa

from elche_coordinator.core.records.histogram import PERSIST_SECONDS, Histogram

log = logging.getLogger(__name__)

RETRY_S = 1.0

_metadata = sa.MetaData()
_jobs = sa.Table(
    "jobs",
    _metadata,
    sa.Column("id", sa.String, primary_key=True),
    sa.Column("record", sa.Text, nullable=False),
    sa.Column("spec", sa.Text),
)

Record = dict[str, object]


class Records:
    """The jobs table: each job's spec, written once, and its newest record. Only `load_spec` may run beside another
    method on another thread.
    """

    def __init__(self, path: Path) -> None:
        # errors must not show what is written: it contains users' source code
        self._engine = sa.create_engine(f"sqlite:///{path}", poolclass=sa.pool.NullPool, hide_parameters=True)
        self._connection: sa.Connection | None = None
        with self._engine.begin() as connection:
            _metadata.create_all(connection)
            columns = {column["name"] for column in sa.inspect(connection).get_columns("jobs")}
            if "spec" not in columns:  # a database of an older version
                connection.execute(sa.text("ALTER TABLE jobs ADD COLUMN spec TEXT"))

    def load(self) -> dict[str, Record]:
        """All records by job id, oldest first, each with its `spec` without the source, which may be long.

        A record that cannot be read is logged and left where it is.
        """
        with self._engine.connect() as connection:
            query = sa.select(_jobs.c.id, _jobs.c.record, _jobs.c.spec).order_by(sa.literal_column("rowid"))
            rows = [(row.id, row.record, row.spec) for row in connection.execute(query)]
        loaded = {}
        for job_id, record, spec in rows:
            try:
                whole = _with_spec(record, spec)
                whole["spec"] = {**whole["spec"], "source": ""}  # type: ignore[dict-item]  # checked by whoever reads it
                loaded[job_id] = whole
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                log.warning("job=%s the record is damaged and is ignored: %r", job_id, error)
        return loaded

    def load_spec(self, job_id: str) -> Record:
        """A job's spec, with the source. Raises `KeyError` for an unknown job."""
        with self._engine.connect() as connection:
            row = connection.execute(sa.select(_jobs.c.record, _jobs.c.spec).where(_jobs.c.id == job_id)).first()
        if row is None:
            raise KeyError(job_id)
        spec: Record = _with_spec(row.record, row.spec)["spec"]  # type: ignore[assignment]
        return spec

    def write(self, records: dict[str, tuple[str, str | None]]) -> None:
        """Writes records, each as JSON with its spec if that is new, in one transaction. Raises `SQLAlchemyError`."""
        rows = [{"id": job_id, "record": record, "spec": spec} for job_id, (record, spec) in records.items()]
        upsert = sa.text(
            "INSERT INTO jobs (id, record, spec) VALUES (:id, :record, :spec) "
            "ON CONFLICT (id) DO UPDATE SET record = excluded.record, spec = coalesce(excluded.spec, jobs.spec)"
        )
        connection = self._connected()
        with connection.begin():
            connection.execute(upsert, rows)

    def _connected(self) -> sa.Connection:
        if self._connection is None:
            self._connection = self._engine.connect()
            self._connection.execute(sa.text("PRAGMA journal_mode = WAL"))
            self._connection.execute(sa.text("PRAGMA synchronous = FULL"))
            self._connection.commit()
        return self._connection

    def close(self) -> None:
        """Closes the database."""
        if self._connection is not None:
            self._connection.close()
        self._engine.dispose()


def _with_spec(record: str, spec: str | None) -> Record:
    """A row as one record. In rows of an older version the spec is inside the record."""
    whole: Record = json.loads(record)
    if spec is not None:
        whole["spec"] = json.loads(spec)
    if not isinstance(whole["spec"], dict):
        raise TypeError("its spec is no table")
    return whole


class Writer:
    """A thread that writes the newest record of each job, as often as the disk allows.

    `on_written` is called on the thread with the number of records that are now durable, by job; `on_refused` with a
    job whose record is no JSON, and the reason: its older record stays. A write is retried until it succeeds.
    """

    def __init__(
        self,
        records: Records,
        on_written: Callable[[dict[str, int]], None],
        on_refused: Callable[[str, str], None] = lambda job_id, reason: None,
    ) -> None:
        self._records = records
        self._on_written = on_written
        self._on_refused = on_refused
        self._queue: queue.SimpleQueue[tuple[str, Record, Record | None] | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self.num_failures = 0
        self.failing = ""
        """Why the last write failed; empty when it succeeded."""
        self.durations = Histogram(PERSIST_SECONDS)
        self._thread = threading.Thread(target=self._run, name="records", daemon=True)
        self._thread.start()

    def write(self, job_id: str, record: Record, spec: Record | None = None) -> None:
        """Queues a record to be written, with the job's spec if that is new."""
        self._queue.put((job_id, record, spec))

    def stop(self) -> None:
        """Writes what is queued and ends the thread."""
        self._stopped.set()
        self._queue.put(None)
        self._thread.join(timeout=5)
        self._records.close()

    def _run(self) -> None:
        while (first := self._queue.get()) is not None:
            batch = [first]
            while not self._queue.empty() and (more := self._queue.get()) is not None:
                batch.append(more)
            if self._write_until_done(self._encode(batch)):
                self._on_written(dict(Counter(job_id for job_id, _, _ in batch)))
            if self._stopped.is_set() and self._queue.empty():
                return

    def _encode(self, batch: list[tuple[str, Record, Record | None]]) -> dict[str, tuple[str, str | None]]:
        """The newest record of each job as JSON, and its spec if the batch has one."""
        specs = {job_id: spec for job_id, _, spec in batch if spec is not None}
        encoded = {}
        for job_id, record in {job_id: record for job_id, record, _ in batch}.items():
            spec = specs.get(job_id)
            try:
                encoded[job_id] = json.dumps(record), None if spec is None else json.dumps(spec)
            except (TypeError, ValueError, RecursionError) as error:
                self._on_refused(job_id, f"its record cannot be written: {error}")
        return encoded

    def _write_until_done(self, newest: dict[str, tuple[str, str | None]]) -> bool:
        while newest:
            started_s = time.perf_counter()
            try:
                self._records.write(newest)
                self.durations.extend([time.perf_counter() - started_s])
                self.failing = ""
                return True
            except sa.exc.SQLAlchemyError as error:
                self.num_failures += 1
                self.failing = str(error).splitlines()[0]
                log.error("records cannot be written, jobs wait until they can: %s", self.failing)
                if self._stopped.wait(RETRY_S):
                    return False
        return True
