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
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from scipy import stats

SPEEDS = {1: [1.0], 2: [1.0, 2.3], 4: [1.0, 1.2, 2.0, 2.4]}
"""How many times slower than the fast rank each one is, by the number of ranks."""
RATES = (0.5, 1.0, 1.5, 2.0, 3.0)
"""Learning rates in the grid, relative to the task's own."""
FIRST_HELD_OUT = 1000
BASE = {"text": 1.5e-2, "digits": 3e-3, "transformer": 3e-3, "muon": 3e-3}
METRIC = {"text": "nats_per_byte", "digits": "accuracy", "transformer": "nats_per_byte", "muon": "nats_per_byte"}
NUM_FOLDS = 5


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
    from virtual_ranks import Way

    from elche_worker.outer import SGD, Nesterov

    fields: dict[str, Any] = {}
    for word in name.split("+"):
        kind, _, value = word.partition(":")
        numbers = [float(one) for one in value.split("/")] if value else []
        match kind:
            case "default":
                pass
            case "mean":
                fields["merge"] = "mean"
            case "blocking" | "overlapped":
                fields["averaging"] = kind
            case "nesterov":
                lr, momentum = numbers or (0.7, 0.5)
                fields["outer"] = Nesterov(lr=lr, momentum=momentum)
            case "sgd":
                lr, momentum = numbers
                fields["outer"] = SGD(lr=lr, momentum=momentum)
            case "moments":
                fields["optimizer_state"] = "averaged"
            case "scale":
                fields["lr_scale_ratio"] = numbers[0]
            case "samples" | "uniform":
                fields["weighting"] = kind
            case "int8" | "bf16":
                fields["compress"] = kind
            case "keep":
                fields["outliers"] = kind
            case "faults":
                fields["faults"] = numbers[0]
            case "anchor":
                fields["settings"] = {"anchor": int(numbers[0])}
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
    import convergence_jobs as jobs
    import virtual_peers
    import virtual_ranks

    jobs.FOLD = seed % NUM_FOLDS
    jobs.load_fold.cache_clear()
    words = way.split("+")
    length = float(next((word[4:] for word in words if word.startswith("len:")), 1.0))
    words = [word for word in words if not word.startswith("len:")] or ["default"]
    job = jobs.JOBS[task](length)
    build = jobs.build_muon if task == "muon" else jobs.build_optimizer
    job = replace(job, optimizer=build(BASE[task] * rate))
    speeds = SPEEDS[num_ranks]
    if words[0].partition(":")[0] in virtual_peers.KINDS:
        points = virtual_peers.train(job, words[0], speeds, seed=seed)
    else:
        points = virtual_ranks.train(job, way_of("+".join(words)), speeds, seed=seed)
    curve = [[round(one.at_s, 2), one.samples, *one.metrics.values()] for one in points]
    value = points[-1].metrics[METRIC[task]]
    return {"case": case, "value": value, "curve": curve, "left_out": points[-1].num_left_out}


def results(cases: Iterable[tuple[str, int, str, float, int]], kept: Path) -> dict[tuple[Any, ...], Any]:
    """What has come of these cases; what is not in the file is run, on two processors."""
    known = {}
    if kept.exists():
        known = {tuple(one["case"]): one for one in map(json.loads, kept.read_text().splitlines())}
    missing = [case for case in dict.fromkeys(cases) if case not in known]
    with ProcessPoolExecutor(2) as pool, kept.open("a") as file:
        for done in pool.map(run, missing):
            known[tuple(done["case"])] = done
            file.write(json.dumps(done) + "\n")
            file.flush()
    return known


def worse(task: str, value: float, one_device: float) -> float:
    """How much worse, in percentage points of accuracy or per cent of the loss."""
    return 100 * (one_device - value) if METRIC[task] == "accuracy" else 100 * (value / one_device - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=METRIC, default="text")
    parser.add_argument("--ranks", type=int, choices=SPEEDS, default=2)
    parser.add_argument("--ways", default="default", help='such as "default,mean,nesterov:0.7/0.5+moments,ddp"')
    parser.add_argument("--rates", default=",".join(map(str, RATES)))
    parser.add_argument("--seeds", type=int, default=3, help="on which the rates are chosen")
    parser.add_argument("--held-out", type=int, default=0, help="further seeds, for the figures")
    parser.add_argument("--kept", type=Path, default=Path("virtual_convergence.jsonl"))
    options = parser.parse_args()
    task, rates = options.task, [float(one) for one in options.rates.split(",")]
    ways = [(1, "default"), *((options.ranks, way) for way in options.ways.split(","))]
    tuning = [(task, *way, rate, seed) for way, rate, seed in product(ways, rates, range(options.seeds))]
    known = results(tuning, options.kept)
    sign = 1 if METRIC[task] == "accuracy" else -1

    def mean(way: tuple[int, str], rate: float) -> float:
        return statistics.mean(known[task, *way, rate, seed]["value"] for seed in range(options.seeds))

    best = {way: max(rates, key=lambda rate, way=way: sign * mean(way, rate)) for way in ways}
    seeds = range(FIRST_HELD_OUT, FIRST_HELD_OUT + options.held_out) if options.held_out else range(options.seeds)
    known = results([(task, *way, best[way], seed) for way, seed in product(ways, seeds)], options.kept)

    def end_s(way: tuple[int, str], seed: int) -> float:
        at_s: float = known[task, *way, best[way], seed]["curve"][-1][0]
        return at_s

    alone = [known[task, *ways[0], best[ways[0]], seed]["value"] for seed in seeds]
    columns = ["rate", "by rate", "mean", "worse than one device (95 %)", "time to one's", "left out"]
    print(f"| {task}, {options.ranks} ranks | {' | '.join(columns)} |")
    print("|---|---|---|---|---|---|---|")
    for way in ways:
        values = [known[task, *way, best[way], seed]["value"] for seed in seeds]
        pairs = [worse(task, value, one) for value, one in zip(values, alone, strict=True)]
        half = 0.0
        if len(pairs) > 1:
            half = stats.t.ppf(0.975, len(pairs) - 1) * statistics.stdev(pairs) / math.sqrt(len(pairs))
        grid = " ".join(f"{mean(way, rate):.4f}" for rate in rates)
        at_s = statistics.mean(end_s(way, seed) / end_s(ways[0], seed) for seed in seeds)
        num_out = statistics.mean(known[task, *way, best[way], seed].get("left_out", 0) for seed in seeds)
        name = "one device" if way is ways[0] else way[1]
        by, value = statistics.mean(pairs), statistics.mean(values)
        spread = f"{by:+.2f} ({by - half:+.2f} to {by + half:+.2f})"
        print(f"| {name} | {best[way]} | {grid} | {value:.4f} | {spread} | {at_s:.3f} | {num_out:g} |")


if __name__ == "__main__":
    main()
