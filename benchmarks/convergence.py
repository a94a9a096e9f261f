"""Final held-out metrics of every way to average, against one device that trains as many samples; a table in Markdown.

Runs `elche run benchmarks/convergence_jobs.py` on two ranks, rank 1 slowed 2.3 times, and on one. Pairs have the same
seed and the same held-out set. What was run is kept in a file, one JSON object a line, and is not run again.

    python benchmarks/convergence.py                     # all of it, about 20 minutes
    python benchmarks/convergence.py --tasks digits --repeats 1
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy import stats

HERE = Path(__file__).resolve().parent
ONE_DEVICE = "one device"
NUM_FOLDS = 5
OUTER = [0.7, 0.5]
"""DiLoCo's learning rate with a shorter momentum: its 0.9 needs longer rounds, and many more of them."""

WAYS: dict[str, dict[str, Any]] = {
    ONE_DEVICE: {},
    "as it is": {"averaging": "overlapped"},
    "blocking": {"averaging": "blocking"},
    "async": {"averaging": "overlapped", "policy": "async"},
    "`bf16`": {"averaging": "overlapped", "compress": "bf16"},
    "`int8`": {"averaging": "overlapped", "compress": "int8"},
    "mean": {"averaging": "overlapped", "merge": "mean"},
    f"mean, outer `Nesterov(lr={OUTER[0]}, momentum={OUTER[1]})`": {
        "averaging": "overlapped",
        "merge": "mean",
        "nesterov": OUTER,
    },
    "mean, `lr_scale_ratio=0.5`": {"averaging": "overlapped", "merge": "mean", "lr_scale_ratio": 0.5},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is trained, and how much worse than one device is still as good."""

    title: str
    metric: str
    unit: str
    digits: int
    num_runs: int
    """Pairs per repeat."""
    limit: float
    """Of the loss against one device: percentage points, or per cent."""
    rate: float
    """Factor on the job's learning rate: the best for one device (`virtual_convergence`)."""

    def loss(self, value: float, one_device: float) -> float:
        """How much worse a run is than its pair on one device, in `unit`s of the limit."""
        if self.metric == "accuracy":
            return 100 * (one_device - value)
        return 100 * (value / one_device - 1)


TASKS = {
    "digits": Task(
        title="Digits: held-out accuracy, five folds over all 1,797 images",
        metric="accuracy",
        unit="points",
        digits=4,
        num_runs=NUM_FOLDS,
        limit=0.5,
        rate=2.0,
    ),
    "text": Task(
        title="Text of the standard library: held-out nats per byte",
        metric="nats_per_byte",
        unit="%",
        digits=4,
        num_runs=5,
        limit=1.0,
        rate=1.5,
    ),
}


@dataclass(frozen=True, slots=True)
class Run:
    """One training: the same `number` is the same seed and fold in every way."""

    task: str
    way: str
    number: int


def train(run: Run) -> dict[str, Any]:
    """Trains and returns what is kept of it. Raises `SystemExit` with the reason when it fails."""
    way = WAYS[run.way]
    fold = run.number % NUM_FOLDS
    environment = {**os.environ, "ELCHE_TASK": run.task, "ELCHE_FOLD": str(fold), "ELCHE_WAY": json.dumps(way)}
    environment["ELCHE_RATE"] = str(TASKS[run.task].rate)
    ranks = ["--ranks", "1"] if run.way == ONE_DEVICE else ["--ranks", "2", "--slow", "1=2.3"]
    elche = Path(sys.executable).parent / "elche"
    with tempfile.TemporaryDirectory() as folder:
        command = [elche, "run", HERE / "convergence_jobs.py", *ranks, "--device", "cpu", "--seed", str(run.number)]
        command += ["--out", f"{folder}/out", "--json"]
        done = subprocess.run(command, check=False, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    result = json.loads(done.stdout or b"{}")
    if done.returncode:
        raise SystemExit(f"{run} failed: {result.get('error', f'exit status {done.returncode}')}")
    value = result["metrics"][TASKS[run.task].metric]
    batches = [rank["batches"] for rank in result["ranks"]]
    kept = {"rounds": result["rounds"], "batches": batches, "duration_s": result["duration_s"]}
    return {"task": run.task, "way": run.way, "settings": way, "number": run.number, "value": value, **kept}


def load(path: Path) -> dict[Run, float]:
    """The values of what was run before with the ways as they are now."""
    lines = path.read_text().splitlines() if path.exists() else []
    kept = [json.loads(line) for line in lines]
    return {
        Run(one["task"], one["way"], one["number"]): one["value"]
        for one in kept
        if WAYS.get(one["way"]) == one["settings"]
    }


def train_all(runs: list[Run], path: Path, values: dict[Run, float], jobs: int) -> None:
    """Trains what is not in `values` yet, adds it there, and writes it to the file as it comes."""
    missing = [run for run in runs if run not in values]
    with ThreadPoolExecutor(jobs) as pool, path.open("a") as file:
        for run, result in zip(missing, pool.map(train, missing), strict=True):
            values[run] = result["value"]
            file.write(json.dumps(result) + "\n")
            file.flush()
            print(f"{len(values)}: {run.task} {run.number}, {run.way}: {result['value']:.4f}", file=sys.stderr)


def table(name: str, values: dict[Run, float]) -> str:
    """One task's table, of the pairs that there are."""
    task = TASKS[name]
    head = f"| | {task.metric} | loss against one device, {task.unit} (95 %) | more than {task.limit:g} {task.unit} |"
    lines = [f"### {task.title}", "", head, "|---|---|---|---|"]
    ones = {run.number: value for run, value in values.items() if run.task == name and run.way == ONE_DEVICE}
    for way in WAYS:
        found = {run.number: value for run, value in values.items() if run.task == name and run.way == way}
        if len(found) < 2:
            continue
        losses = [task.loss(value, ones[number]) for number, value in found.items() if number in ones]
        mean, spread = statistics.mean(found.values()), statistics.stdev(found.values())
        cells = [way, f"{mean:.{task.digits}f} ± {spread:.{task.digits}f}"]
        lines.append("| " + " | ".join([*cells, *(_verdict(task, losses) if way != ONE_DEVICE else ("", ""))]) + " |")
    lines += ["", f"{len(ones)} runs of each; ± is the standard deviation over runs."]
    return "\n".join(lines)


def _verdict(task: Task, losses: list[float]) -> tuple[str, str]:
    """Mean loss with its interval, and what that says about the limit."""
    if len(losses) < 2:
        return "", ""
    mean = statistics.mean(losses)
    half = float(stats.t.ppf(0.975, len(losses) - 1)) * statistics.stdev(losses) / math.sqrt(len(losses))
    low, high = mean - half, mean + half
    verdict = "excluded" if high < task.limit else "shown" if low > task.limit else "not excluded"
    return f"{mean:+.2f} ({low:+.2f} to {high:+.2f})", verdict


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="which tasks (default all)")
    parser.add_argument("--repeats", type=int, default=1, help="seeds per fold, and fives of text runs (default 1)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time (default 1)")
    parser.add_argument("--raw", type=Path, default=Path("convergence.jsonl"), help="what was run, kept for the next")
    parser.add_argument("--out", type=Path, help="where the tables go (default stdout)")
    arguments = parser.parse_args()
    values = load(arguments.raw)
    numbers = [(name, number) for name in arguments.tasks for number in range(TASKS[name].num_runs * arguments.repeats)]
    runs = [Run(name, way, number) for name, number in numbers for way in WAYS]
    train_all(runs, arguments.raw, values, arguments.jobs)
    tables = "\n\n".join(table(name, values) for name in arguments.tasks) + "\n"
    if arguments.out:
        arguments.out.write_text(tables)
    else:
        print(tables, end="")


if __name__ == "__main__":
    main()
