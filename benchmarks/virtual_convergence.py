"""Held-out metrics of ways to average on virtual ranks (`virtual_ranks`), against one device at its best learning rate.

Every way gets the same grid of learning rates. The best one of each, and of the one device, is chosen on the first
seeds; what the table shows is of other seeds, in pairs with the one device. `default` is elche as it is; `ddp`,
`uneven`, `local` and `diloco` are what others do (`virtual_peers`); "len:1.2" in a way trains 1.2 times as many
samples. What was run is kept in a file, one JSON object a line, and is not run again.

    python benchmarks/virtual_convergence.py --task text --ranks 2 --ways default,nesterov --seeds 3
    python benchmarks/virtual_convergence.py --task text --ranks 4 --ways default,ddp --held-out 10
    python benchmarks/virtual_convergence.py --ranks 4 --ways default,mean+anchor:10 --rates 1.5 --held-out 10
"""

import argparse
import json
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from curves import curves, picture
from scipy.special import stdtrit  # `scipy.stats` takes longer to import than all that is read here
from virtual_tasks import OF_JOBS, task_of

SPEEDS = {1: [1.0], 2: [1.0, 2.3], 4: [1.0, 1.2, 2.0, 2.4]}
"""How many times slower than the fast rank each one is, by the number of ranks."""
RATES = (0.5, 1.0, 1.5, 2.0, 3.0)
"""Learning rates in the grid, relative to the task's own."""
FIRST_HELD_OUT = 1000


MAX_ANCHOR = 20


def _post_local(fraction: float, course: Any) -> int:
    """Short rounds for a part of the training, then longer ones (Lin et al., arXiv 1808.07217)."""
    return 1 if course.fraction < fraction else 10


def _qsr(alpha: float, course: Any) -> int:
    """The quadratic synchronisation rule (Gu et al., arXiv 2310.14423)."""
    return max(1, min(MAX_ANCHOR, int((alpha / max(course.factor, 1e-6)) ** 2)))


def _msf(most: float, course: Any) -> int:
    """As many batches as the divergence needs to grow to `most`, at the pace of the last rounds."""
    if len(course.divergences) < 2 or min(course.divergences[-2:]) <= 0:
        return 1
    growth = math.log(course.divergences[-1] / course.divergences[-2]) / course.anchor
    wanted = math.log(most / course.divergences[-1]) / growth if growth > 0 else MAX_ANCHOR
    return max(1, min(MAX_ANCHOR, int(wanted)))


SCHEDULES = {"postlocal": _post_local, "qsr": _qsr, "msf": _msf}
"""Anchors by the course of a training."""


def way_of(name: str) -> Any:
    """The way of a name: words with "+" between them."""
    from virtual_means import ByWork
    from virtual_ranks import Way

    from elche_worker.outer import SGD, Nesterov

    fields: dict[str, Any] = {}
    for word in name.split("+"):
        kind, _, value = word.partition(":")
        numbers = [float(one) for one in value.split("/")] if value else []
        match kind:
            case "default":
                pass
            case "mean" | "adascale" | "apart" | "whole":
                fields["merge"] = kind
            case "blocking" | "overlapped":
                fields["averaging"] = kind
            case "nesterov":
                lr, momentum = numbers or (0.7, 0.5)
                fields["outer"] = Nesterov(lr=lr, momentum=momentum)
            case "sgd":
                lr, momentum = numbers
                fields["outer"] = SGD(lr=lr, momentum=momentum)
            case "work":
                fields["outer"] = ByWork(*numbers)
            case "ema":
                fields["ema"] = numbers[0]
            case "moments" | "replaced":
                fields["optimizer_state"] = "averaged" if kind == "moments" else kind
            case "first" | "second":
                fields["moments"] = ("exp_avg",) if kind == "first" else ("exp_avg_sq",)
            case "gain":
                fields["gain_part"] = numbers[0]
            case "scale":
                fields["lr_scale_ratio"] = numbers[0]
            case "samples" | "uniform":
                fields["weighting"] = kind
            case "bf16" | "int8" | "int4" | "int2" | "topk":
                fields["compress"] = kind
                fields["forgets"] = int(numbers[0]) if numbers else 0
            case "keep":
                fields["outliers"] = kind
            case "faults":
                fields["faults"] = numbers[0]
            case "anchor":
                fields.setdefault("settings", {})["anchor"] = int(numbers[0])
            case "overhead":
                fields.setdefault("settings", {})["overhead_target"] = numbers[0]
            case "postlocal" | "qsr" | "msf":
                fields["schedule"] = partial(SCHEDULES[kind], *numbers)
            case "sync" | "async" | "cadence":
                fields["policy"] = kind
            case _:
                raise SystemExit(f"no such way: {word!r}")
    return Way(**fields)


def run(case: tuple[str, int, str, float, int]) -> dict[str, Any]:
    """One run: (task, ranks, way, rate, seed)."""
    task, num_ranks, way, rate, seed = case
    import virtual_peers
    import virtual_ranks

    words = way.split("+")
    length = float(next((word[4:] for word in words if word.startswith("len:")), 1.0))
    words = [word for word in words if not word.startswith("len:")] or ["default"]
    described = task_of(task)
    job = described.job(described.rate * rate, seed, length)
    speeds, num_points = SPEEDS[num_ranks], 10 if task in OF_JOBS else 1
    if words[0].partition(":")[0] in virtual_peers.KINDS:
        points = virtual_peers.train(job, words[0], speeds, seed=seed, num_points=num_points)
    else:
        points = virtual_ranks.train(job, way_of("+".join(words)), speeds, seed=seed, num_points=num_points)
    curve = [[round(one.at_s, 2), one.samples, *one.metrics.values()] for one in points]
    value = points[-1].metrics[described.metric]
    if not math.isfinite(value):  # it went out of bounds: worse than any other
        value = -math.inf if described.more_is_better else math.inf
    return {"case": case, "value": value, "curve": curve, "left_out": points[-1].num_left_out}


def run_all(cases: list[tuple[str, int, str, float, int]], num_processes: int) -> Iterator[dict[str, Any]]:
    """Their results in order; with one process, in this one."""
    if num_processes == 1:
        yield from map(run, cases)
        return
    with ProcessPoolExecutor(num_processes) as pool:
        yield from pool.map(run, cases)


@cache
def read(kept: Path, _size: int) -> dict[tuple[Any, ...], Any]:
    """The results in a file by their case; a file is never changed but added to."""
    return {tuple(one["case"]): one for one in map(json.loads, kept.read_text().splitlines())}


def results(
    cases: Iterable[tuple[str, int, str, float, int]], kept: Path, *, may_run: bool = True, num_processes: int = 2
) -> dict[tuple[Any, ...], Any]:
    """What has come of these cases; what is not in the file is run, on so many processors, or is an error."""
    known = dict(read(kept, kept.stat().st_size)) if kept.exists() else {}
    missing = [case for case in dict.fromkeys(cases) if case not in known]
    if missing and not may_run:
        raise SystemExit(f"{kept} lacks {len(missing)} runs, such as {missing[0]}")
    if not missing:
        return known
    with kept.open("a") as file:
        for done in run_all(missing, num_processes):
            known[tuple(done["case"])] = done
            file.write(json.dumps(done) + "\n")
            file.flush()
    return known


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and half of its 95 % interval."""
    mean = statistics.mean(values)
    if len(values) < 2:
        return mean, 0.0
    if not math.isfinite(mean):  # one has diverged
        return mean, math.nan
    return mean, float(stdtrit(len(values) - 1, 0.975)) * statistics.stdev(values) / math.sqrt(len(values))


@dataclass(frozen=True, slots=True)
class Table:
    """One table: what of which ways."""

    task: str
    ranks: int
    ways: dict[str, str]
    """Title by way."""
    rates: tuple[float, ...] = RATES
    """Of which the best is taken, for the one device and for each way."""
    seeds: int = 3
    """On which it is chosen."""
    held_out: int = 10


class Runs:
    """The runs of a table, and what they say."""

    def __init__(self, table: Table, kept: Path, *, may_run: bool = True, num_processes: int = 2) -> None:
        self.table = table
        self.task = task_of(table.task)
        self._ways = [(1, "default"), *((table.ranks, way) for way in table.ways)]
        tuning = [
            (table.task, *way, rate, seed)
            for way in self._ways
            for rate in table.rates
            for seed in range(table.seeds)
            if len(table.rates) > 1 or not table.held_out
        ]
        self._known = results(tuning, kept, may_run=may_run, num_processes=num_processes)
        self._best = {way: self._best_rate(way) for way in self._ways}
        for way in self._ways if self.task.grows else ():
            while self._best[way] >= max(table.rates):  # the best may be beyond the grid
                rate = 2 * self._best[way]
                beyond = [(table.task, *way, rate, seed) for seed in range(table.seeds)]
                self._known = results([*tuning, *beyond], kept, may_run=may_run, num_processes=num_processes)
                if self._best_rate(way, (self._best[way], rate)) != rate:
                    break
                self._best[way] = rate
        held_out = range(FIRST_HELD_OUT, FIRST_HELD_OUT + table.held_out)
        self.seeds = held_out or range(table.seeds)
        wanted = [(table.task, *way, self._best[way], seed) for way in self._ways for seed in self.seeds]
        self._known = results(wanted, kept, may_run=may_run, num_processes=num_processes)

    def _best_rate(self, way: tuple[int, str], among: Sequence[float] = ()) -> float:
        table = self.table
        if len(table.rates) == 1:
            return table.rates[0]
        sign = 1 if self.task.more_is_better else -1

        def mean(rate: float) -> float:
            return statistics.mean(self._known[table.task, *way, rate, seed]["value"] for seed in range(table.seeds))

        return max(among or table.rates, key=lambda rate: sign * mean(rate))

    def best(self, way: tuple[int, str]) -> float:
        """The multiple of the task's learning rate with which the way is shown."""
        return self._best[way]

    def runs(self, way: tuple[int, str]) -> list[dict[str, Any]]:
        """The runs of a way on the seeds that are shown."""
        return [self._known[self.table.task, *way, self._best[way], seed] for seed in self.seeds]

    def lines(self) -> list[str]:
        """The table in Markdown."""
        table = self.table
        unit, metric = self.task.unit, self.task.metric.replace("_", " ")
        ones = self.runs(self._ways[0])
        mean_of_one = statistics.mean(one["value"] for one in ones)
        title = f"{table.task}, {table.ranks} ranks, {len(self.seeds)} seeds"
        lines = [f"| {title} | rate | {metric} | worse, {unit} (95 %) | time |"]
        lines += ["|---|---|---|---|---|", f"| one device | {self._best[self._ways[0]]:g} | {mean_of_one:.4f} | | 1 |"]
        for way in self._ways[1:]:
            runs = self.runs(way)
            values = [run["value"] for run in runs]
            pairs = [self.task.worse(value, one["value"]) for value, one in zip(values, ones, strict=True)]
            by, half = interval(pairs)
            ends = [run["curve"][-1][0] / one["curve"][-1][0] for run, one in zip(runs, ones, strict=True)]
            spread = f"{by:+.2f} ({by - half:+.2f} to {by + half:+.2f})"
            mean = f"{statistics.mean(values):.4f}"
            lines.append(
                f"| {table.ways[way[1]]} | {self._best[way]:g} | {mean} | {spread} | {statistics.mean(ends):.3f} |"
            )
        return lines

    def drawing(self) -> str:
        """The curves of the held-out runs as SVG."""
        named = {"one device": self.runs(self._ways[0])}
        named |= {self.table.ways[way]: self.runs((ranks, way)) for ranks, way in self._ways[1:]}
        metric = self.task.metric.replace("_", " ")
        drawn = {name: curves([run["curve"] for run in runs]) for name, runs in named.items()}
        return picture(drawn, f"held-out {metric}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=OF_JOBS, default="text")
    parser.add_argument("--ranks", type=int, choices=SPEEDS, default=2)
    parser.add_argument("--ways", default="default", help='such as "default,mean,nesterov:0.7/0.5+moments,ddp"')
    parser.add_argument("--rates", default=",".join(map(str, RATES)))
    parser.add_argument("--seeds", type=int, default=3, help="on which the rates are chosen")
    parser.add_argument("--held-out", type=int, default=0, help="further seeds, for the figures")
    parser.add_argument("--kept", type=Path, default=Path("virtual_convergence.jsonl"))
    options = parser.parse_args()
    ways = {way: way for way in options.ways.split(",")}
    rates = tuple(float(one) for one in options.rates.split(","))
    table = Table(options.task, options.ranks, ways, rates, options.seeds, options.held_out)
    print("\n".join(Runs(table, options.kept).lines()))


if __name__ == "__main__":
    main()
