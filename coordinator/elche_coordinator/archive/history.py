"""Jobs of earlier runs of the coordinator, read from their records."""

import json
import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

from elche_coordinator.core.describe import JobView
from elche_coordinator.core.messages.events import JobSubmitted
from elche_coordinator.core.messages.ids import Incarnation, JobId
from elche_coordinator.core.messages.reports import JobResult
from elche_coordinator.core.messages.spec import JobSpec
from elche_coordinator.journal.coding import decode_fields
from elche_coordinator.storage.job_rows import FORMAT, Record
from elche_coordinator.storage.sql.store import SqlStore
from elche_coordinator.storage.store import JobRow, StoreFailed

log = logging.getLogger(__name__)

KINDS = {"submitted_at": float, "resume": str, "attempt": int, "num_ranks": int, "min_ranks": int}
"""Types of values in the record of a job that goes on."""


@dataclass(frozen=True, slots=True)
class PastJob:
    """One job of an earlier run."""

    spec: JobSpec
    view: JobView
    result: JobResult


class History:
    """Jobs from before this process started. Those that had not ended are submitted again (`unfinished`), from their
    newest checkpoints; those that cannot go on, such as user-owned loops, are recorded as failed.

    A record that is damaged, or was written by a newer coordinator, is logged and left as it is.
    """

    def __init__(self, store: SqlStore, living: Collection[str] = ()) -> None:
        """Leaves out `living` jobs, which the core has."""
        self._store = store
        self.jobs: dict[str, PastJob] = {}
        """All jobs, oldest first."""
        self.keys: dict[str, str] = {}
        """Keys of submissions, with their jobs."""
        self.unfinished: list[JobSubmitted] = []
        """Jobs that go on, oldest first."""
        self.last_incarnation = 0
        """The highest incarnation used so far."""
        lost: dict[str, Record] = {}
        known = frozenset(living)
        rows = [row for row in store.load_rows() if row.id not in known]
        self.row_bytes = {row.id: len(row.record) for row in rows}
        """Size of each job's record."""
        for job_id, record in _records(rows).items():
            try:
                self._take_in(job_id, record, lost)
            except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
                log.warning("job=%s the record is damaged and is ignored: %r", job_id, error)
        self._close(lost)

    def _take_in(self, job_id: str, record: Record, lost: dict[str, Record]) -> None:
        """Sorts a record into `unfinished` or `jobs`. Adds to `lost` the changed record of a job that ends here."""
        if (version := record["format"]) != FORMAT:
            log.warning(
                "job=%s the record has format %s and is ignored: this coordinator reads %d", job_id, version, FORMAT
            )
            return
        self.last_incarnation = max(self.last_incarnation, record["incarnation"])
        was_running = record.get("result") is None
        if was_running and record.get("decided") is None:
            self.unfinished.append(self._again(job_id, record))
            return
        if was_running:
            record = _closed(record)
        key = str(record["key"])
        self.jobs[job_id] = PastJob(spec=_spec(record["spec"]), view=_view(job_id, record), result=_result(record))
        if key:
            self.keys[key] = job_id
        if was_running:
            lost[job_id] = record

    def _again(self, job_id: str, record: Record) -> JobSubmitted:
        """The submission of a job that goes on."""
        for name, kind in KINDS.items():
            if not isinstance(record[name], kind):
                raise TypeError(f"its {name} is no {kind.__name__}")
        return JobSubmitted(
            job_id=JobId(job_id),
            spec=replace(
                _spec(record["spec"]),
                resume=record["resume"],
                resume_host=str(record.get("resume_host", "")),
                resume_work_folder=str(record.get("resume_work_folder", "")),
                resume_version=int(str(record.get("resume_version", 0))),
                num_ranks=record["num_ranks"],
                min_ranks=record["min_ranks"],
            ),
            submitted_at=record["submitted_at"],
            key=str(record["key"]),
            past_attempts=record["attempt"],
            last_incarnation=Incarnation(self.last_incarnation),
        )

    def _close(self, lost: dict[str, Record]) -> None:
        """Records the jobs that were running as failed."""
        rows = []
        for job_id, record in lost.items():
            rest = {name: value for name, value in record.items() if name != "spec"}
            rows.append(JobRow(id=job_id, record=json.dumps(rest)))
        try:
            if rows:
                # Its spec and its file stay as they are in the row.
                self._store.write(rows)
        except StoreFailed as error:
            log.error("the jobs that have failed cannot be recorded: %s", error.reason)

    def forget(self, job_ids: Iterable[str]) -> None:
        """Forgets these jobs."""
        gone = {job_id for job_id in job_ids if self.jobs.pop(job_id, None) is not None}
        self.keys = {key: job_id for key, job_id in self.keys.items() if job_id not in gone}

    def submission(self, job_id: str) -> JobSpec:
        """The submission of any job with a durable record. Raises `KeyError` without one."""
        return _spec(_record(self._store.load_row(job_id))["spec"])


def _records(rows: Iterable[JobRow]) -> dict[str, Record]:
    """Records by job id, oldest first. Unreadable ones are logged and left out."""
    found: dict[str, Record] = {}
    for row in rows:
        try:
            found[row.id] = _record(row)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            log.warning("job=%s the record is damaged and is ignored: %r", row.id, error)
    return dict(sorted(found.items(), key=lambda item: _when(item[1])))


def _record(row: JobRow) -> Record:
    """A row and its spec. Raises `ValueError` and others for damaged ones."""
    record: Record = {**json.loads(row.record), "spec": json.loads(row.spec or "")}
    if not isinstance(record["spec"], dict):
        raise TypeError("its spec is not a table")
    return record


def _when(record: Record) -> float:
    """Time of the job's submission; 0 if it is unreadable."""
    at = record.get("submitted_at")
    return at if isinstance(at, float) else 0.0


def _closed(record: Record) -> Record:
    """The record of a job that cannot go on, as ended with its decided result."""
    decided = dict(record["decided"])
    return {**record, "reason": decided["error"] or record["reason"], "result": decided}


def _spec(fields: Any) -> JobSpec:
    return decode_fields(JobSpec, {**fields, "replay": ()})


def _result(record: Record) -> JobResult:
    return decode_fields(JobResult, record["result"])


def _view(job_id: str, record: Record) -> JobView:
    """The view at the job's end; for a job that was running when the coordinator stopped, one made of its result."""
    if "view" in record:
        view = dict(record["view"])
        view.pop("ended_for_s", None)  # earlier versions have it
        return decode_fields(JobView, view)
    result = _result(record)
    total = (result.dataset_size - max(result.dropped_samples, default=0)) * len(result.committed_samples)
    return JobView(
        job_id=job_id,
        name=str(record["spec"]["name"]),
        state=result.outcome,
        reason=str(record["reason"]),
        epoch=result.epochs,
        num_epochs=len(result.committed_samples),
        dataset_size=result.dataset_size,
        samples_per_s=result.samples_per_s,
        num_rounds=result.rounds,
        metrics=result.metrics,
        progress_fraction=sum(result.committed_samples) / total if total else 0.0,
        submitted_at=float(record["submitted_at"]),
        checkpoints=result.checkpoints,
    )
