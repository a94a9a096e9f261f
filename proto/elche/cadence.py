"""El Che, the cadence: numbers of batches of each rank between averagings with which all arrive together."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Self

from elche.partition import round_half_away

_MIN_WEIGHT, _MAX_WEIGHT = 0.1, 0.8
"""Bounds of the weight of a new measurement, which is its relative error: small deviations move the mean slowly, large
ones almost at once (row E3). Single slow batches are clipped elsewhere, for pacing: `RankRecord.on_batches`."""

_SAME_SPEED_MS = 1e-6
_DEAD_ZONE_FRACTION = 0.10
_MIN_OVERHEAD, _MAX_OVERHEAD = 0.01, 0.50
_MIN_NUDGE, _MAX_NUDGE = 0.1, 1.0
_MAX_COUNT = 2**53
"""Upper limit of a count, for extreme speed ratios: the largest integer that JSON represents exactly."""


@dataclass(slots=True, kw_only=True)
class _Rank:
    """One rank: its batches per round and its speed. 0 ms per batch = not measured yet."""

    num_batches: int
    ms_per_batch: float = 0.0

    def learn(self, measured_ms: float) -> None:
        """Moves the mean towards a measurement, with a weight that grows with the error; the first one replaces it."""
        if self.ms_per_batch > 0:
            error_fraction = abs(measured_ms - self.ms_per_batch) / self.ms_per_batch
            weight = _clamp(error_fraction, _MIN_WEIGHT, _MAX_WEIGHT)
            measured_ms = weight * measured_ms + (1 - weight) * self.ms_per_batch
        self.ms_per_batch = measured_ms

    def fair_count(self, anchor: int, slow_ms: float) -> int:
        """Batches that this rank trains while the slowest one trains `anchor`."""
        if self.ms_per_batch <= 0 or abs(self.ms_per_batch - slow_ms) < _SAME_SPEED_MS:
            return anchor
        return _scaled_count(anchor, slow_ms / self.ms_per_batch)

    def move_to(self, wanted: int, max_step: int | None) -> None:
        """Moves the count to `wanted`, by at most `max_step` batches, if it differs by more than 10 %."""
        if abs(wanted - self.num_batches) <= self.num_batches * _DEAD_ZONE_FRACTION:
            return
        if max_step is not None:
            wanted = max(self.num_batches - max_step, min(wanted, self.num_batches + max_step))
        self.num_batches = wanted


class ElChe:
    """The slowest rank sets the pace: it trains `anchor` batches per round, faster ones proportionally more.

    Counts are equal, or follow `speed_ratio`, until the first `report_timing`; from then on they follow
    the measured speeds, and the anchor follows the cost of averaging. A refused call changes nothing.

    world_size: ranks, at least 2. anchor: first batch count of the slow rank, and the least that tuning
    returns to. overhead_target: averaging time as a fraction of the time for batches, clamped to [0.01, 0.5].
    max_anchor: the anchor's upper limit in batches, at least 1; below `anchor` it lowers both anchor and
    floor. max_count_change: the largest change of a count at once, in batches (None = no limit, 0 =
    frozen after the first measurement). speed_ratio: `(slow_rank, how many times faster the others are)`.

    Raises ValueError for arguments outside these ranges or not finite. Source: rows E1-E9.
    """

    def __init__(
        self,
        world_size: int,
        anchor: int,
        *,
        overhead_target: float = 0.10,
        max_anchor: int = 200,
        max_count_change: int | None = None,
        speed_ratio: tuple[int, float] | None = None,
    ) -> None:
        _check_whole("world_size", world_size, least=2)
        _check_whole("anchor", anchor, least=1)
        _check_whole("max_anchor", max_anchor, least=0)
        _check_finite("overhead_target", overhead_target)
        if max_count_change is not None:
            _check_whole("max_count_change", max_count_change, least=0)
        self._overhead_target = _clamp(overhead_target, _MIN_OVERHEAD, _MAX_OVERHEAD)
        self._max_anchor = max(max_anchor, 1)
        self._floor_anchor = self._anchor = min(anchor, self._max_anchor)
        self._max_count_change = max_count_change
        self._take(_Rank(num_batches=anchor) for _ in range(world_size))
        if speed_ratio is not None:
            self._guess_counts(*speed_ratio)

    @property
    def batch_counts(self) -> list[int]:
        """Batches per rank until the next averaging; a copy, in rank order."""
        return [rank.num_batches for rank in self._ranks]

    @property
    def anchor(self) -> int:
        """Batches that the slowest rank trains per round."""
        return self._anchor

    @property
    def anchor_wall_ms(self) -> float:
        """Time per round in ms that all ranks aim at: that of the slowest one's anchor. 0 until calibrated."""
        return self._anchor * self._slow_ms

    @property
    def is_calibrated(self) -> bool:
        """True if any rank has been measured."""
        return self._is_calibrated

    @property
    def ms_per_batch(self) -> list[float]:
        """Smoothed time per batch of each rank in ms, 0 where not measured; a copy, in rank order."""
        return [rank.ms_per_batch for rank in self._ranks]

    def report_timing(self, wall_ms: Sequence[float], actual_batches: Sequence[int], sync_ms: float) -> None:
        """Learns from one finished round: first the speeds, then the anchor, then the counts.

        wall_ms: each rank's time for its batches in ms, including the waits for their data. actual_batches:
        the batches of each rank in that time, which may exceed its count; missing ones are 0. sync_ms: time of
        the averaging in ms. A rank with no batches or no time keeps its speed. Raises ValueError, with nothing
        learnt, for a wrong length of `wall_ms`, for times that are not finite and for negative batches. Source:
        rows E3-E5.
        """
        self._check_report(wall_ms, actual_batches, sync_ms)
        was_calibrated = self.is_calibrated
        for rank, wall, num_batches in zip(self._ranks, wall_ms, actual_batches, strict=False):
            if num_batches > 0 and wall > 0:
                rank.learn(wall / num_batches)
        self._take(self._ranks)
        if not self.is_calibrated:
            return
        self._tune_anchor(max(wall_ms), sync_ms)
        if was_calibrated:
            self._follow_speeds()
        else:
            self._calibrate_counts()

    def nudge_anchor_down(self, factor: float) -> None:
        """Averages more often because the replicas diverge: multiplies the anchor by `factor`.

        The factor is clamped to [0.1, 1]. The anchor may fall below its floor but not below 1; only the cost of
        averaging raises it again. Raises ValueError for a factor that is not finite. Row E6.
        """
        _check_finite("factor", factor)
        self._anchor = max(math.ceil(self._anchor * _clamp(factor, _MIN_NUDGE, _MAX_NUDGE)), 1)
        if self.is_calibrated:
            self._follow_speeds()

    def with_ranks(self, like: Sequence[Sequence[int]]) -> Self:
        """The cadence for another set of ranks. `like` has, for each new rank, the old ranks that it resembles. With
        one it takes over its speed, with several or none it begins with the median time per batch of these, or of all.

        Raises ValueError for fewer than two ranks, and for a rank outside the world. Source: row E10.
        """
        for rank in (rank for ranks in like for rank in ranks):
            self._check_rank("like", rank)
        other = type(self)(
            len(like),
            self._floor_anchor,
            overhead_target=self._overhead_target,
            max_anchor=self._max_anchor,
            max_count_change=self._max_count_change,
        )
        other._anchor = self._anchor
        other._take(self._successor(ranks) for ranks in like)
        return other

    def _successor(self, ranks: Sequence[int]) -> _Rank:
        if len(ranks) == 1:
            return replace(self._ranks[ranks[0]])
        of = [self._ranks[rank].ms_per_batch for rank in ranks]
        known = [ms for ms in of or self.ms_per_batch if ms > 0]
        new = _Rank(num_batches=self._anchor, ms_per_batch=median(known) if known else 0.0)
        new.num_batches = new.fair_count(self._anchor, self._slow_ms)
        return new

    def to_json(self) -> dict[str, object]:
        """All state as plain values; `from_json` restores it exactly, floats to the last bit."""
        return {
            "anchor": self._anchor,
            "floor_anchor": self._floor_anchor,
            "max_anchor": self._max_anchor,
            "overhead_target": self._overhead_target,
            "max_batch_diff": self._max_count_change,  # the key's older name, which checkpoints have
            "ranks": [{"num_batches": r.num_batches, "ms_per_batch": r.ms_per_batch} for r in self._ranks],
        }

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> Self:
        """The cadence that `to_json` wrote. Raises ValueError for missing fields and impossible values."""
        try:
            ranks = [_restored_rank(**fields) for fields in state["ranks"]]
            cadence = cls(
                len(ranks),
                state["floor_anchor"],
                overhead_target=state["overhead_target"],
                max_anchor=state["max_anchor"],
                max_count_change=state["max_batch_diff"],
            )
            cadence._restore(state["anchor"], ranks)
        except (KeyError, TypeError) as error:
            raise ValueError(f"not the state of a cadence ({error!r}): {state!r}") from error
        return cadence

    @property
    def _slow_ms(self) -> float:
        return max(rank.ms_per_batch for rank in self._ranks)

    def _restore(self, anchor: int, ranks: list[_Rank]) -> None:
        _check_whole("anchor", anchor, least=1)
        if anchor > self._max_anchor:
            raise ValueError(f"anchor is {anchor!r}; it cannot exceed max_anchor, {self._max_anchor!r}")
        self._anchor = anchor
        self._take(ranks)

    def _take(self, ranks: Iterable[_Rank]) -> None:
        self._ranks = list(ranks)
        self._is_calibrated = any(rank.ms_per_batch > 0 for rank in self._ranks)

    def _guess_counts(self, slow_rank: int, ratio: float) -> None:
        self._check_rank("slow_rank", slow_rank)
        _check_finite("ratio", ratio)
        for rank in self._ranks:
            rank.num_batches = _scaled_count(self._anchor, max(ratio, 1.0))
        self._ranks[slow_rank].num_batches = self._anchor

    def _tune_anchor(self, wall_ms: float, sync_ms: float) -> None:
        """Raises the anchor at once when averaging costs too much, lowers it by one when it costs little (row E4)."""
        if sync_ms <= 0 or wall_ms <= 0:
            return
        overhead = sync_ms / wall_ms
        if overhead > self._overhead_target:
            wanted = min(self._anchor * (overhead / self._overhead_target), float(self._max_anchor))
            self._anchor = max(math.ceil(wanted), self._floor_anchor)
        elif overhead < self._overhead_target * 0.5 and self._anchor > self._floor_anchor:
            self._anchor -= 1

    def _calibrate_counts(self) -> None:
        slow_ms = self._slow_ms
        for rank in self._ranks:
            rank.num_batches = rank.fair_count(self._anchor, slow_ms)

    def _follow_speeds(self) -> None:
        slow_ms = self._slow_ms
        for rank in self._ranks:
            rank.move_to(rank.fair_count(self._anchor, slow_ms), self._max_count_change)

    def _check_rank(self, name: str, rank: int) -> None:
        if not 0 <= rank < len(self._ranks):
            raise ValueError(f"{name} is {rank!r}; the world has ranks 0 to {len(self._ranks) - 1}")

    def _check_report(self, wall_ms: Sequence[float], actual_batches: Sequence[int], sync_ms: float) -> None:
        if len(wall_ms) != len(self._ranks):
            raise ValueError(f"wall_ms has {len(wall_ms)} times; the world has {len(self._ranks)} ranks")
        for rank, wall in enumerate(wall_ms):
            _check_finite(f"wall_ms of rank {rank}", wall)
        for rank, num_batches in enumerate(actual_batches):
            _check_whole(f"actual_batches of rank {rank}", num_batches, least=0)
        _check_finite("sync_ms", sync_ms)


def _scaled_count(anchor: int, ratio: float) -> int:
    return max(round_half_away(min(anchor * ratio, float(_MAX_COUNT))), 1)


def _restored_rank(*, num_batches: int, ms_per_batch: float) -> _Rank:
    _check_whole("num_batches", num_batches, least=1)
    _check_finite("ms_per_batch", ms_per_batch)
    if ms_per_batch < 0:
        raise ValueError(f"ms_per_batch is {ms_per_batch!r}; it must be at least 0")
    return _Rank(num_batches=num_batches, ms_per_batch=ms_per_batch)


def _clamp(value: float, least: float, most: float) -> float:
    return min(max(value, least), most)


def clamped_counts(counts: Sequence[int], max_total: int) -> list[int]:
    """Counts per rank that fit into `max_total` batches, for the end of an epoch.

    Proportional, at least 1 each: with fewer batches than ranks all are 1, and the sum exceeds `max_total`. Raises
    ValueError when that is negative. Source: row E7.
    """
    _check_whole("max_total", max_total, least=0)
    if sum(counts) <= max_total:
        return list(counts)
    scale = max_total / sum(counts)
    clamped = [max(math.floor(count * scale), 1) for count in counts]
    remainder = max(max_total - sum(clamped), 0)
    return [count + (rank < remainder) for rank, count in enumerate(clamped)]


def _check_whole(name: str, value: int, *, least: int) -> None:
    if not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is {value!r}; it must be a whole number of at least {least}")


def _check_finite(name: str, value: float) -> None:
    if not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}; it must be a finite number")
