"""Kills ranks, agents and the coordinator for hours: `make soak KILLS=1000`. Stops at the first job that is not right.

One job after another trains under benchmarks/fifty_kills.py, each with another seed, until so many kills have hit.
Every job must succeed, count each sample once, and be proven by `elche audit`. Prints a line per job, then the sums.

    python tools/soak.py --kills 1000           # two to four hours on two cores
    python tools/soak.py --kills 50 --first 7   # begins with seed 7
"""

import argparse
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WHAT = ",".join([*["rank"] * 8, "agent", "coordinator"])
JOB = ("--seconds", "600", "--kills", "120", "--epochs", "40", "--what", WHAT)
"""Of each job: a kill each 5 s until it has ended. Workers take longer to start, so that most kills are of ranks."""
LIMIT_S = 3600.0


def one_job(seed: int) -> dict[str, Any]:
    """The figures of one job under fire; empty if it has printed none."""
    script = [sys.executable, "benchmarks/fifty_kills.py", *JOB]
    try:
        done = subprocess.run(
            [*script, "--seed", str(seed)], cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not over after {LIMIT_S:.0f} s"}
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1]) if done.stdout.strip() else {}
    return figures


def is_right(figures: dict[str, Any]) -> bool:
    """True if the job has succeeded and each sample is in its model once, by its own count and by the audit's."""
    return figures.get("state") == "succeeded" and figures["samples_exact"] and " is proven" in figures["audit"]


def main() -> int:
    """Runs jobs until enough was killed; exit code 1 at the first that is not right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000, help="in all jobs together (default: 1000)")
    parser.add_argument("--first", type=int, default=0, help="the first job's seed (default: 0)")
    chosen = parser.parse_args()
    killed: Counter[str] = Counter()
    jobs = samples = 0
    while killed.total() < chosen.kills:
        seed = chosen.first + jobs
        figures = one_job(seed)
        if not is_right(figures):
            print(f"seed {seed}: {json.dumps(figures)}", file=sys.stderr)
            return 1
        jobs += 1
        killed.update(figures["faults"])
        samples += sum(figures["committed_samples"])
        print(f"seed {seed}: {figures['faults']}, {figures['audit']}", flush=True)
    kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(killed.items()))
    print(f"{jobs} jobs, {killed.total()} kills ({kinds}), {samples} samples: each once in its model")
    return 0


if __name__ == "__main__":
    sys.exit(main())
