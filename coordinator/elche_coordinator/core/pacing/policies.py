"""How many batches each rank makes before the next averaging, and which samples they are.

All functions here are pure: they get the ranks' paces and the work that is left, and say what to do and why.
El Che says how long a round lasts. The counts come from each rank's latest batch times, so that all arrive together
also right after a speed has changed (El Che's smoothed times would lag for rounds).
"""

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from elche.cadence import ElChe
from elche.partition import equal_sizes, ratio_sizes
from elche_coordinator.core.messages.ids import Rank
from elche_coordinator.core.messages.spec import Settings
from elche_coordinator.core.pacing.divergence import Drift

STRETCH = 0.25
"""A round may be this part longer or shorter than El Che's, to make counts come out whole or to end the epoch."""
SHORTER = 0.8
NEARLY_BEST = 0.003
"""Losses that differ by less are equal; then the length nearest to El Che's wins."""
MAX_CANDIDATES = 24
PROBE_BATCHES = 4
PROBE_FRACTION = 0.10
SOLO_ROUND_MS = 5000.0
"""Length of a round of one rank: nothing is averaged, but work is committed."""
AHEAD_MS = 30.0
"""Leased beyond the next round, so that a rank trains on while the round after is decided."""
OVERLAP_MARGIN = 1.25
"""Leased for an averaging that lasts longer than the last ones did."""
NUDGE = 0.5
"""What remains of the anchor when the ranks keep drifting apart."""
SYNC_WINDOW = 16
"""Rounds that `sync` grants ahead of what is durable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """One rank's speed and position. Batches are counted from the last committed round."""

    rank: Rank
    ms_per_batch: float | None
    """None before the first batch."""
    batch_size: int = 1
    """Samples in its batches."""
    ratio: float = 1.0
    """Its batch size relative to the job's. Free work is counted in batches of the job's size."""
    made: int = 0
    leased: int = 0
    """Leased batches up to the last one of this epoch, those made included."""
    held: int = 0
    """All leased batches; those after `leased` are of later epochs."""
    delay_ms: float = 0.0
    """From now until it begins its next batch; negative when it has begun before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is left to lease."""

    epoch_batches: int
    """Batches of a whole epoch."""
    free_batches: int
    """Batches of this epoch that nobody has."""
    free_samples: int
    free_ahead: int
    """Batches of the next epoch that nobody has; 0 in the last one."""
    open_rounds: int = 0
    granted: int = 0
    """Batches from the last committed round to the last announced one."""
    overlap_ms: float = 0.0
    """How long an averaging lasts during which ranks train on; 0 when they wait for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The next round or rounds."""

    counts: dict[Rank, int]
    """Batches from the last committed round, or from the last granted one, to the first of these."""
    lease_samples: dict[Rank, int] = field(default_factory=dict)
    """Samples of this epoch to lease."""
    lease_ahead: dict[Rank, int] = field(default_factory=dict)
    """Samples of the next epoch to lease."""
    num_rounds: int = 1
    is_fixed: bool = False
    """Its targets are the ends of what is leased: to revise them would only leave work for another round."""
    is_announced: bool = True
    """False: the round is announced when it is due, and ranks train on until then."""
    reason: str


class Policy(Protocol):
    """When ranks average. `Cadence`, `Async` and `Sync` are its forms."""

    can_revise: bool
    """Whether announced rounds may get other targets."""
    stops_ranks: bool
    """Whether ranks may make no batch beyond the last granted round."""

    @property
    def anchor(self) -> int:
        """Batches of the slowest rank between averagings."""
        ...

    @property
    def is_calibrated(self) -> bool:
        """Whether the ranks' speeds have been measured."""
        ...

    def plan(self, paces: Sequence[Pace], work: Work) -> Plan | None:
        """The next rounds; None when no more are to be granted now."""
        ...

    def revise(self, paces: Sequence[Pace], elapsed_ms: float) -> dict[Rank, int]:
        """New counts for an announced round, counted as its old ones are; only when `can_revise`."""
        ...

    def spare(self, pace: Pace, work: Work) -> int:
        """Batches to lease beyond the next round."""
        ...

    def due(self, paces: Sequence[Pace], work: Work) -> bool:
        """Whether a round that was planned and not announced is to be announced now."""
        ...

    def learn(self, wall_ms: list[float], num_batches: list[int], sync_ms: float, drift: Drift = Drift.CALM) -> None:
        """Takes in a committed round."""
        ...

    def to_json(self) -> dict[str, object]:
        """What it has learned, as plain values."""
        ...

    def restore(self, state: Mapping[str, Any], like: Sequence[Sequence[int]] | None = None) -> None:
        """Goes on from what `to_json` gave. `like` says of each rank which of the ranks of then it is, or is like; by
        default that of its number (row E10).
        """
        ...


class Cadence:
    """A round when the slowest rank has made its anchor of batches; the others make as many as fit (SPEC C1)."""

    can_revise = True
    stops_ranks = False

    def __init__(self, settings: Settings, world_size: int) -> None:
        self._el_che = _new_el_che(settings, world_size) if world_size > 1 else None
        self._first_anchor = settings.anchor
        self._max_batch_diff = settings.max_batch_diff
        self.can_revise = self.can_revise and not self._is_lockstep
        self._asleep: Mapping[str, Any] | None = None
        """What was learned of other ranks, where there is but one now."""
        self._solo_calibrated = False
        self._due_counts: dict[Rank, int] = {}
        self._probe = settings.anchor
        """Batches of the slowest rank in the first round, if that is less than the anchor."""

    @property
    def _is_lockstep(self) -> bool:
        """Whether all ranks make equally many batches in a round, an epoch's last ones aside (`max_batch_diff` 0)."""
        return self._max_batch_diff == 0

    @property
    def anchor(self) -> int:
        return self._el_che.anchor if self._el_che else self._first_anchor

    @property
    def is_calibrated(self) -> bool:
        return self._el_che.is_calibrated if self._el_che else self._solo_calibrated

    def plan(self, paces: Sequence[Pace], work: Work) -> Plan | None:
        if work.open_rounds:
            return None
        timed, wall_ms = self._timed(paces, work)
        finish_ms, rounds_left = self._left(timed, work, wall_ms)
        if rounds_left == 1 and (last := self._end_epoch(timed, work)) is not None:
            return last
        horizon_ms = max(0.0, wall_ms - max(_elapsed_ms(pace) for pace in timed))
        horizon_ms = finish_ms / rounds_left if rounds_left < 4 else horizon_ms
        counts = counts_near(timed, horizon_ms)
        together = self._together(timed, work, counts, horizon_ms)
        return replace(self._go_on(timed, work, together), is_fixed=together != counts)

    def _together(
        self, paces: Sequence[Pace], work: Work, counts: dict[Rank, int], horizon_ms: float
    ) -> dict[Rank, int]:
        """The counts with no rank too far ahead; fewer when not enough is left for all to keep together."""
        floor = 1 + min(pace.made for pace in paces) if self._is_lockstep else 0  # who is ahead may be there already
        bounded = {rank: max(floor, count) for rank, count in within(counts, self._max_batch_diff).items()}
        while self._max_batch_diff is not None and horizon_ms > 1.0:
            if sum(pace.ratio * max(0, bounded[pace.rank] - pace.held) for pace in paces) <= work.free_batches:
                break
            horizon_ms *= SHORTER
            counts = within(counts_near(paces, horizon_ms), self._max_batch_diff)
            bounded = {rank: max(floor, count) for rank, count in counts.items()}
        return bounded

    def _left(self, paces: Sequence[Pace], work: Work, wall_ms: float) -> tuple[float, int]:
        """Time until the epoch is trained if nobody waits, and into how many rounds that is best divided."""
        num_batches = work.free_batches + sum(pace.ratio * (pace.leased - pace.made) for pace in paces)
        finish_ms = num_batches / sum(pace.ratio / (pace.ms_per_batch or 1) for pace in paces)
        return finish_ms, max(1, math.ceil(finish_ms / wall_ms - STRETCH))

    def revise(self, paces: Sequence[Pace], elapsed_ms: float) -> dict[Rank, int]:
        wall_ms = self._wall_ms([pace.ms_per_batch or 1.0 for pace in paces])
        return within(counts_near(paces, max(0.0, wall_ms - elapsed_ms), at_least=1), self._max_batch_diff)

    def learn(self, wall_ms: list[float], num_batches: list[int], sync_ms: float, drift: Drift = Drift.CALM) -> None:
        if self._el_che:
            self._el_che.report_timing(wall_ms, num_batches, sync_ms if drift is Drift.CALM else 0.0)
            if drift is Drift.LASTING:
                self._el_che.nudge_anchor_down(NUDGE)
        self._solo_calibrated |= any(num_batches)

    def to_json(self) -> dict[str, object]:
        return {"el_che": self._el_che.to_json() if self._el_che else None, "asleep": self._asleep}

    def restore(self, state: Mapping[str, Any], like: Sequence[Sequence[int]] | None = None) -> None:
        learned = state.get("el_che") or state.get("asleep")
        if not learned:
            return
        if self._el_che is None:
            self._asleep = learned
            return
        el_che = ElChe.from_json({**learned, "max_batch_diff": self._max_batch_diff})
        size = len(self._el_che.batch_counts)
        same = [[rank] if rank < len(learned["ranks"]) else [] for rank in range(size)]
        self._el_che = el_che.with_ranks(same if like is None else like)

    def _timed(self, paces: Sequence[Pace], work: Work) -> tuple[list[Pace], float]:
        """Paces with a time for every rank, and the round's length in the same unit.

        Until every rank is measured, El Che's counts (equal, or by the hint) stand for the speeds.
        """
        times = [pace.ms_per_batch for pace in paces if pace.ms_per_batch is not None]
        if len(times) == len(paces):
            return list(paces), self._wall_ms(times)
        self._probe = max(PROBE_BATCHES, int(PROBE_FRACTION * work.epoch_batches / len(paces)))
        counts = self._el_che.batch_counts if self._el_che else [self.anchor]
        assumed = [_with_ms(pace, self.anchor / counts[index]) for index, pace in enumerate(paces)]
        return assumed, float(min(self.anchor, self._probe))

    def _wall_ms(self, times: Sequence[float]) -> float:
        if self._el_che is None:
            return max(SOLO_ROUND_MS, times[0])
        if self._el_che.is_calibrated:
            return min(self.anchor * max(times), self._el_che.anchor_wall_ms)
        return min(self.anchor, self._probe) * max(times)

    def due(self, paces: Sequence[Pace], work: Work) -> bool:
        return False

    def _go_on(self, paces: Sequence[Pace], work: Work, counts: dict[Rank, int]) -> Plan:
        """Leases what the counts need, then some beyond, so that no rank runs dry between rounds."""
        lease = _dealt(paces, counts, work.free_batches)
        beyond = {pace.rank: counts[pace.rank] + self.spare(pace, work) for pace in paces}
        held = [replace(pace, held=pace.held + lease[pace.rank]) for pace in paces]
        more = _dealt(held, beyond, work.free_batches - sum(pace.ratio * lease[pace.rank] for pace in paces))
        ahead: dict[Rank, int] = {}
        free_ahead: float = work.free_ahead
        for pace in paces:
            lease[pace.rank] += more[pace.rank]
            left = math.ceil(free_ahead / pace.ratio)
            ahead[pace.rank] = min(left, max(0, beyond[pace.rank] - pace.held - lease[pace.rank]))
            free_ahead = max(0.0, free_ahead - pace.ratio * ahead[pace.rank])
        leased = {pace.rank: min(counts[pace.rank], pace.held + lease[pace.rank]) for pace in paces}
        counts = within(leased, self._max_batch_diff)
        reason = self._reason(paces, counts)
        return Plan(
            counts=counts, lease_samples=_samples(paces, lease), lease_ahead=_samples(paces, ahead), reason=reason
        )

    def _end_epoch(self, paces: Sequence[Pace], work: Work) -> Plan | None:
        """Leases all that is left; who is done before the others goes on into the next epoch, within its limit.

        None when that would take a rank too far ahead of the others.
        """
        counts = counts_to_finish(paces, work.free_batches)
        if within(counts, self._max_batch_diff) != counts:
            return None
        lease = {pace.rank: max(0, counts[pace.rank] - pace.held) for pace in paces}
        ahead: dict[Rank, int] = {}
        free: float = work.free_ahead
        stream_limit = min(max(2, work.epoch_batches // 100), 5)
        span_ms = max(_finish_ms(pace, counts[pace.rank]) for pace in paces)
        for pace in paces:
            held_ahead = max(0, pace.held - counts[pace.rank])
            fits = max(0, int((span_ms - _finish_ms(pace, counts[pace.rank])) / (pace.ms_per_batch or 1.0)))
            limit = max(stream_limit, math.ceil(work.overlap_ms / (pace.ms_per_batch or 1.0)))
            left = math.ceil(free / pace.ratio)
            ahead[pace.rank] = max(0, min(left, fits + self.spare(pace, work), limit) - held_ahead)
            free = max(0.0, free - pace.ratio * ahead[pace.rank])
            counts[pace.rank] += min(fits, held_ahead + ahead[pace.rank])
        return Plan(
            counts=within(counts, self._max_batch_diff),
            lease_samples=_samples(paces, lease),
            lease_ahead=_samples(paces, ahead),
            is_fixed=True,
            reason=f"{self._reason(paces, counts)}; it ends the epoch",
        )

    def _reason(self, paces: Sequence[Pace], counts: dict[Rank, int]) -> str:
        fewest, most = min(counts.values()), max(counts.values())
        batches = f"{fewest} batches" if fewest == most else f"{fewest} to {most} batches"
        if not self.is_calibrated:
            return f"{batches} each, until the ranks' speeds are measured"
        span_s = max(_finish_ms(pace, counts[pace.rank]) for pace in paces) / 1000
        return f"a round of {span_s:.2f} s: {batches} by rank, so that all arrive together"

    def spare(self, pace: Pace, work: Work) -> int:
        if not self.is_calibrated or pace.ms_per_batch is None:
            return 2
        return ahead_batches(pace.ms_per_batch, work)


class Async(Cadence):
    """A round when every rank has made El Che's count; who is done before the others overshoots (SPEC C1).

    Nobody stops at a target, so the averaging is asked for when it is due, and work is topped up until then. Only the
    last round of an epoch is planned as `Cadence` does, so that all ranks end it together.
    """

    can_revise = False

    def plan(self, paces: Sequence[Pace], work: Work) -> Plan | None:
        if work.open_rounds:
            return None
        timed, wall_ms = self._timed(paces, work)
        if self._left(timed, work, wall_ms)[1] == 1 and (last := self._end_epoch(timed, work)) is not None:
            return last
        counts = self._el_che.batch_counts if self._el_che else [self._solo_count(paces[0])]
        by_rank = {pace.rank: count for pace, count in zip(paces, counts, strict=True)}
        self._due_counts = within(by_rank, self._max_batch_diff)
        plan = self._go_on(timed, work, dict(self._due_counts))
        return replace(plan, is_announced=False, reason=f"when every rank has made its count, {min(counts)} or more")

    def due(self, paces: Sequence[Pace], work: Work) -> bool:
        """Also when all have run dry."""
        return all(pace.made >= min(self._due_counts[pace.rank], pace.held) for pace in paces)

    def _solo_count(self, pace: Pace) -> int:
        return max(1, round(SOLO_ROUND_MS / pace.ms_per_batch)) if pace.ms_per_batch else self.anchor


class Sync:
    """A round after every batch; equal shares; rounds are granted some way ahead (SPEC C1, ROUNDS "sync")."""

    can_revise = False
    stops_ranks = True
    anchor = 1

    def __init__(self) -> None:
        self.is_calibrated = False

    def plan(self, paces: Sequence[Pace], work: Work) -> Plan | None:
        held = [pace.leased for pace in paces]
        shares = [0] * len(paces)
        if not any(held):
            shares = _equal_shares(paces, work.free_samples)
            held = [-(-share // pace.batch_size) for share, pace in zip(shares, paces, strict=True)]
        granted = max(work.granted, max(pace.made for pace in paces) - 1)
        num_rounds = min(SYNC_WINDOW + granted - work.open_rounds, max(held)) - granted
        if work.open_rounds > SYNC_WINDOW // 2 or num_rounds <= 0:
            return None
        return Plan(
            counts={pace.rank: granted + 1 for pace in paces},
            lease_samples={pace.rank: share for pace, share in zip(paces, shares, strict=True)},
            num_rounds=num_rounds,
            reason="after every batch",
        )

    def learn(self, wall_ms: list[float], num_batches: list[int], sync_ms: float, drift: Drift = Drift.CALM) -> None:
        self.is_calibrated |= any(num_batches)

    def revise(self, paces: Sequence[Pace], elapsed_ms: float) -> dict[Rank, int]:
        return {}

    def spare(self, pace: Pace, work: Work) -> int:
        return 0

    def due(self, paces: Sequence[Pace], work: Work) -> bool:
        return False

    def to_json(self) -> dict[str, object]:
        return {}

    def restore(self, state: Mapping[str, Any], like: Sequence[Sequence[int]] | None = None) -> None:
        return


POLICIES = ("cadence", "async", "sync")


def new_policy(settings: Settings, world_size: int) -> Policy:
    """The policy that the user's file names. Raises `ValueError` for an unknown one."""
    match settings.policy:
        case "cadence":
            return Cadence(settings, world_size)
        case "async":
            is_lockstep = settings.max_batch_diff == 0  # in which nobody overshoots
            return Cadence(settings, world_size) if is_lockstep else Async(settings, world_size)
        case "sync":
            return Sync()
        case _:
            raise ValueError(
                f"unknown policy {settings.policy!r}; known are {', '.join(POLICIES[:-1])} and {POLICIES[-1]}"
            )


def within(counts: dict[Rank, int], max_batch_diff: int | None) -> dict[Rank, int]:
    """The counts with none more than so many batches beyond the least, of the ranks that make any."""
    if max_batch_diff is None:
        return counts
    limit = min((count for count in counts.values() if count), default=0) + max_batch_diff
    return {rank: min(count, limit) for rank, count in counts.items()}


def counts_near(paces: Sequence[Pace], horizon_ms: float, *, at_least: int = 0) -> dict[Rank, int]:
    """Batches of each rank in a round that ends near `horizon_ms` from now, with the least time spent waiting.

    Candidates are whole batches of the slowest rank within `STRETCH` of the horizon; the loss of one is the part of
    the ranks' capacity that its rounding leaves idle. `at_least`: batches that each rank makes in any case.
    """
    slowest = max(paces, key=lambda pace: (pace.ms_per_batch or 1.0, -pace.rank))
    slow_ms = slowest.ms_per_batch or 1.0
    middle = max(0.0, horizon_ms - slowest.delay_ms) / slow_ms
    first = max(at_least, 1, math.ceil(middle * (1 - STRETCH)))
    last = max(first, math.floor(middle * (1 + STRETCH)))
    step = max(1, (last - first + 1) // MAX_CANDIDATES)
    scored = []
    for num_batches in range(first, last + 1, step):
        counts = _counts_at(paces, slowest.delay_ms + num_batches * slow_ms, at_least)
        scored.append((_loss(paces, counts), abs(num_batches - middle), counts))
    best = min(loss for loss, _, _ in scored)
    good = [(far, counts) for loss, far, counts in scored if loss <= best + NEARLY_BEST]
    return min(good, key=lambda entry: entry[0])[1]


def counts_to_finish(paces: Sequence[Pace], num_batches: int) -> dict[Rank, int]:
    """Counts that end the epoch when `num_batches` more are dealt out so that the last one is done early.

    A rank that gets more makes them after all that it holds; the others end with what they hold of this epoch.
    """
    low = min(_finish_ms(pace, pace.held) for pace in paces)
    high = max(_finish_ms(pace, pace.held + math.ceil(num_batches / pace.ratio)) for pace in paces)
    for _ in range(50):
        middle = (low + high) / 2
        dealt = sum(pace.ratio * max(0, _fitting(pace, middle) - pace.held) for pace in paces)
        low, high = (middle, high) if dealt <= num_batches else (low, middle)
    more = {pace.rank: max(0, _fitting(pace, low) - pace.held) for pace in paces}
    by_rank = {pace.rank: pace for pace in paces}
    heap = [(_finish_ms(pace, pace.held + more[pace.rank] + 1), pace.rank) for pace in paces]
    heapq.heapify(heap)
    left = num_batches - sum(pace.ratio * more[pace.rank] for pace in paces)
    while left > 1e-9:
        rank = heap[0][1]
        more[rank] += 1
        pace = by_rank[rank]
        left -= pace.ratio
        heapq.heapreplace(heap, (_finish_ms(pace, pace.held + more[rank] + 1), rank))
    return {
        pace.rank: pace.held + more[pace.rank] if more[pace.rank] else max(pace.leased, pace.made) for pace in paces
    }


def ahead_batches(ms_per_batch: float, work: Work) -> int:
    """Batches beyond a round that a rank of this speed makes before it gets new ones."""
    return max(2, math.ceil((AHEAD_MS + OVERLAP_MARGIN * work.overlap_ms) / ms_per_batch))


def arrivals_ms(paces: Sequence[Pace], counts: dict[Rank, int]) -> list[float]:
    """Time from now at which each rank will have made its count."""
    return [max(0.0, _finish_ms(pace, counts[pace.rank])) for pace in paces]


def _samples(paces: Sequence[Pace], num_batches: dict[Rank, int]) -> dict[Rank, int]:
    """Each rank's batches in samples."""
    return {pace.rank: num_batches[pace.rank] * pace.batch_size for pace in paces}


def _equal_shares(paces: Sequence[Pace], num_samples: int) -> list[int]:
    """Samples of which every rank makes equally many batches."""
    if all(pace.ratio == 1 for pace in paces):
        return equal_sizes(len(paces), num_samples)
    total = sum(pace.ratio for pace in paces)
    return ratio_sizes([pace.ratio / total for pace in paces], num_samples)


def _dealt(paces: Sequence[Pace], wanted: dict[Rank, int], free: float) -> dict[Rank, int]:
    """Of the free batches, those that each rank lacks; when they are too few, next to whoever runs dry first."""
    lease = dict.fromkeys(wanted, 0)
    heap = [(_finish_ms(pace, pace.held), pace.rank) for pace in paces if wanted[pace.rank] > pace.held]
    heapq.heapify(heap)
    by_rank = {pace.rank: pace for pace in paces}
    while heap and free > 1e-9:
        _, rank = heap[0]
        pace = by_rank[rank]
        lease[rank] += 1
        free -= pace.ratio
        if pace.held + lease[rank] < wanted[rank]:
            heapq.heapreplace(heap, (_finish_ms(pace, pace.held + lease[rank]), rank))
        else:
            heapq.heappop(heap)
    return lease


def _counts_at(paces: Sequence[Pace], horizon_ms: float, at_least: int) -> dict[Rank, int]:
    counts = {}
    for pace in paces:
        more = int((horizon_ms - pace.delay_ms) / (pace.ms_per_batch or 1.0) + 0.5)
        counts[pace.rank] = pace.made + max(at_least, more, 0)
    return counts


def _loss(paces: Sequence[Pace], counts: dict[Rank, int]) -> float:
    span_ms = max(_finish_ms(pace, counts[pace.rank]) for pace in paces)
    idle = sum((span_ms - _finish_ms(pace, counts[pace.rank])) / (pace.ms_per_batch or 1.0) for pace in paces)
    return idle / sum(span_ms / (pace.ms_per_batch or 1.0) for pace in paces) if span_ms > 0 else 0.0


def _finish_ms(pace: Pace, count: int) -> float:
    return pace.delay_ms + (count - pace.made) * (pace.ms_per_batch or 1.0)


def _elapsed_ms(pace: Pace) -> float:
    """Since the last committed round's snapshot."""
    return pace.made * (pace.ms_per_batch or 1.0) + max(0.0, -pace.delay_ms)


def _fitting(pace: Pace, horizon_ms: float) -> int:
    """Batches, those made included, that are done within the horizon."""
    return pace.made + max(0, math.floor((horizon_ms - pace.delay_ms) / (pace.ms_per_batch or 1.0) + 1e-9))


def _with_ms(pace: Pace, ms_per_batch: float) -> Pace:
    return replace(pace, ms_per_batch=ms_per_batch, made=0, delay_ms=0.0)


def _new_el_che(settings: Settings, world_size: int) -> ElChe:
    hint = settings.speed_hint
    return ElChe(
        world_size,
        settings.anchor,
        overhead_target=settings.overhead_target,
        max_anchor=settings.max_anchor,
        max_batch_diff=settings.max_batch_diff,
        speed_ratio=hint if hint and hint[0] < world_size else None,
    )


def likenesses(then: Sequence[str], now: Sequence[str]) -> list[list[int]]:
    """Which rank of a training each rank goes on as: one with its device, by number where it can be; a newcomer is like
    all with its kind of device, or, without any, like nobody in particular.
    """
    left = dict(enumerate(then))
    found: list[list[int]] = [[] for _ in now]
    for rank, device in enumerate(now):
        if left.get(rank) == device:
            found[rank] = [rank]
            del left[rank]
    for kind in (lambda device: device, _kind):
        for rank, device in enumerate(now):
            first = next((old for old, other in left.items() if kind(other) == kind(device)), None)
            if not found[rank] and first is not None:
                found[rank] = [first]
                del left[first]
    for rank, device in enumerate(now):
        found[rank] = found[rank] or [old for old, other in enumerate(then) if _kind(other) == _kind(device)]
    return found


def _kind(device: str) -> str:
    """The device without its number on the host."""
    first, _, model = device.partition(" ")
    return f"{first.partition(':')[0]} {model}"
