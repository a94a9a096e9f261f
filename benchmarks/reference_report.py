"""Eight models on two unequal devices: each device alone, and every policy over every backend, as one table.

It has the columns of floDl's own benchmark (docs/ddp-benchmark.md there): evaluation, time, averagings and the time
of one, how busy each device was. "of the sum" is the throughput as a fraction of what the two devices train alone, one
after the other, added up. On a CPU rank 1 is slowed 2.3 times; with --device cuda the devices are as they are.

    python benchmarks/reference_report.py                          # half an hour on two quiet cores
    python benchmarks/reference_report.py --models mlp lenet       # some of it
    python benchmarks/reference_report.py --full --device cuda     # as wide as published
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

from programs import elche_run

HERE = Path(__file__).resolve().parent
MODELS = ("logistic", "mlp", "lenet", "conv-ae", "char-rnn", "gpt-nano", "resnet-20", "resnet-20-graph")
POLICIES = ("sync", "cadence", "async")
SLOW = 2.3
HEAD = "| model | mode | evaluation | time | of the sum | averagings | time of one | busy |"


def train(model: str, way: list[str], options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """One run; its result with the median time of an averaging."""
    environment = {"ELCHE_MODEL": model, "ELCHE_FULL": str(int(options.full)), "ELCHE_SCALE": str(options.scale)}
    path = HERE / "reference_models.py"
    result, record = elche_run(path, *way, "--seed", str(seed), "--no-logs", environment=environment)
    averagings = [one["sync_ms"] for one in record["round_reports"] if one["sync_ms"]]
    return {**result, "sync_ms": statistics.median(averagings) if averagings else 0.0}


def ways(options: argparse.Namespace) -> dict[str, list[str]]:
    """By name, the options of `elche run`: the devices alone first."""
    if options.device == "cpu":
        alone = {"fast alone": ["--device", "cpu"], "slow alone": ["--device", "cpu", "--slow", f"0={SLOW}"]}
        backends: tuple[str, ...] = ("gloo", "cpu")
        both = ["--device", "cpu", "--ranks", "2", "--slow", f"1={SLOW}"]
    else:
        alone = {f"{name} alone": ["--device", name] for name in ("cuda:0", "cuda:1")}
        both, backends = ["--device", "cuda", "--ranks", "2"], ("nccl", "gloo", "cpu")
    modes = {
        f"{backend} {policy}": [*both, "--backend", backend, "--policy", policy]
        for policy in POLICIES
        for backend in backends
    }
    return {**{name: [*way, "--ranks", "1"] for name, way in alone.items()}, **modes}


def row(model: str, mode: str, results: list[dict[str, Any]], sum_per_s: float) -> str:
    """A line of the table, of the runs with each seed."""

    def middle(what: Any) -> float:
        return statistics.median(float(what(one)) for one in results)

    metric = next(iter(results[0]["metrics"]))
    busy = [
        middle(lambda one, at=at: 1 - one["ranks"][at]["waited_s"] / one["duration_s"])
        for at in range(len(results[0]["ranks"]))
    ]
    cells = [
        model,
        mode,
        f"{middle(lambda one: one['metrics'][metric]):.4f} {metric}",
        f"{middle(lambda one: one['duration_s']):.1f} s",
        f"{100 * middle(lambda one: one['samples_per_s']) / sum_per_s:.0f} %",
        f"{middle(lambda one: one['rounds']):.0f}",
        f"{middle(lambda one: one['sync_ms']):.1f} ms",
        ", ".join(f"{100 * one:.0f} %" for one in busy),
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--full", action="store_true", help="models as wide as published, for GPUs")
    parser.add_argument("--scale", type=float, default=1.0, help="how many times the usual number of batches")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each; the table has their medians")
    options = parser.parse_args()
    print(HEAD + "\n" + "|---" * HEAD[1:].count("|") + "|", flush=True)
    for model in options.models:
        found: dict[str, list[dict[str, Any]]] = {}
        for mode, way in ways(options).items():
            found[mode] = [train(model, way, options, seed) for seed in range(options.seeds)]
            if len(found) < 2:
                continue
            alone = [statistics.median(one["samples_per_s"] for one in results) for results in list(found.values())[:2]]
            for name in list(found) if len(found) == 2 else [mode]:
                print(row(model, name, found[name], sum(alone)), flush=True)


if __name__ == "__main__":
    main()
