"""The policy `cadence`: the slowest rank's batches set the time of a round, and the others make as many as fit."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from elche.cadence import ElChe
from elche.settings import AgreedSettings
from elche.sums import added
from elche_coordinator.core.messages.ids import Rank, by_rank
from elche_coordinator.core.pacing.counts import (
    STRETCH,
    counts_near,
    counts_to_finish,
    dealt_free,
    elapsed_ms,
    finish_ms,
    in_samples,
    lead_ms,
    spare_batches,
    whole_span_ms,
    with_ms_per_batch,
    within,
)
from elche_coordinator.core.pacing.divergence import Drift
from elche_coordinator.core.pacing.policy import Pace, Policy, RoundPlan, Work

SHORTER = 0.8
"""Factor by which a round is shortened until the work that is left suffices for it."""
PROBE_BATCHES = 4
"""Least number of batches of the slowest rank in the first round."""
PROBE_FRACTION = 0.10
"""Part of its share of an epoch that the slowest rank makes in the first round, which measures the ranks' speeds; never
more than the anchor."""
UNMEASURED_FRACTION = 0.02
"""Part of an equal share of an epoch that a rank gets beyond the first round: it may be fast, and the coordinator far.
What a slow rank has got so it must train alone when all others have nothing left.
"""
SOLO_ROUND_MS = 5000.0
"""Length of a round of one rank: nothing is averaged, but work is committed."""
NUDGE = 0.5
"""Factor on the anchor when the ranks keep drifting apart."""


class Cadence(Policy):
    """Averages when the slowest rank has made `anchor` batches; the others make as many as fit in that time (row
    C1).
    """

    can_revise = True
    stops_ranks = False

    def __init__(self, settings: AgreedSettings, ranks: Sequence[Rank]) -> None:
        self._ranks = tuple(ranks)
        """The ranks in El Che's order: El Che knows positions only."""
        self._el_che = _new_el_che(settings, ranks) if len(ranks) > 1 else None
        self._first_anchor = settings.anchor
        self._max_batch_diff = settings.max_batch_diff
        self.can_revise = self.can_revise and not self._is_lockstep
        self._asleep: Mapping[str, Any] | None = None
        """El Che's learned state, kept for later checkpoints while the job has only one rank."""
        self._solo_calibrated = False
        """True once the job's only rank has committed batches."""
        self._due_counts: dict[Rank, int] = {}
        """Under `async`, batches that each rank makes until the planned round is due."""
        self._probe = settings.anchor
        """Batches of the slowest rank in the first round, if that is less than the anchor."""

    @property
    def _is_lockstep(self) -> bool:
        """True if all ranks make equally many batches in a round, an epoch's last one aside (`max_batch_diff` 0)."""
        return self._max_batch_diff == 0

    @property
    def anchor(self) -> int:
        return self._el_che.anchor if self._el_che else self._first_anchor

    @property
    def is_calibrated(self) -> bool:
        return self._el_che.is_calibrated if self._el_che else self._solo_calibrated

    def plan(self, paces: Sequence[Pace], work: Work) -> RoundPlan | None:
        if work.open_rounds:
            return None
        timed, wall_ms = self._timed(paces, work)
        away_ms = self._away_ms(paces)
        finish_ms, rounds_left = self._left(timed, work, max(wall_ms, away_ms))
        if rounds_left == 1 and (last := self._end_epoch(timed, work)) is not None:
            return last
        horizon_ms = max(0.0, wall_ms - max(elapsed_ms(pace) for pace in timed))
        # the last three rounds of an epoch get equal lengths, so that no short rest is left over
        horizon_ms = max(finish_ms / rounds_left if rounds_left < 4 else horizon_ms, away_ms)
        counts = counts_near(timed, horizon_ms)
        together = self._together(timed, work, counts, horizon_ms)
        return replace(self._go_on(timed, work, together), is_fixed=together != counts)

    def _together(
        self, paces: Sequence[Pace], work: Work, counts: dict[Rank, int], horizon_ms: float
    ) -> dict[Rank, int]:
        """The counts within `max_batch_diff` of each other; smaller ones when too little work is left for these."""
        # in lockstep each rank makes one batch more than the rank furthest behind has made; others may have made it
        # already
        floor = 1 + min(pace.made for pace in paces) if self._is_lockstep else 0
        bounded = {rank: max(floor, count) for rank, count in within(counts, self._max_batch_diff).items()}
        while self._max_batch_diff is not None and horizon_ms > 1.0:
            missing = (pace.ratio * max(0, bounded[pace.rank] - pace.leased_total) for pace in paces)
            if added(missing) <= work.free_batches:
                break
            horizon_ms *= SHORTER
            counts = within(counts_near(paces, horizon_ms), self._max_batch_diff)
            bounded = {rank: max(floor, count) for rank, count in counts.items()}
        return bounded

    def _left(self, paces: Sequence[Pace], work: Work, wall_ms: float) -> tuple[float, int]:
        """Returns the ms until the epoch is trained if nobody waits, and the number of rounds to divide them into."""
        num_batches = work.free_batches + added(pace.ratio * (pace.leased - pace.made) for pace in paces)
        finish_ms = num_batches / added(pace.ratio / (pace.ms_per_batch or 1) for pace in paces)
        return finish_ms, max(1, math.ceil(finish_ms / wall_ms - STRETCH))

    def revise(self, paces: Sequence[Pace], elapsed_ms: float) -> dict[Rank, int]:
        wall_ms = self._wall_ms([pace.ms_per_batch or 1.0 for pace in paces])
        horizon_ms = max(0.0, wall_ms - elapsed_ms, self._away_ms(paces))
        return within(counts_near(paces, horizon_ms, at_least=1), self._max_batch_diff)

    def _away_ms(self, paces: Sequence[Pace]) -> float:
        """Least length of a round in ms: until the last rank has evaluated, if others can train meanwhile; else 0."""
        if self._max_batch_diff is not None or all(pace.delay_ms > 0 for pace in paces):
            return 0.0
        return max(0.0, *(pace.delay_ms for pace in paces))

    def learn(
        self,
        wall_ms: Mapping[Rank, float],
        num_batches: Mapping[Rank, int],
        sync_ms: float,
        drift: Drift = Drift.CALM,
    ) -> None:
        if self._el_che:
            times, counts = [wall_ms[rank] for rank in self._ranks], [num_batches[rank] for rank in self._ranks]
            # Only the cost of averaging raises the anchor: without any it cannot grow while ranks drift apart.
            self._el_che.report_timing(times, counts, sync_ms if drift is Drift.CALM else 0.0)
            if drift is Drift.LASTING:
                self._el_che.nudge_anchor_down(NUDGE)
        self._solo_calibrated |= any(num_batches.values())

    def to_json(self) -> dict[str, object]:
        return {"el_che": self._el_che.to_json() if self._el_che else None, "asleep": self._asleep}

    def restore(self, state: Mapping[str, Any], like: Sequence[Sequence[int]] | None = None) -> None:
        learned = state.get("el_che") or state.get("asleep")
        if not learned:
            return
        if self._el_che is None:
            self._asleep = learned
            return
        # The limit is a setting, not learned: a resumed job may have another one.
        el_che = ElChe.from_json({**learned, "max_batch_diff": self._max_batch_diff})
        size = len(self._el_che.batch_counts)
        same = [[rank] if rank < len(learned["ranks"]) else [] for rank in range(size)]
        self._el_che = el_che.with_ranks(same if like is None else like)

    def _timed(self, paces: Sequence[Pace], work: Work) -> tuple[list[Pace], float]:
        """Returns paces with a time per batch for every rank, and the round's length in the same unit: ms once all
        ranks are measured.

        Until then the times are relative, by El Che's counts (equal, or by the hint): the slowest rank's batch is 1.
        """
        times = [pace.ms_per_batch for pace in paces if pace.ms_per_batch is not None]
        if len(times) == len(paces):
            return list(paces), self._wall_ms(times)
        self._probe = max(PROBE_BATCHES, int(PROBE_FRACTION * work.epoch_batches / len(paces)))
        counts = self._el_che_counts()
        assumed = [with_ms_per_batch(pace, self.anchor / counts[pace.rank]) for pace in paces]
        return assumed, float(min(self.anchor, self._probe))

    def _el_che_counts(self) -> dict[Rank, int]:
        return by_rank(self._ranks, self._el_che.batch_counts if self._el_che else [self.anchor])

    def _wall_ms(self, times: Sequence[float]) -> float:
        """Length of a round in ms, given each rank's ms per batch."""
        if self._el_che is None:
            return max(SOLO_ROUND_MS, times[0])
        if self._el_che.is_calibrated:
            return min(self.anchor * max(times), self._el_che.anchor_wall_ms)
        return min(self.anchor, self._probe) * max(times)

    def _go_on(self, paces: Sequence[Pace], work: Work, counts: dict[Rank, int]) -> RoundPlan:
        """Leases what the counts need, and each rank's spare: of this epoch, then of the next."""
        lease = dealt_free(paces, counts, work.free_batches)
        with_spare = {pace.rank: counts[pace.rank] + self.spare(pace, work) for pace in paces}
        planned = [replace(pace, leased_total=pace.leased_total + lease[pace.rank]) for pace in paces]
        left = work.free_batches - added(pace.ratio * lease[pace.rank] for pace in paces)
        more = dealt_free(planned, with_spare, left)
        later: dict[Rank, int] = {}
        free_later: float = work.free_later
        for pace in paces:
            lease[pace.rank] += more[pace.rank]
            left = math.ceil(free_later / pace.ratio)
            later[pace.rank] = min(left, max(0, with_spare[pace.rank] - pace.leased_total - lease[pace.rank]))
            free_later = max(0.0, free_later - pace.ratio * later[pace.rank])
        leased = {pace.rank: min(counts[pace.rank], pace.leased_total + lease[pace.rank]) for pace in paces}
        # Once more, since a rank with little work has lowered the smallest count.
        counts = within(leased, self._max_batch_diff)
        reason = self._reason(paces, counts)
        return RoundPlan(
            counts=counts,
            lease_samples=in_samples(paces, lease),
            lease_later=in_samples(paces, later),
            reason=reason,
        )

    def _end_epoch(self, paces: Sequence[Pace], work: Work) -> RoundPlan | None:
        """Leases all that is left of the epoch. A rank that is done before the others, or gets nothing of it, trains as
        much of later epochs as fits: nobody waits for an epoch's end.

        None when that would take a rank more than `max_batch_diff` ahead of the others.
        """
        counts = counts_to_finish(paces, work.free_batches)
        if within(counts, self._max_batch_diff) != counts:
            return None
        lease = {pace.rank: max(0, counts[pace.rank] - pace.leased_total) for pace in paces}
        later: dict[Rank, int] = {}
        free: float = work.free_later
        span_ms = min(self._span_ms(paces, counts, work), lead_ms(paces))
        for pace in paces:
            leased_later = max(0, pace.leased_total - counts[pace.rank])
            fits = max(0, int((span_ms - finish_ms(pace, counts[pace.rank])) / (pace.ms_per_batch or 1.0) + 1e-9))
            left = math.ceil(free / pace.ratio)
            later[pace.rank] = max(0, min(left, fits + self.spare(pace, work)) - leased_later)
            free = max(0.0, free - pace.ratio * later[pace.rank])
            counts[pace.rank] += min(fits, leased_later + later[pace.rank])
        return RoundPlan(
            counts=within(counts, self._max_batch_diff),
            lease_samples=in_samples(paces, lease),
            lease_later=in_samples(paces, later),
            is_fixed=True,
            ends_epoch=True,
            reason=f"{self._reason(paces, counts)}; it ends the epoch",
        )

    def _span_ms(self, paces: Sequence[Pace], counts: dict[Rank, int], work: Work) -> float:
        """Duration in ms of the round that ends the epoch: until its last batch is made.

        With blocking averaging it may last up to a batch of the slowest rank longer, if ranks idle less then.
        """
        span_ms = max(finish_ms(pace, counts[pace.rank]) for pace in paces)
        if self._max_batch_diff is not None or not work.free_later:
            return span_ms
        return span_ms if work.overlap_ms else whole_span_ms(paces, counts, span_ms)

    def _reason(self, paces: Sequence[Pace], counts: dict[Rank, int]) -> str:
        fewest, most = min(counts.values()), max(counts.values())
        batches = f"{fewest} batches" if fewest == most else f"{fewest} to {most} batches"
        if not self.is_calibrated:
            return f"{batches} each, until the ranks' speeds are measured"
        span_s = max(finish_ms(pace, counts[pace.rank]) for pace in paces) / 1000
        return f"a round of {span_s:.2f} s: {batches} by rank, so that all arrive together"

    def spare(self, pace: Pace, work: Work) -> int:
        if not self.is_calibrated or pace.ms_per_batch is None:
            return max(2, int(UNMEASURED_FRACTION * work.epoch_batches / len(self._ranks)))
        return spare_batches(pace.ms_per_batch, work)


def _new_el_che(settings: AgreedSettings, ranks: Sequence[Rank]) -> ElChe:
    hint = settings.speed_hint
    return ElChe(
        len(ranks),
        settings.anchor,
        overhead_target=settings.overhead_target,
        max_anchor=settings.max_anchor,
        max_count_change=settings.max_batch_diff,
        speed_ratio=(ranks.index(Rank(hint[0])), hint[1]) if hint and hint[0] in ranks else None,
    )
