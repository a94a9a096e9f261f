"""Which ranks make no batch for longer than their history explains; `silence` reports and `describe` shows them."""

from collections.abc import Mapping
from math import inf
from statistics import median

from elche_coordinator.core.messages.ids import Rank
from elche_coordinator.core.records.ranks import RankRecord

CHECK_S = 1.0
"""Seconds between two checks while a rank is silent, at least."""
MAX_CHECK_S = 5.0
"""Seconds between two checks while a rank is silent, at most."""
LEAST_S = 10.0
"""The silence that a history explains is this, plus the larger of the next two."""
FIRST_S = 60.0
"""As `LEAST_S`, for a first batch: one rank compiles, say, and the others do not."""
BATCHES = 20.0
"""Times per batch."""
GAPS = 4.0
"""Times the longest gap between two reports of the rank."""
FORGOTTEN = 0.999
"""Factor on the longest gap with each report that is sooner, so that it is forgotten slowly."""


class StallWatch:
    """The silence of a job's ranks.

    A rank is stalled when it has work, waits for nobody, and is silent for longer than 10 s plus the larger of 20 of
    its batch times and 4 times the longest gap between its reports; such a gap is forgotten slowly. One that has made
    no batch yet is stalled 60 s and 20 times the slowest of the others' first batches after it began; when no other has
    made one, there is nothing to compare with. An averaging may take 10 s and 20 times as long as before, and so may an
    evaluation; a rank's first one 60 s and 20 times as long as the longest of the others'.
    """

    def __init__(self) -> None:
        self.stalled: dict[Rank, float] = {}
        """Since when each has been silent."""
        self._quiet_since_s: dict[Rank, float] = {}
        self._heard_s: dict[Rank, float] = {}
        self.gaps_s: dict[Rank, float] = {}
        """The longest between two reports of each rank; older ones count less."""
        self._first_s: dict[Rank, float] = {}
        """How long each rank took to report its first batch; 0 where that came before the first check."""

    def on_progress(self, rank: Rank, now_s: float) -> float | None:
        """The rank has made batches. Returns how long it was silent when it was stalled before, else None."""
        heard_s = self._heard_s.get(rank)
        if heard_s is not None:
            self.gaps_s[rank] = max(now_s - heard_s, FORGOTTEN * self.gaps_s.get(rank, 0.0))
        elif rank not in self._first_s:
            self._first_s[rank] = now_s - self._quiet_since_s.get(rank, now_s)
        self._heard_s[rank] = now_s
        self._quiet_since_s.pop(rank, None)
        since_s = self.stalled.pop(rank, None)
        return None if since_s is None else now_s - since_s

    def on_order(self, rank: Rank) -> None:
        """Restarts the rank's silence: it waits, or has something else to do. Its history does not count this gap."""
        if rank not in self.stalled:
            self._heard_s.pop(rank, None)
            self._quiet_since_s.pop(rank, None)

    def check(self, limits_s: Mapping[Rank, float], now_s: float) -> tuple[list[Rank], float | None]:
        """Finds ranks that have become stalled. `limits_s` has the ranks that should be making batches, each with the
        silence in seconds that its history explains. Returns the newly stalled ones, and in how many seconds to check
        again; None when every rank of `limits_s` is stalled.
        """
        found, next_s = [], None
        for rank, limit_s in limits_s.items():
            if rank in self.stalled:
                continue
            since_s = self._quiet_since_s.setdefault(rank, self._heard_s.get(rank, now_s))
            if now_s - since_s >= limit_s:
                self.stalled[rank] = since_s
                found.append(rank)
            else:
                left_s = min(MAX_CHECK_S, max(CHECK_S, since_s + limit_s - now_s))
                next_s = left_s if next_s is None else min(next_s, left_s)
        return found, next_s

    def patience_s(self, record: RankRecord) -> float:
        """How long a silence its history explains; infinite while there is none."""
        if record.local_step > 0:
            usual_ms = median(record.recent_ms) if record.recent_ms else record.ms_per_batch
            usual_s = self._first_s.get(record.rank, 0.0) if usual_ms is None else usual_ms / 1000
            return LEAST_S + max(BATCHES * usual_s, GAPS * self.gaps_s.get(record.rank, 0.0))
        others = [first_s for rank, first_s in self._first_s.items() if rank != record.rank]
        return FIRST_S + BATCHES * max(others) if others else inf
