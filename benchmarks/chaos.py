"""Kills ranks at random moments, and measures what that costs: trains once in peace, then the same again under fire.

A batch is a sleep (noted.py). Every few seconds a rank that trains gets SIGKILL, while another one
trains. Prints a JSON object.

    python benchmarks/chaos.py                                     # four ranks, a minute, a kill each 5 s: 3 minutes
    python benchmarks/chaos.py --ranks 3 --every 2 --backend cpu --policy sync
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import noted
from programs import spread

import elche_audit

BATCHES_PER_EPOCH = 100
ALIVE_S = 2.0
"""A rank trains when it has made a batch within this time."""
SETTLED_S = 1.0
"""How long after the replacement's first batch a gap of the others is still counted to the kill."""


@dataclass
class Kill:
    """One rank's process, and when it was killed."""

    rank: int
    pid: int
    at_s: float


@dataclass
class Run:
    """A run of the job in a folder of its own."""

    folder: Path
    result: dict[str, object] = field(default_factory=dict)
    kills: list[Kill] = field(default_factory=list)

    def training(self, ranks: int) -> dict[int, int]:
        """The process of each rank that trains now."""
        last = {rank: noted.batches(self.folder, rank)[-1:] for rank in range(ranks)}
        now_s = time.monotonic()
        return {rank: one[0][0] for rank, one in last.items() if one and now_s - one[0][1] < ALIVE_S}


def run(folder: Path, options: argparse.Namespace, *, kills: bool) -> Run:
    """Trains to the end; with `kills`, under fire."""
    folder.mkdir()
    one = Run(folder)
    batches = options.ranks * options.seconds / (options.batch_ms / 1000)
    command = [sys.executable, "-m", "elche_client", "run", noted.__file__, "--json", "--out", str(folder / "out")]
    command += ["--ranks", str(options.ranks), "--device", "cpu", "--no-logs", "--audit", "true"]
    command += ["--epochs", str(max(1, round(batches / BATCHES_PER_EPOCH)))]
    command += ["--policy", options.policy, "--averaging", options.averaging, "--backend", options.backend]
    variables = noted.environment(folder, options.batch_ms / 1000, BATCHES_PER_EPOCH)
    command += [word for name, value in variables.items() for word in ("--env", f"{name}={value}")]
    with (folder / "said").open("w") as said, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said) as process:
        if kills:
            strike(one, options, process)
        out, _ = process.communicate()
    one.result = json.loads(out)
    return one


def strike(one: Run, options: argparse.Namespace, process: "subprocess.Popen[bytes]") -> None:
    """Kills ranks, but never the last one that trains, until the run has lasted as long as it would in peace."""
    dice = random.Random(options.seed)
    while process.poll() is None and len(one.training(options.ranks)) < options.ranks:
        time.sleep(0.05)
    end_s = time.monotonic() + options.seconds
    while process.poll() is None:
        time.sleep(options.every * dice.uniform(0.5, 1.5))
        victims = one.training(options.ranks)
        if time.monotonic() > end_s or process.poll() is not None:
            return
        if len(victims) < 2:
            continue
        rank = dice.choice(list(victims))
        kill = Kill(rank, victims[rank], time.monotonic())
        try:
            os.kill(kill.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        one.kills.append(kill)


def back_after_s(one: Run, kill: Kill) -> float | None:
    """From a kill to the first batch of the rank's next process."""
    later = [at_s for pid, at_s in noted.batches(one.folder, kill.rank) if at_s > kill.at_s and pid != kill.pid]
    return later[0] - kill.at_s if later else None


def longest_gap_s(one: Run, kill: Kill, ranks: int) -> float:
    """Of the survivors, from the kill until the replacement has settled."""
    until_s = kill.at_s + (back_after_s(one, kill) or 0.0) + SETTLED_S
    return noted.longest_gap_s(one.folder, range(ranks), kill.pid, kill.at_s, until_s)


def audited(one: Run) -> dict[str, object]:
    """The auditor's verdict, and what the run has thrown away."""
    verdict = elche_audit.judge(one.folder / "out")
    told = elche_audit.document(verdict)
    thrown = sum(part.samples for part in verdict.thrown)
    return {**{name: told[name] for name in ("verdict", "violations", "missing")}, "thrown_samples": thrown}


def trained_s(one: Run, ranks: int) -> float:
    """From the first batch to the last."""
    times = [at_s for rank in range(ranks) for _, at_s in noted.batches(one.folder, rank)]
    return max(times) - min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--every", type=float, default=5.0, help="mean seconds between kills (default: 5)")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of the run in peace (default: 60)")
    parser.add_argument("--batch-ms", type=float, default=25.0, help="a batch's time in ms (default: 25)")
    parser.add_argument("--policy", default="cadence")
    parser.add_argument("--averaging", default="auto")
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--seed", type=int, default=0, help="of victims and moments (default: 0)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        peace = run(Path(folder) / "peace", options, kills=False)
        fire = run(Path(folder) / "fire", options, kills=True)
        ranks = options.ranks
        back = [back_after_s(fire, kill) for kill in fire.kills]
        starts = sum(len({pid for pid, _ in noted.batches(fire.folder, rank)}) for rank in range(ranks))
        undisturbed = [after - before for rank in range(ranks)
                       for (_, before), (_, after) in pairwise(noted.batches(peace.folder, rank))]  # fmt: skip
        figures = {
            "state": fire.result["state"],
            "error": fire.result.get("error", ""),
            "audit": audited(fire),
            "kills": len(fire.kills),
            "gap_of_survivors": spread([longest_gap_s(fire, kill, ranks) for kill in fire.kills]),
            "gap_in_peace": spread(undisturbed),
            "replacement_trains_after": spread(back),
            "started_again_beside_the_killed": starts - ranks - (len(back) - back.count(None)),
            "speed_relative_to_peace": round(trained_s(peace, ranks) / trained_s(fire, ranks), 3),
            "rounds": [peace.result["rounds"], fire.result["rounds"]],
            "load_average": os.getloadavg()[0],
        }
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
