"""The policy `sync`: ranks average after every batch, as data parallelism does."""

from collections.abc import Mapping, Sequence

from elche_coordinator.core.messages.ids import Rank
from elche_coordinator.core.pacing.counts import equal_shares
from elche_coordinator.core.pacing.divergence import Drift
from elche_coordinator.core.pacing.policy import Pace, Policy, RoundPlan, Work

SYNC_LEASE = 64
"""Batches to which a rank's leases are topped up; not all of the epoch, so that work is left for a rank that joins."""
SYNC_WINDOW = 16
"""Rounds that are open at once: with one, every batch would wait for a commit and its disk write (protocol P10.1)."""


class Sync(Policy):
    """A round after every batch; equal shares; several rounds are announced at once (row C1, protocol P10)."""

    can_revise = False
    stops_ranks = True
    anchor = 1
    is_calibrated = False

    def plan(self, paces: Sequence[Pace], work: Work) -> RoundPlan | None:
        leased = {pace.rank: pace.leased for pace in paces}
        shares = dict.fromkeys(leased, 0)
        if min(leased.values()) <= SYNC_WINDOW:
            shares = {pace.rank: max(0, SYNC_LEASE - pace.leased) * pace.batch_size for pace in paces}
            if sum(shares.values()) > work.free_samples:
                shares = equal_shares(paces, work.free_samples)
            leased = {pace.rank: pace.leased + -(-shares[pace.rank] // pace.batch_size) for pace in paces}
        # After a change of membership ranks may have made more than any open round: none may lie behind a rank.
        granted = max(work.granted, max(pace.made for pace in paces) - 1)
        num_rounds = min(SYNC_WINDOW + granted - work.open_rounds, max(leased.values())) - granted
        # Topped up when half of it is used: one round for each commit would be a message to each rank for each batch.
        if work.open_rounds > SYNC_WINDOW // 2 or num_rounds <= 0:
            return None
        return RoundPlan(
            counts={pace.rank: granted + 1 for pace in paces},
            lease_samples=shares,
            num_rounds=num_rounds,
            reason="after every batch",
        )

    def learn(
        self,
        wall_ms: Mapping[Rank, float],
        num_batches: Mapping[Rank, int],
        sync_ms: float,
        drift: Drift = Drift.CALM,
    ) -> None:
        self.is_calibrated |= any(num_batches.values())
