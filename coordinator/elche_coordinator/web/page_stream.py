"""The messages to one open page: a list of jobs, a list of hosts and one job, each part only when it has changed."""

import json
import time
from typing import Any

from elche_coordinator.core.describe import JobView
from elche_coordinator.web import payloads
from elche_coordinator.web.recorder import JobRecording

CHOOSE_EVERY_S = 60.0
"""Seconds for which charts keep showing the same ranks of a job with more ranks than they can show."""


class PageStream:
    """Remembers what the page has received, and makes messages of what is new."""

    def __init__(self) -> None:
        self._parts: dict[str, str] = {}
        """By name: the JSON that was sent last."""
        self._moments, self._epochs, self._evaluations = payloads.Cursor(), payloads.Cursor(), payloads.Cursor()
        self._ranks: tuple[int, ...] = ()
        """Ranks in the charts, chosen at `_chosen_s` on the monotonic clock."""
        self._chosen_s = 0.0
        self._number = 0
        """Number of the last event that was sent."""

    def message(self, parts: dict[str, Any]) -> str:
        """One server-sent event with the parts that have changed; parts that are None are left out."""
        texts = {
            # Python would write NaN, which is no JSON, and browsers refuse the whole message.
            name: json.dumps(part, separators=(",", ":"), allow_nan=False)
            for name, part in parts.items()
            if part is not None
        }
        changed = {name: text for name, text in texts.items() if self._parts.get(name) != text}
        self._parts |= changed
        return "data: {" + ",".join(f'"{name}":{text}' for name, text in changed.items()) + "}\n\n"

    def figures(self, view: JobView, recording: JobRecording) -> dict[str, Any]:
        """The new figures and events of a job, as parts of a message."""
        ranks = payloads.rank_columns(recording, self._charted(view, recording))
        news = payloads.events(recording, self._number)
        self._number = recording.events[-1].number if recording.events else self._number
        return {
            "moments": payloads.rows(recording.moments, self._moments, ranks),
            "epochs": payloads.rows(recording.epochs, self._epochs),
            "evaluations": payloads.rows(recording.evaluations, self._evaluations),
            "events": news or None,
        }

    def _charted(self, view: JobView, recording: JobRecording) -> tuple[int, ...]:
        """The ranks in the charts. They change only every `CHOOSE_EVERY_S`, so that lines do not come and go."""
        if not view.ranks:  # of an earlier run: those that were saved
            return tuple(recording.ranks)
        has_more = len(self._ranks) < min(len(view.ranks), payloads.MAX_CHARTED)
        if has_more or time.monotonic() - self._chosen_s > CHOOSE_EVERY_S:
            self._chosen_s, self._ranks = time.monotonic(), payloads.charted(view)
        return self._ranks
