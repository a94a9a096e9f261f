"""Plans which samples of an epoch each rank trains in each step; all ranks compute the same plan independently.

Where loaders fetch ahead, measurements of a step take effect `delay` steps later, on all ranks at once.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from elche.balance import hinted_ratios, rebalanced_ratios, shard_sizes
from elche.cadence import ElChe, clamped_counts
from elche.errors import Misuse
from elche.partition import ranks_by_share
from elche.sums import added
from elche_worker.trainer.config import ANCHOR, MAX_ANCHOR, OVERHEAD_TARGET, TrainerConfig

CALIBRATION_STEPS = 10
"""Steps after which shares follow measured speeds for the first time."""
REBALANCE_STEPS = 50
"""Steps between two changes of the shares."""
LEAST_STEPS = 20
"""Fewest optimizer steps in an epoch when El Che chooses the anchor."""
THROUGHPUT_WEIGHT = 0.3
"""Weight of a new measurement in the moving mean (row G2)."""

Value = TypeVar("Value")
Part = tuple[int, int]
"""(start, size) in the epoch's order."""


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step of all ranks."""

    index: int
    """Number of steps before it."""
    parts: tuple[tuple[Part, ...], ...]
    """Each rank's batches."""
    members: tuple[int, ...]
    """The numbers of these ranks: their ranks at the start, which do not change when others die."""

    @property
    def samples(self) -> list[int]:
        """Number of samples of each rank."""
        return [sum(size for _, size in parts) for parts in self.parts]

    @property
    def batches(self) -> list[int]:
        """Number of batches of each rank."""
        return [len(parts) for parts in self.parts]

    def with_next(self, step: "Step") -> "Step":
        """This step and the next as one, for gradients that are accumulated over both."""
        parts = tuple((*own, *more) for own, more in zip(self.parts, step.parts, strict=True))
        return Step(step.index, parts, self.members)

    def of(self, number: int) -> tuple[Part, ...]:
        """The parts of the rank with this number."""
        return self.parts[self.members.index(number)]

    def own(self, number: int) -> tuple[Part, ...]:
        """The parts that a rank computes: its own, or, if it has none, another rank's first part, which then does not
        count. Every rank gets a batch, since the loop may call collectives of its own, which every rank must reach.
        """
        return self.of(number) or next(parts for parts in self.parts if parts)[:1]

    def among(self, members: Sequence[int]) -> "Step":
        """The step with the parts of these ranks only."""
        return Step(self.index, tuple(self.of(number) for number in members), tuple(members))

    def without(self, members: Sequence[int]) -> list[Part]:
        """The parts of all other ranks."""
        return [part for number in self.members if number not in members for part in self.of(number)]


class Planner(ABC):
    """Splits the samples of each step among ranks: `Balance` or `CadencePlan`.

    Every rank has one and computes the same steps, without a message: each decision follows from numbers that all ranks
    have exchanged, and takes effect at the same step everywhere. Otherwise ranks would train samples twice, or never.
    """

    def __init__(self, world_size: int, config: TrainerConfig, num_done: int = 0) -> None:
        self.delay = 0
        """Steps that loaders may fetch ahead. A decision takes effect as many steps later, since those are fetched."""
        self.members = tuple(range(world_size))
        """The numbers of the ranks that it plans for."""
        self._num_done = num_done
        hint = config.speed_hint
        self._ratios = [1 / world_size] * world_size if hint is None else _hinted(world_size, hint)

    @property
    def ratios(self) -> list[float]:
        """Each rank's share of a batch; sum 1."""
        return list(self._ratios)

    @property
    @abstractmethod
    def throughput(self) -> list[float]:
        """Samples per ms of each rank; 0 where not measured."""

    @abstractmethod
    def steps(self, num_samples: int, batch_size: int, start: int) -> Iterator[Step]:
        """Yields the steps of an epoch from sample `start` on, each computed when it is needed."""

    @abstractmethod
    def measure(self, step: Step, timed: Sequence[tuple[int, float]], sync_ms: float) -> list[float] | None:
        """Records this rank's times: `timed` are (samples, ms) of batches that have ended since the last step,
        `sync_ms` is the time of the last averaging. Returns numbers that all ranks exchange now, or None.
        """

    @abstractmethod
    def learn(self, step: Step, measured: Sequence[Sequence[float]]) -> None:
        """Updates the plan by the numbers that the ranks have exchanged, one sequence per rank."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """The learnt state."""

    @abstractmethod
    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores the state of `to_json`; ignores one of another number of ranks."""

    def fit(self, num_batches: int) -> None:  # noqa: B027  # `Balance` has no limits
        """Adapts limits to the number of batches in an epoch."""

    @abstractmethod
    def keep(self, members: Sequence[int]) -> "Planner":
        """Returns a planner for the remaining ranks, by number."""


class Decisions(Generic[Value]):
    """The values of one setting, each with the step from which it is in effect."""

    def __init__(self, first: Value) -> None:
        self._values: list[tuple[int, Value]] = [(0, first)]

    def decide(self, from_step: int, value: Value, num_done: int) -> None:
        """Adds a value that takes effect at `from_step`. Values that no step from `num_done` on uses are dropped; later
        ones stay, since an epoch that is left early is planned again from there.
        """
        self._values.append((from_step, value))
        while len(self._values) > 1 and self._values[1][0] <= num_done:
            self._values.pop(0)

    def at(self, step: int) -> Value:
        """The value in effect at a step."""
        return next(value for from_step, value in reversed(self._values) if from_step <= step)


class Balance(Planner):
    """Splits every batch among all ranks in proportion to their speed (row G2)."""

    def __init__(self, rank: int, world_size: int, config: TrainerConfig, *, num_done: int = 0) -> None:
        super().__init__(world_size, config, num_done)
        self.least = 1
        """Least samples of each rank, where a batch has enough."""
        self._rank = rank
        self._own_throughput = 0.0
        self._throughput = [0.0] * world_size
        self._decided = Decisions(self._ratios)

    def steps(self, num_samples: int, batch_size: int, start: int) -> Iterator[Step]:
        index = self._num_done
        for batch_start in range(start, num_samples, batch_size):
            sizes = shard_sizes(self._decided.at(index), min(batch_size, num_samples - batch_start), self.least)
            starts = [batch_start + sum(sizes[:rank]) for rank in range(len(sizes))]
            parts = (((at, size),) if size else () for at, size in zip(starts, sizes, strict=True))
            yield Step(index, tuple(parts), self.members)
            index += 1

    def measure(self, step: Step, timed: Sequence[tuple[int, float]], sync_ms: float) -> list[float] | None:
        # Together: a loop that takes several batches before it trains them trains all in the time of the last one.
        size, compute_ms = sum(size for size, _ in timed), added(ms for size, ms in timed if size)
        if size and compute_ms > 0:
            measured, old = size / compute_ms, self._own_throughput
            self._own_throughput = old + THROUGHPUT_WEIGHT * (measured - old) if old else measured
        self._num_done = step.index + 1
        # By the number of steps, not by time: all ranks must exchange in the same step, or some would wait forever.
        since_calibration = self._num_done - CALIBRATION_STEPS
        is_due = since_calibration >= 0 and since_calibration % REBALANCE_STEPS == 0
        return [self._own_throughput] if is_due else None

    def learn(self, step: Step, measured: Sequence[Sequence[float]]) -> None:
        self._throughput = [throughput for (throughput,) in measured]
        self._ratios = rebalanced_ratios(self._throughput, self._ratios)
        self._decided.decide(self._num_done + self.delay, self._ratios, self._num_done)

    def keep(self, members: Sequence[int]) -> "Balance":
        kept = [self.members.index(number) for number in members]
        self._rank = members.index(self.members[self._rank])
        self.members = tuple(members)
        self._throughput = [self._throughput[at] for at in kept]
        self._ratios = part_of(self._ratios, kept)
        self._decided = Decisions(self._ratios)
        return self

    def to_json(self) -> dict[str, Any]:
        return {"ratios": list(self._ratios), "throughput": list(self._throughput)}

    def restore(self, state: Mapping[str, Any]) -> None:
        if len(state.get("ratios", ())) == len(self._ratios):
            self._ratios, self._throughput = list(state["ratios"]), list(state["throughput"])
            self._own_throughput = self._throughput[self._rank]
            self._num_done = CALIBRATION_STEPS if any(self._throughput) else 0
            self._decided = Decisions(self._ratios)

    @property
    def throughput(self) -> list[float]:
        return list(self._throughput)


class CadencePlan(Planner):
    """Each rank trains the number of whole batches per step that El Che gives it (row G4)."""

    def __init__(self, world_size: int, config: TrainerConfig) -> None:
        super().__init__(world_size, config)
        self._world_size = world_size
        self._config = config
        self.el_che = self._new_el_che(MAX_ANCHOR if config.max_anchor is None else config.max_anchor)
        self._batch_size = 0
        self._most_batches = sys.maxsize
        """Most batches of all ranks in a step."""
        self._decided = Decisions(self.batch_counts)

    @property
    def batch_counts(self) -> list[int]:
        """Batches of each rank per step."""
        counts = clamped_counts(self.el_che.batch_counts, self._most_batches)
        # At least 1 of each rank may be too many together: the fastest gives them up.
        while sum(counts) > max(self._most_batches, self._world_size):
            counts[counts.index(max(counts))] -= 1
        return counts

    def _new_el_che(self, max_anchor: int) -> ElChe:
        config = self._config
        try:
            return ElChe(
                self._world_size,
                min(ANCHOR if config.anchor is None else config.anchor, max_anchor),
                overhead_target=OVERHEAD_TARGET if config.overhead_target is None else config.overhead_target,
                max_anchor=max_anchor,
                speed_ratio=config.speed_hint,
            )
        except ValueError as error:
            raise Misuse(f"TrainerConfig: {error}") from None

    def steps(self, num_samples: int, batch_size: int, start: int) -> Iterator[Step]:
        self._batch_size = batch_size
        index, at = self._num_done, start
        while at < num_samples:
            num_left = -(-(num_samples - at) // batch_size)
            parts: list[tuple[Part, ...]] = []
            for count in _fitting(self._decided.at(index), num_left):
                starts = range(at, min(at + count * batch_size, num_samples), batch_size)
                parts.append(tuple((one, min(batch_size, num_samples - one)) for one in starts))
                at += sum(size for _, size in parts[-1])
            yield Step(index, tuple(parts), self.members)
            index += 1

    def measure(self, step: Step, timed: Sequence[tuple[int, float]], sync_ms: float) -> list[float] | None:
        self._num_done = step.index + 1
        # Batches of size 0 only stand in where this rank has none: they are not its work.
        return [added(ms for size, ms in timed if size), sync_ms]

    def learn(self, step: Step, measured: Sequence[Sequence[float]]) -> None:
        # Ranks measure different times, as early ones wait for late ones; a common number keeps all plans equal.
        sync_ms = max(sync for _, sync in measured)
        self.el_che.report_timing([compute for compute, _ in measured], step.batches, sync_ms)
        self._decided.decide(self._num_done + self.delay, self.batch_counts, self._num_done)

    def fit(self, num_batches: int) -> None:
        """Limits steps so that an epoch has at least `LEAST_STEPS` of them, unless the config sets a limit. Averaging a
        small model costs more than its batches: without a limit the anchor would grow until an epoch is a few steps.
        """
        if self._config.max_anchor is None:
            # Of the batches of all ranks, too: a rank that is ten times as fast makes ten times the anchor.
            self._most_batches = num_batches // LEAST_STEPS
            most = max(1, min(MAX_ANCHOR, num_batches // (LEAST_STEPS * self._world_size)))
            if self.el_che.is_calibrated:  # restored from a checkpoint: its measured speeds are kept
                state = self.el_che.to_json()
                least = {name: min(int(str(state[name])), most) for name in ("anchor", "floor_anchor")}
                self.el_che = ElChe.from_json({**state, **least, "max_anchor": most})
            else:
                self.el_che = self._new_el_che(most)
            self._decided = Decisions(self.batch_counts)

    def keep(self, members: Sequence[int]) -> Planner:
        if len(members) == 1:  # a single rank averages nothing: a step after every batch
            alone = Balance(0, 1, replace(self._config, speed_hint=None), num_done=self._num_done)
            alone.members, alone.delay = tuple(members), self.delay
            return alone
        kept = [self.members.index(number) for number in members]
        self.el_che = self.el_che.with_ranks([[at] for at in kept])
        self.members = tuple(members)
        self._world_size = len(members)
        self._ratios = part_of(self._ratios, kept)
        self._decided = Decisions(self.batch_counts)
        return self

    def to_json(self) -> dict[str, Any]:
        return {"el_che": self.el_che.to_json()}

    def restore(self, state: Mapping[str, Any]) -> None:
        if len(state.get("el_che", {}).get("ranks", ())) == len(self._ratios):
            self.el_che = ElChe.from_json(state["el_che"])
            self._decided = Decisions(self.batch_counts)

    @property
    def throughput(self) -> list[float]:
        return [self._batch_size / ms if ms else 0.0 for ms in self.el_che.ms_per_batch]


def _fitting(counts: list[int], num_left: int) -> list[int]:
    """The counts, reduced to the batches left; the fastest ranks come first if there are fewer batches than ranks."""
    if num_left >= len(counts):
        return clamped_counts(counts, num_left)
    served = ranks_by_share(counts)[:num_left]
    return [int(rank in served) for rank in range(len(counts))]


def part_of(ratios: Sequence[float], kept: Sequence[int]) -> list[float]:
    """The ratios at the indices `kept`, scaled to sum 1."""
    total = added(ratios[at] for at in kept)
    return [ratios[at] / total if total else 1 / len(kept) for at in kept]


def _hinted(world_size: int, hint: tuple[int, float]) -> list[float]:
    try:
        return hinted_ratios(world_size, *hint)
    except ValueError as error:
        raise Misuse(f"TrainerConfig: speed_hint: {error}") from None
