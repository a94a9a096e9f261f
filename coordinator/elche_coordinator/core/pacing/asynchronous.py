"""The policy `async`: ranks average when each has made its count, and no rank stops to wait for that."""

from collections.abc import Sequence
from dataclasses import replace

from elche_coordinator.core.pacing.cadence import SOLO_ROUND_MS, Cadence
from elche_coordinator.core.pacing.counts import within
from elche_coordinator.core.pacing.policy import Pace, RoundPlan, Work


class Async(Cadence):
    """Averages when every rank has made El Che's count. A rank that is done before the others trains on, and so
    overshoots (row C1).

    No rank stops at a target: a round is announced when it is due, and until then ranks are leased more work. Only the
    last round of an epoch is planned as `Cadence` does, so that all ranks end it together.
    """

    can_revise = False

    def plan(self, paces: Sequence[Pace], work: Work) -> RoundPlan | None:
        if work.open_rounds:
            return None
        timed, wall_ms = self._timed(paces, work)
        if self._left(timed, work, wall_ms)[1] == 1 and (last := self._end_epoch(timed, work)) is not None:
            return last
        counts = self._el_che_counts() if self._el_che else {paces[0].rank: self._solo_count(paces[0])}
        self._due_counts = within(counts, self._max_batch_diff)
        plan = self._go_on(timed, work, dict(self._due_counts))
        return replace(
            plan, is_announced=False, reason=f"when every rank has made its count, {min(counts.values())} or more"
        )

    def due(self, paces: Sequence[Pace], work: Work) -> bool:
        """True if every rank has made its count, or all batches that it has leased. False while no round is planned,
        such as when another generation is about to take over.
        """
        counts = self._due_counts
        return bool(counts) and all(pace.made >= min(counts[pace.rank], pace.leased_total) for pace in paces)

    def _solo_count(self, pace: Pace) -> int:
        """Batches in a round of a job's only rank: `SOLO_ROUND_MS` long once its speed is known."""
        return max(1, round(SOLO_ROUND_MS / pace.ms_per_batch)) if pace.ms_per_batch else self.anchor
