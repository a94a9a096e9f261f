"""Runs random jobs in the simulator: deaths, hangs, lost and drained hosts, broken links, ends of the coordinator, full
disks, pauses, other numbers of ranks, at random.

Prints the transcript of each run that does not end as it must, and exits with 1 when there was one.

    python tools/simulate.py --seeds 2000
    python tools/simulate.py --first 17 --seeds 1
"""

import argparse
import multiprocessing
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.disasters import random_run


def problem_of(seed: int) -> str:
    """The fault in the run of a seed, with its transcript; empty when nothing is."""
    run = random_run(seed)
    try:
        run.run()
    except Exception as error:
        return f"{run.describe()}\nseed {seed}: {type(error).__name__}: {error}"
    return ""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200, help="how many runs")
    parser.add_argument("--first", type=int, default=20_000_000, help="the first seed; lower ones have fewer disasters")
    options = parser.parse_args(arguments)
    seeds, began_s, bad = range(options.first, options.first + options.seeds), time.monotonic(), []
    with multiprocessing.get_context("spawn").Pool() as pool:
        for done, (seed, problem) in enumerate(zip(seeds, pool.imap(problem_of, seeds, chunksize=4), strict=True), 1):
            if problem:
                bad.append(seed)
                print(problem, flush=True)
            if sys.stderr.isatty():
                print(f"\r{done} of {len(seeds)} runs, {len(bad)} bad", end="", file=sys.stderr)
    print(f"{len(seeds)} runs in {time.monotonic() - began_s:.0f} s, {len(bad)} bad {bad or ''}")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
