"""Finds stalled ranks, which make no batch for longer than their history allows; `silence` reports them."""

from collections.abc import Mapping

from elche_coordinator.core.messages.ids import Rank
from elche_coordinator.core.records.ranks import RankRecord

CHECK_S = 1.0
"""Seconds between two checks while a rank is silent, at least."""
MAX_CHECK_S = 5.0
"""Seconds between two checks while a rank is silent, at most."""
LEAST_S = 10.0
"""Allowed silence is this many seconds plus the larger of `BATCHES` batch times and `GAPS` times the longest gap."""
FIRST_S = 60.0
"""As `LEAST_S`, for a first batch, for which only some ranks may have to compile."""
UNKNOWN_FIRST_S = 900.0
"""As `FIRST_S`, where no rank has made a batch: longer than most compilations. A job whose ranks all wait for a lock
would be shown as training for ever.
"""
BATCHES = 20.0
"""Number of batch times in the allowed silence."""
GAPS = 4.0
"""Multiple of the longest gap between two reports of the rank."""
DECAY = 0.999
"""Each shorter gap multiplies the longest one by this factor, so that it is forgotten slowly."""


class StallWatch:
    """Finds a job's stalled ranks.

    A rank is stalled when it has work, waits for no other, and is silent for longer than 10 s plus the larger of 20 of
    its batch times and 4 times the longest gap between its reports. One without any batch is stalled after 60 s plus 20
    times the slowest first batch of the others, or after 15 minutes if no other has made one. An averaging, and an
    evaluation, may take 10 s plus 20 times as long as before; a rank's first evaluation 60 s plus 20 times the longest
    of the others'.
    """

    def __init__(self) -> None:
        self.stalled: dict[Rank, float] = {}
        """Time since which each stalled rank is silent."""
        self._quiet_since_s: dict[Rank, float] = {}
        """Time from which each rank's present silence counts; set by the first check that finds a batch due."""
        self._message_s: dict[Rank, float] = {}
        """Time of each rank's last batches; absent after it has waited or done other work (`on_order`)."""
        self.gaps_s: dict[Rank, float] = {}
        """Longest gap in seconds between two reports of each rank; older ones are discounted."""
        self._first_s: dict[Rank, float] = {}
        """Seconds that each rank took to report its first batch; 0 if that came before the first check."""

    def on_progress(self, rank: Rank, now_s: float) -> float | None:
        """Records that the rank has made batches. Returns the seconds of its silence if it was stalled, else None."""
        before_s = self._message_s.get(rank)
        if before_s is not None:
            self.gaps_s[rank] = max(now_s - before_s, DECAY * self.gaps_s.get(rank, 0.0))
        elif rank not in self._first_s:
            self._first_s[rank] = now_s - self._quiet_since_s.get(rank, now_s)
        self._message_s[rank] = now_s
        self._quiet_since_s.pop(rank, None)
        since_s = self.stalled.pop(rank, None)
        return None if since_s is None else now_s - since_s

    def on_order(self, rank: Rank) -> None:
        """Restarts the silence of a rank that waits or does other work, without counting it as a gap. A stalled rank
        stays stalled until it makes progress.
        """
        if rank not in self.stalled:
            self._message_s.pop(rank, None)
            self._quiet_since_s.pop(rank, None)

    def excuse(self, late_s: float) -> None:
        """Shortens all silences by `late_s` seconds in which the coordinator itself did not run."""
        for times in (self._quiet_since_s, self._message_s):
            times.update({rank: at_s + late_s for rank, at_s in times.items()})

    def check(self, limits_s: Mapping[Rank, float], now_s: float) -> tuple[list[Rank], float | None]:
        """Finds newly stalled ranks. `limits_s` has the ranks that should be making batches, with their allowed silence
        in seconds. Returns the newly stalled ones, and the seconds until the next check; None when all are stalled.
        """
        found, next_s = [], None
        for rank, limit_s in limits_s.items():
            if rank in self.stalled:
                continue
            since_s = self._quiet_since_s.setdefault(rank, self._message_s.get(rank, now_s))
            if now_s - since_s >= limit_s:
                self.stalled[rank] = since_s
                found.append(rank)
            else:
                left_s = min(MAX_CHECK_S, max(CHECK_S, since_s + limit_s - now_s))
                next_s = left_s if next_s is None else min(next_s, left_s)
        return found, next_s

    def patience_s(self, record: RankRecord) -> float:
        """Allowed silence in seconds: by the rank's own batches, before its first one by the others' first batches."""
        if record.local_step > 0:
            usual_ms = record.ms_per_batch if record.usual_ms is None else record.usual_ms
            usual_s = self._first_s.get(record.rank, 0.0) if usual_ms is None else usual_ms / 1000
            return LEAST_S + max(BATCHES * usual_s, GAPS * self.gaps_s.get(record.rank, 0.0))
        others = [first_s for rank, first_s in self._first_s.items() if rank != record.rank]
        return FIRST_S + BATCHES * max(others) if others else UNKNOWN_FIRST_S
