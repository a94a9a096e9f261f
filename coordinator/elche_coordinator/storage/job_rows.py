"""Rows of jobs in the database, beside the tape: for coordinators of other versions, and for history.

A row is a view of the core's state. It is written when it differs from the previous one, in the transaction of the
events that changed it; the row of an ended job, with all that history shows of it, is written once.
"""

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from elche_coordinator.core.continuation import Continuation
from elche_coordinator.core.coordinator import Coordinator
from elche_coordinator.core.describe import JobView
from elche_coordinator.core.messages.ids import JobId
from elche_coordinator.core.messages.spec import plain

log = logging.getLogger(__name__)

Record = dict[str, Any]
"""A row, before it is JSON."""

FORMAT = 1
"""Version of the rows' format. A coordinator ignores rows of other formats."""


class JobRows:
    """Finds the rows that have changed."""

    def __init__(self, core: Coordinator) -> None:
        self._core = core
        self._written: dict[JobId, tuple[Continuation, bool]] = {}
        """Contents of the jobs' rows, and True if the job has ended in it."""
        self._touched: dict[JobId, None] = {}

    def touch(self, job_ids: Iterable[JobId]) -> None:
        """Notes jobs that an event may have changed."""
        self._touched |= dict.fromkeys(job_ids)

    def take_changed(self) -> dict[str, Record]:
        """The rows that have changed since the last call."""
        touched, self._touched = self._touched, {}
        changed: dict[str, Record] = {}
        for job_id in touched:
            try:
                row = self._changed_row(job_id)
            except Exception:
                log.exception("job=%s what is to be kept of it cannot be said; this is a bug", job_id)
                continue
            if row is not None:
                changed[job_id] = row
        return changed

    def _changed_row(self, job_id: JobId) -> Record | None:
        now, has_ended = self._core.continuation(job_id), self._core.result(job_id) is not None
        if now is None or self._written.get(job_id) == (now, has_ended):
            return None
        view = self._core.view(job_id, self._core.now_s) if has_ended else None
        self._written[job_id] = now, has_ended
        return _row(now, view)

    def forget(self, job_ids: Iterable[JobId]) -> None:
        """Drops these jobs."""
        for job_id in job_ids:
            self._written.pop(job_id, None)


def _row(kept: Continuation, view: JobView | None) -> Record:
    """The row as plain values. A job with a `result` has ended; one with `decided` will end so."""
    row = {"format": FORMAT, **plain(kept), "reason": "" if kept.end is None else kept.end.error}
    row["incarnation"] = row.pop("last_incarnation")
    end = row.pop("end")
    if view is None:
        return {**row, "decided": end}
    return {**row, "result": end, "view": plain(replace(view, ended_s=None))}  # the clock of the next run is another
