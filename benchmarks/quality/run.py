"""Compares ways to average on the tasks of this folder: each a file, and seconds of one core for each training.

One device, and each way on unequal virtual ranks (`virtual_ranks`, `virtual_peers`), train as many samples, each at its
best of a few learning rates, chosen on seeds that are not shown. What was run is kept and not run again.

    python benchmarks/quality/run.py --task hinge --ranks 2 --ways default,mean,ddp --held-out 10
    python benchmarks/quality/run.py --task all --ranks 2,4        # hours
    python benchmarks/quality/run.py --page                        # writes the tables of docs/quality.md from kept runs
"""

import argparse
import math
import statistics
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
sys.path = [path for path in sys.path if path != str(HERE)]  # or a task would hide a module of its name

from convergence_report import with_table  # noqa: E402
from virtual_convergence import SPEEDS, Runs, Table, interval  # noqa: E402
from virtual_tasks import IN_FILES, task_of  # noqa: E402

KEPT = HERE.parent / "kept" / "quality.jsonl"
PAGE = HERE.parents[1] / "docs" / "quality.md"
ONE = (1, "default")
TITLES = {
    "default": "the default",
    "mean": "the mean",
    "adascale": "the gain",
    "ddp": "data parallel",
    "uneven": "data parallel, uneven",
    "local": "local SGD by hand",
}
NUM_SEEDS, NUM_HELD_OUT = 3, 10
"""On which rates are chosen, and which are shown, on the page."""
SHOWN = (
    "factorisation",
    "deep_linear",
    "regression",
    "restarts",
    "accumulation",
    "lstm",
    "short_transformer",
    "digits_averaged",
    "digits_local",
    "digits_from_source",
    "finetuning_constant",
    "finetuning_decay",
    "sorted_shards",
    "unbalanced",
    "sparse_reward",
    "hinge",
    "contrastive_queue",
    "constrained",
    "rare_rows",
    "rare_rows_adam",
)
"""Tasks in the page's tables."""
GAME = "gan"
"""The task whose default is the mean: it has tables of its own."""


def table_of(task: str, ranks: int, ways: tuple[str, ...], seeds: int, held_out: int) -> Table:
    titles = {way: TITLES.get(way, way) for way in ways}
    return Table(task, ranks, titles, task_of(task).rates, seeds, held_out)


def compared(runs: Runs, way: tuple[int, str], than: tuple[int, str]) -> str:
    """How much worse a way is, as the mean over seeds and its 95 % interval; bold where that is above 0."""
    pairs = [(one["value"], other["value"]) for one, other in zip(runs.runs(way), runs.runs(than), strict=True)]
    num_lost = sum(not math.isfinite(one) for one, _ in pairs)
    if num_lost:
        return f"**{num_lost} of {len(pairs)} diverged**"
    if any(not math.isfinite(other) for _, other in pairs):
        return "the other diverged"
    by, half = interval([runs.task.worse(*pair) for pair in pairs])
    digits = 1 if abs(by) >= 10 else 2
    text = f"{by:+.{digits}f} ± {half:.{digits}f}"
    return f"**{text}**" if by > half else text


def row(runs: Runs) -> str:
    """A line of the page's table."""
    ranks, task = runs.table.ranks, runs.task
    ways = [(ranks, way) for way in runs.table.ways]
    default, merge, peer = ways
    value = statistics.mean(one["value"] for one in runs.runs(ONE))
    cells = [task.title + (f" ({task.parts})" if task.parts else ""), f"{value:.3g}", task.unit]
    cells += [compared(runs, way, ONE) for way in ways]
    cells += [compared(runs, default, merge), compared(runs, default, peer)]
    cells += [" / ".join(f"{runs.best(way):g}" for way in (ONE, *ways))]
    return "| " + " | ".join(cells) + " |"


def lines_of(ranks: int, *, may_run: bool) -> list[str]:
    """The page's table for so many ranks."""
    lines = [
        f"| {ranks} ranks | one device | in | default | mean | data parallel | default against mean | default against "
        "data parallel | rates |",
        "|" + "---|" * 9,
    ]
    for name in SHOWN:
        table = table_of(name, ranks, task_of(name).ways, NUM_SEEDS, NUM_HELD_OUT)
        lines.append(row(Runs(table, KEPT, may_run=may_run, num_processes=1)))
    return lines


def write_page(*, check: bool) -> None:
    page = before = PAGE.read_text(encoding="utf-8")
    for ranks in (2, 4):
        page = with_table(page, f"quality-{ranks}", lines_of(ranks, may_run=not check))
        table = table_of(GAME, ranks, task_of(GAME).ways, NUM_SEEDS, NUM_HELD_OUT)
        game = Runs(table, KEPT, may_run=not check, num_processes=1)
        page = with_table(page, f"quality-{GAME}-{ranks}", game.lines())
    if check and page != before:
        raise SystemExit(f"{PAGE.name} is not what the kept runs say: run benchmarks/quality/run.py --page")
    PAGE.write_text(page, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="all", help=f'"all", or some of {", ".join(IN_FILES)}, with commas')
    parser.add_argument("--ranks", default="2", help=f"some of {', '.join(map(str, SPEEDS))}, with commas")
    parser.add_argument("--ways", help='such as "default,mean,ddp,uneven,local"; by default the task\'s own')
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS, help="on which the rates are chosen")
    parser.add_argument("--held-out", type=int, default=NUM_HELD_OUT, help="further seeds, for the figures")
    parser.add_argument("--processes", type=int, default=1, help="trainings at the same time (default 1)")
    parser.add_argument("--kept", type=Path, default=KEPT)
    parser.add_argument("--page", action="store_true", help=f"write the tables of {PAGE.name} instead")
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a table would change")
    options = parser.parse_args()
    if options.page or options.check:
        write_page(check=options.check)
        return
    for name in IN_FILES if options.task == "all" else options.task.split(","):
        ways = tuple(options.ways.split(",")) if options.ways else task_of(name).ways
        for ranks in map(int, options.ranks.split(",")):
            table = table_of(name, ranks, ways, options.seeds, options.held_out)
            runs = Runs(table, options.kept, num_processes=options.processes)
            print("\n".join([*runs.lines(), ""]), flush=True)


if __name__ == "__main__":
    main()
