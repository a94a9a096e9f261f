"""Views of jobs, made once for all who look: the view of a large job takes 20 ms."""

import time
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

View = TypeVar("View")

VIEW_EVERY_S = 0.25
"""Greatest age in seconds of a view that is sent at intervals, unless `VIEW_COST` or many watchers make it longer."""
VIEW_COST = 20
"""A view is made again only after this many times the time to make it, so that views take a bounded part of the event
loop's time."""
MAX_VIEWS_PER_S = 1_000
"""Most views that all watchers together are sent in a second at intervals: each takes the event loop 0.1 to 0.3 ms."""
MAX_KEPT = 64
"""Most views that are kept for further watchers."""


def view_every_s(num_watchers: int) -> float:
    """Seconds between two views that a watcher is sent."""
    return max(VIEW_EVERY_S, num_watchers / MAX_VIEWS_PER_S)


class _Made(NamedTuple, Generic[View]):
    view: View
    at_s: float
    took_s: float
    change: int
    """Number of the event that had changed the job last."""


class SharedViews(Generic[View]):
    """Keeps the newest view of the jobs that were watched last, as a message or otherwise."""

    def __init__(
        self,
        make: Callable[[str], View],
        last_change: Callable[[str], int],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`make` makes a view of a job. `last_change` returns the number of the event that has changed it last. While
        that is equal, only values that change with time are out of date.
        """
        self._make, self._last_change, self._now = make, last_change, now
        self._made: dict[str, _Made[View]] = {}

    def newest(self, job_id: str) -> View:
        """The job as it is now."""
        made = self._made.get(job_id)
        if made is not None and made.change == self._last_change(job_id) and self._is_recent(made):
            return made.view
        return self._make_new(job_id)

    def recent(self, job_id: str) -> View:
        """The job as it was a moment ago."""
        return self.recent_and_change(job_id)[0]

    def recent_and_change(self, job_id: str) -> tuple[View, int]:
        """The job as it was a moment ago, and the number of the event that had changed it last."""
        made = self._made.get(job_id)
        if made is None or not self._is_recent(made):
            self._make_new(job_id)
            made = self._made[job_id]
        return made.view, made.change

    def _is_recent(self, made: _Made[View]) -> bool:
        return self._now() - made.at_s < max(VIEW_EVERY_S, VIEW_COST * made.took_s)

    def _make_new(self, job_id: str) -> View:
        change, began_s = self._last_change(job_id), self._now()
        view, ended_s = self._make(job_id), self._now()
        # Taken out, so that it is put back as the newest: the oldest is dropped first.
        self._made.pop(job_id, None)
        self._made[job_id] = _Made(view, ended_s, ended_s - began_s, change)
        while len(self._made) > MAX_KEPT:
            del self._made[next(iter(self._made))]
        return view
