"""Trains a job on agents that an engine runs, kills one by the engine's own means, and measures what that costs.

Agents must attend already (`elche up`). Prints a JSON object: the longest time in which no sample was trained, in the
5 s before the kill and the 20 s after; seconds until the coordinator knew, and until as many ranks trained again as
before; and whether every sample was committed exactly once.

    elche up --on slurm --agents 2
    python benchmarks/engines.py --ranks 2 --kill 'scancel 1_1' --again 'elche up --on slurm --agents 2'
"""

import argparse
import json
import subprocess
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from elche_client import Client, JobHandle

LOOK_S = 0.02
BEFORE_S = 5.0
AFTER_S = 20.0
IN_TRAINING = ("training", "averaging", "evaluating", "stalled")
Seen = list[tuple[float, int, int]]
"""(time in s, samples trained so far, ranks in training)."""


def look(client: Client, job: JobHandle, seen: Seen, until: Callable[[float], bool]) -> None:
    """Notes how far the job is until that is true of the time, or the job has ended."""
    while not until(time.monotonic()):
        view = client.get(job.id)
        if view.state.has_ended:
            return
        trained = view.epoch * view.dataset_size + view.epoch_processed
        num_training = sum(rank.state in IN_TRAINING for rank in view.ranks)
        seen.append((time.monotonic(), trained, num_training))
        time.sleep(LOOK_S)


def longest(seen: Seen, since_s: float, until_s: float) -> float:
    """The longest time between two samples."""
    steps_s = [later[0] for earlier, later in pairwise(seen) if later[1] > earlier[1]]
    within = [(max(a, since_s), min(b, until_s)) for a, b in pairwise(steps_s) if b > since_s and a < until_s]
    return max((b - a for a, b in within), default=0.0)


def measure(client: Client, options: argparse.Namespace) -> dict[str, object]:
    num_ranks = options.ranks
    job = client.submit(options.job, num_ranks=num_ranks, min_ranks=1, epochs=options.epochs)
    seen: Seen = []
    look(client, job, seen, lambda _: bool(seen) and seen[-1][2] == num_ranks)
    began_s = time.monotonic()
    look(client, job, seen, lambda now_s: now_s - began_s > BEFORE_S)
    killed_s = time.monotonic()
    kill = subprocess.Popen(options.kill, shell=True)
    look(client, job, seen, lambda now_s: bool(seen) and (seen[-1][2] < num_ranks or now_s - killed_s > AFTER_S))
    lost_s = time.monotonic()
    again = subprocess.Popen(options.again, shell=True) if options.again else None
    look(client, job, seen, lambda _: seen[-1][2] == num_ranks)
    back_s = time.monotonic()
    look(client, job, seen, lambda now_s: now_s - killed_s > AFTER_S)
    result = job.result()
    kill.wait()
    if again is not None:
        again.wait()
    view = client.get(job.id)
    return {
        "state": str(result.state),
        "longest_before_s": round(longest(seen, began_s, killed_s), 2),
        "longest_after_s": round(longest(seen, killed_s, killed_s + AFTER_S), 2),
        "noticed_s": round(lost_s - killed_s, 2),
        "all_again_s": round(back_s - killed_s, 2),
        "exact": result.committed_samples == (view.dataset_size,) * options.epochs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--coordinator", default=None, help="HOST:PORT; default: as for `elche`")
    parser.add_argument("--job", type=Path, default=Path(__file__).parents[1] / "examples" / "digits.py")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--kill", required=True, help="command that kills an agent")
    parser.add_argument("--again", default="", help="command that has another one run")
    options = parser.parse_args()
    with Client(options.coordinator) as client:
        print(json.dumps(measure(client, options)), flush=True)


if __name__ == "__main__":
    main()
