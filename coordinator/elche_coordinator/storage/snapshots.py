"""Saved states for a restarted coordinator, in parts: one per job, and a common one.

A job's part is rebuilt only if an event has touched the job since. So the cost of a save depends on the changes, not
on the number of jobs, and the event loop is not blocked for all of them.
"""

import pickle
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from elche_coordinator.core.coordinator import Coordinator
from elche_coordinator.core.life.job import Job
from elche_coordinator.core.messages.ids import JobId
from elche_coordinator.core.records.machine import JobPhase
from elche_coordinator.storage.store import SavedState
from elche_coordinator.storage.unpickling import loads, sealed, unsealed
from elche_coordinator.streams.streams import Process, Stream, Streams

MAX_QUEUED = 50
"""Changed queued jobs at which a save is due: thousands may be submitted at once, and one save of all would take
long."""

Part = tuple[Job, dict[Process, Stream[object]]]
"""A job, with the streams of its ranks."""


class Snapshots:
    """Saves a core and its streams, of each job only what has changed since the save before."""

    def __init__(self, core: Coordinator, streams: Streams, saved: Iterable[str] = ()) -> None:
        """`saved` are the jobs that have a part in the database."""
        self._core = core
        self._streams = streams
        self._living = {job_id: None for job_id, job in core.jobs.items() if job.result is None}
        """Jobs that have not ended, oldest first."""
        self._saved = {JobId(job_id) for job_id in saved}
        self._gone = self._saved - self._living.keys()
        """Jobs that have ended and still have a part."""
        self._touched: dict[JobId, None] = {}
        self._num_queued = 0

    def touch(self, job_ids: Iterable[JobId]) -> None:
        """Notes jobs that an event may have changed."""
        for job_id in job_ids:
            job = self._core.jobs.get(job_id)
            if job is None:
                continue
            if job.result is not None:
                self._living.pop(job_id, None)
                self._touched.pop(job_id, None)
                if job_id in self._saved:
                    self._gone.add(job_id)
            elif job_id not in self._touched:
                self._living.setdefault(job_id)
                self._touched[job_id] = None
                self._num_queued += job.phase is JobPhase.QUEUED

    @property
    def is_due(self) -> bool:
        """True once so many queued jobs have changed that a later save would block the event loop for long."""
        return self._num_queued >= MAX_QUEUED

    def take(self, last: int, code: str) -> SavedState:
        """The state after event number `last`, with the parts that have changed since the last call."""
        self._num_queued = 0  # also if it fails: the next jobs that come retry it
        parts = {str(job_id): self._part(job_id) for job_id in self._touched}
        with _without_jobs(self._core, self._streams):
            common = sealed(pickle.dumps((self._core, self._streams, list(self._living))))
        gone, self._gone = self._gone, set()
        self._saved.difference_update(gone)
        self._saved.update(self._touched)
        self._touched = {}
        return SavedState(last=last, code=code, state=common, parts=parts, gone=gone)

    def _part(self, job_id: JobId) -> bytes:
        part: Part = (self._core.jobs[job_id], self._streams.ranks.get(job_id, {}))
        return sealed(pickle.dumps(part))


def join(common: bytes, parts: Mapping[str, bytes]) -> tuple[Coordinator, Streams]:
    """Restores a core and its streams from the parts. Raises `KeyError` if one is missing, and other errors of damaged
    parts.
    """
    core, streams, living = loads(unsealed(common))
    for job_id in living:
        job, of_ranks = loads(unsealed(parts[job_id]))
        core.adopt(job)
        if of_ranks:
            streams.ranks[job_id] = of_ranks
    return core, streams


@contextmanager
def _without_jobs(core: Coordinator, streams: Streams) -> Iterator[None]:
    """Context in which core and streams contain only the common part."""
    tables, keys, ranks = core.tables(), core.keys, streams.ranks
    # Emptied in place and put back without an await between, so that nobody sees the core without its jobs.
    core.keys, streams.ranks = {}, {}  # each job has its own key
    core.__dict__ |= {name: {} for name in tables}
    try:
        yield
    finally:
        core.keys, streams.ranks = keys, ranks
        core.__dict__ |= tables
