"""Messages of jobs' views, made once for all watchers: the view of a large job takes 20 ms."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from elche.v1 import job_pb2

VIEW_EVERY_S = 0.25
"""Greatest age in seconds of a view that is sent at intervals, unless `VIEW_COST` makes it longer."""
VIEW_COST = 20
"""A view is made again only after this many times the time to make it, so that views take a bounded part of the event
loop's time."""
MAX_KEPT = 64
"""Most views that are kept for further watchers."""


@dataclass(frozen=True, slots=True)
class _Made:
    message: job_pb2.JobView
    at_s: float
    took_s: float
    num_events: int


class SharedViews:
    """Keeps the newest view of the jobs that were watched last."""

    def __init__(
        self,
        make: Callable[[str], job_pb2.JobView],
        num_events: Callable[[], int],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`make` makes a view of a job. `num_events` returns how many events the core has handled. While that is equal,
        only values that change with time are out of date.
        """
        self._make, self._num_events, self._now = make, num_events, now
        self._made: dict[str, _Made] = {}

    def newest(self, job_id: str) -> job_pb2.JobView:
        """The job as it is now."""
        made = self._made.get(job_id)
        if made is not None and made.num_events == self._num_events() and self._is_recent(made):
            return made.message
        return self._make_new(job_id)

    def recent(self, job_id: str) -> job_pb2.JobView:
        """The job as it was a moment ago."""
        made = self._made.get(job_id)
        return made.message if made is not None and self._is_recent(made) else self._make_new(job_id)

    def _is_recent(self, made: _Made) -> bool:
        return self._now() - made.at_s < max(VIEW_EVERY_S, VIEW_COST * made.took_s)

    def _make_new(self, job_id: str) -> job_pb2.JobView:
        num_events, began_s = self._num_events(), self._now()
        message, ended_s = self._make(job_id), self._now()
        # Taken out, so that it is put back as the newest: the oldest is dropped first.
        self._made.pop(job_id, None)
        self._made[job_id] = _Made(message, ended_s, ended_s - began_s, num_events)
        while len(self._made) > MAX_KEPT:
            del self._made[next(iter(self._made))]
        return message
