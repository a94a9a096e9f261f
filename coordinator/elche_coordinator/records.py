"""Durable records of jobs in a SQL database, written by one thread, many at a time."""

import json
import logging
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path

import sqlalchemy as sa

from elche_coordinator.core.histogram import PERSIST_SECONDS, Histogram

log = logging.getLogger(__name__)

RETRY_S = 1.0

_metadata = sa.MetaData()
_jobs = sa.Table(
    "jobs",
    _metadata,
    sa.Column("id", sa.String, primary_key=True),
    sa.Column("record", sa.Text, nullable=False),
)

Record = dict[str, object]


class Records:
    """The jobs table. `load` and `write` are for one thread at a time."""

    def __init__(self, path: Path) -> None:
        self._engine = sa.create_engine(f"sqlite:///{path}", poolclass=sa.pool.NullPool)
        self._connection: sa.Connection | None = None
        with self._engine.begin() as connection:
            _metadata.create_all(connection)

    def load(self) -> dict[str, Record]:
        """All records by job id, oldest first."""
        with self._engine.connect() as connection:
            rows = connection.execute(sa.select(_jobs.c.id, _jobs.c.record).order_by(sa.literal_column("rowid")))
            return {row.id: json.loads(row.record) for row in rows}

    def write(self, records: dict[str, Record]) -> None:
        """Makes the records durable together. Raises `SQLAlchemyError` and writes none when that fails."""
        rows = [{"id": job_id, "record": json.dumps(record)} for job_id, record in records.items()]
        upsert = sa.text(
            "INSERT INTO jobs (id, record) VALUES (:id, :record) "
            "ON CONFLICT (id) DO UPDATE SET record = excluded.record"
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
        """Lets go of the file."""
        if self._connection is not None:
            self._connection.close()
        self._engine.dispose()


class Writer:
    """One thread that writes what is newest for each job, as often as the disk allows.

    `on_written` is called on the thread with how many of each job's records are on disk. A write that fails is tried
    again until it succeeds: what waits for it waits, and nothing is lost.
    """

    def __init__(self, records: Records, on_written: Callable[[dict[str, int]], None]) -> None:
        self._records = records
        self._on_written = on_written
        self._queue: queue.SimpleQueue[tuple[str, Record] | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self.num_failures = 0
        self.durations = Histogram(PERSIST_SECONDS)
        self._thread = threading.Thread(target=self._run, name="records", daemon=True)
        self._thread.start()

    def write(self, job_id: str, record: Record) -> None:
        """Asks for a record to be made durable."""
        self._queue.put((job_id, record))

    def stop(self) -> None:
        """Writes what was asked for, and ends the thread."""
        self._stopped.set()
        self._queue.put(None)
        self._thread.join(timeout=5)
        self._records.close()

    def _run(self) -> None:
        while (first := self._queue.get()) is not None:
            batch = [first]
            while not self._queue.empty() and (more := self._queue.get()) is not None:
                batch.append(more)
            if self._write_until_done(dict(batch)):
                counts: dict[str, int] = {}
                for job_id, _ in batch:
                    counts[job_id] = counts.get(job_id, 0) + 1
                self._on_written(counts)
            if self._stopped.is_set() and self._queue.empty():
                return

    def _write_until_done(self, newest: dict[str, Record]) -> bool:
        while True:
            started_s = time.perf_counter()
            try:
                self._records.write(newest)
                self.durations.extend([time.perf_counter() - started_s])
                return True
            except sa.exc.SQLAlchemyError as error:
                self.num_failures += 1
                log.error("records cannot be written, jobs wait until they can: %s", error)
                if self._stopped.wait(RETRY_S):
                    return False
