"""When members will come to the open round, followed report by report without looking at all of them each time."""

from collections.abc import Mapping, Sequence
from math import inf

from elche_coordinator.core.messages.ids import Rank, RoundId
from elche_coordinator.core.records.ranks import RankRecord


class Arrivals:
    """Between which times the members will come to one round, or a wider span.

    A member's time is where its last report leads, so it moves with its own reports alone. They only widen the span,
    which is made exact when all members are looked at. So a span that is short enough saves a look, and nothing is
    missed.
    """

    def __init__(self) -> None:
        self._round = RoundId(0)
        """Of which the span is; 0: none is known."""
        self._first_s, self._last_s = inf, -inf
        self._slowest, self._slowest_ms = Rank(0), 0.0
        self.looked_s = -inf
        """When all members were looked at last."""

    def forget(self) -> None:
        """Drops the known span: the members' targets have changed."""
        self._round = RoundId(0)

    def look(
        self, round_id: RoundId, members: Mapping[Rank, RankRecord], arrivals_ms: Sequence[float], now_s: float
    ) -> None:
        """All members were looked at: in so many ms each comes to the round."""
        self._round, self.looked_s = round_id, now_s
        self._first_s, self._last_s = now_s + min(arrivals_ms) / 1000, now_s + max(arrivals_ms) / 1000
        self._slowest = max(members, key=lambda rank: members[rank].ms_per_batch or 0.0)
        self._slowest_ms = members[self._slowest].ms_per_batch or 0.0

    def may_differ(self, record: RankRecord, round_id: RoundId, target: int, batches: float, now_s: float) -> bool:
        """True if members may come further apart than so many batches of the slowest, now that this one, which comes to
        the round after its `target` step, has reported.
        """
        ms_per_batch = record.ms_per_batch
        if round_id != self._round or record.rank == self._slowest or ms_per_batch is None:
            return True
        arrival_s = record.reported_at_s + (target - record.local_step) * ms_per_batch / 1000
        self._first_s, self._last_s = min(self._first_s, arrival_s), max(self._last_s, arrival_s)
        apart_s = max(self._last_s, now_s) - max(self._first_s, now_s)
        return apart_s * 1000 >= batches * self._slowest_ms
