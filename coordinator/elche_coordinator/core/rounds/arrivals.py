"""Estimates when members will enter the open round, updated by each report without a loop over all members."""

from collections.abc import Mapping, Sequence
from math import inf

from elche_coordinator.core.messages.ids import Rank, RoundId
from elche_coordinator.core.records.ranks import RankRecord


class Arrivals:
    """Bounds on the times at which the first and the last member enter one round: maybe too wide, never too narrow.

    A report can only widen them; a look at all members makes them exact. While they are close enough no look is needed:
    one for each report would cost time that grows with the square of the number of members.
    """

    def __init__(self) -> None:
        self._round = RoundId(0)
        """The round of the known span; 0: no span is known."""
        self._first_s, self._last_s = inf, -inf
        """The span's bounds, in seconds of the coordinator's clock."""
        self._slowest, self._slowest_ms = Rank(0), 0.0
        """The slowest member at the last look, and its ms per batch: a change of its speed needs another look."""
        self.looked_s = -inf
        """Time of the last look at all members."""

    def forget(self) -> None:
        """Drops the known span: the members' targets have changed."""
        self._round = RoundId(0)

    def look(
        self, round_id: RoundId, members: Mapping[Rank, RankRecord], arrivals_ms: Sequence[float], now_s: float
    ) -> None:
        """Sets the span exactly: `arrivals_ms` has, of all members, the ms from now until they enter the round."""
        self._round, self.looked_s = round_id, now_s
        self._first_s, self._last_s = now_s + min(arrivals_ms) / 1000, now_s + max(arrivals_ms) / 1000
        self._slowest = max(members, key=lambda rank: members[rank].ms_per_batch or 0.0)
        self._slowest_ms = members[self._slowest].ms_per_batch or 0.0

    def may_differ(self, record: RankRecord, round_id: RoundId, target: int, batches: float, now_s: float) -> bool:
        """Takes in a member's report; `target` is the step after which it enters the round. True if members may enter
        further apart than `batches` batches of the slowest one, so that a look is needed.
        """
        ms_per_batch = record.ms_per_batch
        if round_id != self._round or record.rank == self._slowest or ms_per_batch is None:
            return True
        arrival_s = record.reported_at_s + (target - record.local_step) * ms_per_batch / 1000
        self._first_s, self._last_s = min(self._first_s, arrival_s), max(self._last_s, arrival_s)
        apart_s = max(self._last_s, now_s) - max(self._first_s, now_s)
        return apart_s * 1000 >= batches * self._slowest_ms
