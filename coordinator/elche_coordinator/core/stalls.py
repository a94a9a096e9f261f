"""Which ranks make no batch for longer than their own history explains. Nothing is done about it here: it is shown."""

from collections import deque
from collections.abc import Mapping
from statistics import median

from elche_coordinator.core.ids import Rank
from elche_coordinator.core.ranks import RankRecord

CHECK_S = 1.0
"""Between a rank's progress and the next look at all."""
LEAST_S = 1.0
BATCHES = 20.0
GAPS = 4.0
RECENT = 64
"""Reports whose distances are remembered."""


class StallWatch:
    """The silence of a job's ranks. A rank is stalled when it has work, waits for nobody, and its silence exceeds 1 s
    and 20 of its batches, or 4 of the longest recent gaps between its reports. One that has made no batch yet, because
    it compiles, say, is held against the others' first batches; when none has made one, there is nothing to compare.
    """

    def __init__(self) -> None:
        self.stalled: dict[Rank, float] = {}
        """Since when each has been silent."""
        self._quiet_since_s: dict[Rank, float] = {}
        self._heard_s: dict[Rank, float] = {}
        self._gaps_s: dict[Rank, deque[float]] = {}
        self._first_s: dict[Rank, float] = {}
        """How long each rank's first batch took to be told of."""

    def note_progress(self, rank: Rank, now_s: float) -> float | None:
        """The rank has made batches. Returns how long it was silent when it was stalled before, else None."""
        heard_s = self._heard_s.get(rank)
        if heard_s is not None:
            self._gaps_s.setdefault(rank, deque(maxlen=RECENT)).append(now_s - heard_s)
        elif rank not in self._gaps_s and rank in self._quiet_since_s:
            self._first_s[rank] = now_s - self._quiet_since_s[rank]
        self._heard_s[rank] = now_s
        self._quiet_since_s.pop(rank, None)
        since_s = self.stalled.pop(rank, None)
        return None if since_s is None else now_s - since_s

    def note_order(self, rank: Rank) -> None:
        """The rank was told something, or waits: its silence begins anew, and this gap says nothing of its speed."""
        if rank not in self.stalled:
            self._heard_s.pop(rank, None)
            self._quiet_since_s.pop(rank, None)

    def check(self, limits_s: Mapping[Rank, float], now_s: float) -> tuple[list[Rank], float | None]:
        """Looks at the ranks that should be making progress, each with the silence that is explained: those that are
        stalled now and were not, and in how many seconds to look again; None when no silence is left to watch.
        """
        found, next_s = [], None
        for rank, limit_s in limits_s.items():
            if rank in self.stalled:
                continue
            since_s = self._quiet_since_s.setdefault(rank, now_s)
            if now_s - since_s >= limit_s:
                self.stalled[rank] = since_s
                found.append(rank)
            else:
                left_s = max(CHECK_S, since_s + limit_s - now_s)
                next_s = left_s if next_s is None else min(next_s, left_s)
        return found, next_s

    def patience_s(self, record: RankRecord) -> float | None:
        """How long a silence its history explains; None when there is none."""
        if record.recent_ms:
            gaps_s = self._gaps_s.get(record.rank, ())
            return LEAST_S + max(BATCHES * median(record.recent_ms) / 1000, GAPS * max(gaps_s, default=0.0))
        others = [first_s for rank, first_s in self._first_s.items() if rank != record.rank]
        return LEAST_S + BATCHES * max(others) if others else None
