"""The thread that makes events durable: it writes all pending batches in one transaction, and retries until it
succeeds."""

import json
import logging
import pickle
import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from elche_coordinator.core.messages.spec import JobSpec
from elche_coordinator.core.records.histogram import PERSIST_SECONDS, Histogram
from elche_coordinator.storage.job_rows import Record
from elche_coordinator.storage.sql.store import SqlStore
from elche_coordinator.storage.store import JobRow, Replaced, SavedState, StoreFailed
from elche_coordinator.storage.trouble import Trouble
from elche_coordinator.storage.unpickling import sealed

log = logging.getLogger(__name__)

RETRY_S = 1.0
"""Seconds until a failed write is repeated; jobs wait meanwhile."""


@dataclass(slots=True, kw_only=True)
class Transaction:
    """Changes that become durable together, atomically."""

    last: int
    """The number of its last event."""
    entries: list[Any] = field(default_factory=list)
    """The events, with the data to repeat them; pickled on the writer's thread."""
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
        """Drops these jobs."""
        self.forgotten |= set(job_ids)
        for job_id in job_ids:
            self.rows.pop(job_id, None)
            self.specs.pop(job_id, None)

    def add(self, later: "Transaction") -> None:
        """Merges a later batch; a state that it saves replaces the events before it."""
        self.last = later.last
        self.entries = [] if later.saved else self.entries + later.entries
        self.forget(later.forgotten)
        self.rows |= later.rows
        self.specs |= later.specs
        self.sources |= later.sources
        self.saved = self.saved if later.saved is None else later.saved.after(self.saved)


class Writer:
    """A thread that writes batches, all pending ones at a time.

    Calls `on_written`, on the thread, with the number of the last durable event; `on_refused` with a job whose record
    is not valid JSON, and the reason: its older record stays. A write is retried until it succeeds.
    """

    def __init__(
        self,
        store: SqlStore,
        on_written: Callable[[int], object],
        on_refused: Callable[[str, str], object] = lambda job_id, reason: None,
    ) -> None:
        self._store = store
        self._on_written = on_written
        self._on_refused = on_refused
        self._queue: queue.SimpleQueue[Transaction | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self.num_bytes = 0
        """Bytes of all events that were written."""
        self.row_bytes: dict[str, int] = {}
        """Size of each job's newest row that was written."""
        self.num_failures = 0
        self._trouble = Trouble(
            log,
            logging.ERROR,
            f"records cannot be written to {store.name}, jobs wait until they can",
            f"records are written to {store.name} again, and jobs go on",
        )
        self.durations = Histogram(PERSIST_SECONDS)
        self._full_until_s = 0.0
        """Until then, by `time.monotonic`, each write fails on purpose."""
        self._thread = threading.Thread(target=self._run, name="records", daemon=True)
        self._thread.start()

    @property
    def failing(self) -> str:
        """The error of the last write; empty if it succeeded."""
        return self._trouble.reason

    def write(self, batch: Transaction) -> None:
        """Queues a batch to be written."""
        self._queue.put(batch)

    def fill_disk(self, seconds: float) -> None:
        """Has each write fail for some seconds, as on a full disk: a fault on purpose."""
        self._full_until_s = time.monotonic() + seconds

    def stop(self) -> None:
        """Writes queued batches and ends the thread."""
        self._stopped.set()
        self._queue.put(None)
        self._thread.join(timeout=5)
        self._store.close()

    def _run(self) -> None:
        while (batch := self._queue.get()) is not None:
            while not self._queue.empty() and (more := self._queue.get()) is not None:
                batch.add(more)
            if self._write_until_done(batch):
                self._on_written(batch.last)
            # The None of `stop` may have been taken above, with the batches before it.
            if self._stopped.is_set() and self._queue.empty():
                return

    def _encode(self, batch: Transaction) -> list[JobRow]:
        """The newest row of each job as JSON, and its spec if the batch has one."""
        encoded = []
        for job_id in batch.forgotten:
            self.row_bytes.pop(job_id, None)
        for job_id, row in batch.rows.items():
            spec = batch.specs.get(job_id)
            try:
                # Only this row is left out if it fails: on this thread, an error would end the writing of all jobs.
                record = json.dumps(row)
                encoded.append(
                    JobRow(
                        id=job_id,
                        record=record,
                        # A replay does not go on after a restart (protocol P13.4), and its recording may be long.
                        spec=None if spec is None else json.dumps(asdict(replace(spec, replay=()))),
                        source=None if spec is None else spec.source_hash or None,
                    )
                )
                self.row_bytes[job_id] = len(record)
            except (TypeError, ValueError, RecursionError) as error:
                self._on_refused(job_id, f"its record cannot be written: {error}")
        return encoded

    def _write_until_done(self, batch: Transaction) -> bool:
        rows, entries = self._encode(batch), sealed(pickle.dumps(batch.entries)) if batch.entries else b""
        while True:
            started_s = time.monotonic()
            try:
                if started_s < self._full_until_s:
                    raise StoreFailed("the disk is full: a fault on purpose")
                self._store.write(
                    rows,
                    last=batch.last,
                    entries=entries,
                    saved=batch.saved,
                    forgotten=batch.forgotten,
                    sources=batch.sources,
                )
                self.num_bytes += len(entries)
                self.durations.extend([time.monotonic() - started_s])
                self._trouble.succeeded()
                return True
            except StoreFailed as error:
                self.num_failures += 1
                self._trouble.failed(error.reason)
                if self._stopped.wait(RETRY_S):
                    return False
            except Replaced as error:
                log.error("nothing is written any more: %s", error)
                return False
