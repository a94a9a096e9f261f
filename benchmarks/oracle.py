"""How much of what is possible the ranks of simulated jobs train, and what has cost the rest.

The oracle knows each rank's speed at each moment: its work is the sum, over ranks, of the integral of speed from the
job's first commit to its last. What the defaults do not reach is told by cause, in percent of the oracle's work:

- `round`: a rank waits for the result of a round
- `no work`: it has no batches, and there are some
- `limit`: it has batches that it may not begin before a round
- `end`: nothing is left for it to train, and others are not ready
- `luck`: its batches were shorter (then it is negative) or longer than its speed says, and those that were under way at
  the first and last commit

    python benchmarks/oracle.py [PART OF A NAME]          # three minutes of one core
"""

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any

from elche.settings import BLOCKING_ANCHOR, OVERLAPPED_ANCHOR, AgreedSettings
from elche_coordinator.simulator.simulation import RankModel, Simulation
from elche_coordinator.simulator.synthetic import SyntheticRank

BATCH_SIZE = 10
CAUSES = ("round", "no work", "limit", "end", "luck")

Trace = tuple[str, list[RankModel], dict[str, Any]]


def geometric(count: int, fast_ms: float, times: float, **more: Any) -> list[RankModel]:
    """Ranks of which each is slower than the one before by the same factor, the last `times` slower than the first."""
    return [RankModel(batch_ms=fast_ms * times ** (number / (count - 1)), **more) for number in range(count)]


def steps(*times_ms: float, every_s: float) -> tuple[tuple[float, float], ...]:
    """Another time for a batch each `every_s`."""
    return tuple((every_s * number, ms) for number, ms in enumerate(times_ms, 1))


def traces() -> Iterator[Trace]:
    """Name, ranks and options of each job. Batches have ten samples; a job takes one to three minutes of its time."""
    long = {"dataset_size": 60_000, "epochs": 1}
    yield "20 and 46 ms", geometric(2, 20, 2.3), long
    yield "20 and 80 ms", geometric(2, 20, 4), long
    yield "20 and 160 ms", geometric(2, 20, 8), long
    yield "20 and 400 ms", geometric(2, 20, 20), long
    yield "8 ranks from 1 to 8", geometric(8, 40, 8), long
    yield "8 ranks from 1 to 20", geometric(8, 40, 20), long
    yield "64 ranks from 1 to 4, jitter 10 %", geometric(64, 100, 4, jitter_fraction=0.1), long
    yield "jitter 10 %", geometric(2, 20, 2.3, jitter_fraction=0.1), long
    yield "jitter 30 %", geometric(2, 20, 2.3, jitter_fraction=0.3), long
    yield "heavy tail: one in 20 ten times as long", geometric(2, 20, 2.3, tail=(0.05, 10.0)), long
    yield "bimodal: each second batch, by chance, three times as long", geometric(2, 20, 2.3, tail=(0.5, 3.0)), long
    swap = [RankModel(batch_ms=20, changes=((25.0, 46.0),)), RankModel(batch_ms=46, changes=((25.0, 20.0),))]
    yield "swap: the fast one becomes the slow one", swap, long
    swaps = [
        RankModel(batch_ms=20, changes=steps(*[46, 20] * 6, every_s=8.0)),
        RankModel(batch_ms=46, changes=steps(*[20, 46] * 6, every_s=8.0)),
    ]
    yield "swaps each 8 s", swaps, long
    drift = [RankModel(batch_ms=20), RankModel(batch_ms=30, changes=steps(*range(32, 80, 2), every_s=3.0))]
    yield "drift: 30 to 78 ms", drift, long
    stall = [RankModel(batch_ms=20), RankModel(batch_ms=46, changes=((20.0, 3000.0), (22.9, 46.0)))]
    yield "a stall of 3 s", stall, long
    stalls = tuple(change for at_s in range(10, 90, 10) for change in ((at_s, 1000.0), (at_s + 0.9, 46.0)))
    yield "stalls of 1 s, each 10 s", [RankModel(batch_ms=20), RankModel(batch_ms=46, changes=stalls)], long
    yield "slow start: three batches of 2 s", geometric(2, 20, 2.3, first_ms=(2000.0,) * 3), long
    yield "averaging takes 500 ms", geometric(2, 20, 2.3), {**long, "sync_ms": 500.0}
    yield "2 and 4.6 ms, coordinator 15 ms away", geometric(2, 2, 2.3), {**long, "latency_ms": 15.0}
    yield "a job of 100 batches of 25 and 57.5 ms", geometric(2, 25, 2.3), {"dataset_size": 1000, "epochs": 1}
    yield "epochs of 23 batches", geometric(2, 20, 2.3), {"dataset_size": 230, "epochs": 150}


class WatchedRank(SyntheticRank):
    """A rank that notes when it is idle, and why."""

    def __init__(self, *positional: Any, **options: Any) -> None:
        super().__init__(*positional, **options)
        self.idle: list[tuple[float, float, str]] = []
        """From, to (in seconds), and the cause."""
        self._cause = ""

    def _go_on(self) -> None:
        super()._go_on()
        if self._idle_since_s is not None:
            self._cause = "no work" if not self._leases else "round" if self._is_averaging else "limit"

    def _end_idling(self) -> None:
        if self._idle_since_s is not None:
            self.idle.append((self._idle_since_s, self.clock.now_s, self._cause))
        super()._end_idling()

    def _take_stall_s(self, entry: Any) -> float:
        if not self._overlaps:
            self.idle.append((entry.entered_s, self.clock.now_s, "round"))
        return super()._take_stall_s(entry)


@dataclass
class Account:
    """What a job's ranks have trained and missed, in samples."""

    possible: float = 0.0
    trained: float = 0.0
    missed: Counter[str] = field(default_factory=Counter)

    @property
    def fraction(self) -> float:
        return self.trained / self.possible

    def percent(self, cause: str) -> float:
        """Work that was missed for this cause, of all that was possible."""
        missed = self.possible - self.trained - self.missed.total() if cause == "luck" else self.missed[cause]
        return 100 * missed / self.possible


def speed(model: RankModel, from_s: float, to_s: float) -> float:
    """Samples that a rank makes between two times, if it never waits and its batches take as long as on average."""
    mean = 1 + model.tail[0] * (model.tail[1] - 1)
    edges = [from_s, *(at_s for at_s, _ in model.changes if from_s < at_s < to_s), to_s]
    return sum(BATCH_SIZE * 1000 * (end - begin) / (mean * model.ms_at(begin)) for begin, end in pairwise(edges))


def account(simulation: Simulation) -> Account:
    """Runs a job, and accounts for the time of its ranks from the first commit to the last."""
    began_s = ended_s = 0.0

    def is_over() -> bool:
        nonlocal began_s, ended_s
        training = simulation.job.run.training
        if training is not None and training.started is not None:
            began_s = began_s or training.started.at_s
            ended_s = ended_s or (simulation.clock.now_s if training.is_complete else 0.0)
        return simulation.job.result is not None

    simulation.run_until(is_over)
    settings = simulation.settings
    found = Account(trained=settings.dataset_size * settings.epochs)
    for rank, process in simulation.processes.items():
        assert isinstance(process, WatchedRank)
        model = simulation.ranks[rank]
        found.possible += speed(model, began_s, ended_s)
        idle = [(max(one, began_s), min(other, ended_s), cause) for one, other, cause in process.idle]
        idle = [piece for piece in idle if piece[0] < piece[1]]
        last = idle[-1] if idle else None
        for piece in idle:
            is_end = piece is last and piece[2] == "no work" and piece[1] == ended_s
            found.missed["end" if is_end else piece[2]] += speed(model, piece[0], piece[1])
        if process._idle_since_s is not None and process._idle_since_s < ended_s:
            found.missed["end"] += speed(model, max(process._idle_since_s, began_s), ended_s)
    return found


def simulation(models: list[RankModel], options: dict[str, Any], averaging: str, **more: Any) -> Simulation:
    """A job with the defaults of such an averaging."""
    settings: dict[str, Any] = {
        "batch_size": BATCH_SIZE,
        "policy": "cadence",
        "averaging": averaging,
        "anchor": OVERLAPPED_ANCHOR if averaging == "overlapped" else BLOCKING_ANCHOR,
        "checkpoint_every_minutes": None,
    }
    settings |= {name: value for name, value in options.items() if name in _names()}
    rest = {name: value for name, value in options.items() if name not in _names()}
    agreed = AgreedSettings(**settings)
    return Simulation(settings=agreed, ranks=models, check=False, **rest, **more)


@cache
def _names() -> frozenset[str]:
    return frozenset(AgreedSettings.__dataclass_fields__)


def main() -> None:
    """Prints a row for each trace whose name has the argument in it."""
    print("| ranks | averaging | of the oracle |", " | ".join(CAUSES), "|")
    print("|---" * (3 + len(CAUSES)) + "|")
    for name, models, options in traces():
        if not all(part in name for part in sys.argv[1:]):
            continue
        for averaging in ("overlapped", "blocking"):
            found = account(simulation(models, options, averaging, new_rank=WatchedRank))
            causes = " | ".join(f"{found.percent(cause):.1f}" for cause in CAUSES)
            print(f"| {name} | {averaging} | {100 * found.fraction:.1f} % | {causes} |", flush=True)


if __name__ == "__main__":
    main()
