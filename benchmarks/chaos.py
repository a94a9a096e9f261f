"""Kills ranks at random moments, and measures what that costs: trains once in peace, then the same again under fire.

Runs `elche run` on this file; a batch is a sleep. Every few seconds a rank that trains gets SIGKILL, while another one
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
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from torch import nn

import elche_audit
from elche.v1 import job_pb2
from elche_worker import TrainingJob

BATCH_SIZE = 16
BATCHES_PER_EPOCH = 100
ALIVE_S = 2.0
"""A rank trains when it has made a batch within this time."""
SETTLED_S = 1.0
"""How long after the replacement's first batch a gap of the others is still counted to the kill."""

NOTES = os.environ.get("CHAOS_NOTES", "")
RANK = os.environ.get("ELCHE_RANK", "")
BATCH_S = float(os.environ.get("CHAOS_BATCH_S", "0"))


def train_step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    time.sleep(BATCH_S)
    with open(f"{NOTES}/rank-{RANK}", "a") as notes:
        notes.write(f"{os.getpid()} {time.monotonic()}\n")
    return model(batch).square().mean()


job = TrainingJob(
    model=lambda: nn.Linear(8, 1),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.001),
    dataset=lambda: torch.randn(BATCHES_PER_EPOCH * BATCH_SIZE, 8, generator=torch.Generator().manual_seed(0)),
    train_step=train_step,
    batch_size=BATCH_SIZE,
    epochs=1,
)


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

    def batches(self, rank: int) -> list[tuple[int, float]]:
        """(process id, time in s) of each batch of a rank, in order."""
        path = self.folder / f"rank-{rank}"
        if not path.exists():
            return []
        rows = [line.split() for line in path.read_text().splitlines()]
        made = [(int(pid), float(at_s)) for pid, at_s in rows]
        first = {pid: (pid, at_s) for pid, at_s in reversed(made) if pid != made[0][0]}
        return [one for one in made if one != first.get(one[0])]  # the first batch of who joins is on trial

    def training(self, ranks: int) -> dict[int, int]:
        """The process of each rank that trains now."""
        last = {rank: self.batches(rank)[-1:] for rank in range(ranks)}
        now_s = time.monotonic()
        return {rank: one[0][0] for rank, one in last.items() if one and now_s - one[0][1] < ALIVE_S}


def run(folder: Path, options: argparse.Namespace, *, kills: bool) -> Run:
    """Trains to the end; with `kills`, under fire."""
    folder.mkdir()
    one = Run(folder)
    batches = options.ranks * options.seconds / (options.batch_ms / 1000)
    command = [sys.executable, "-m", "elche_client", "run", __file__, "--json", "--out", str(folder / "out")]
    command += ["--ranks", str(options.ranks), "--device", "cpu", "--no-logs", "--audit", "true"]
    command += ["--epochs", str(max(1, round(batches / BATCHES_PER_EPOCH)))]
    command += ["--policy", options.policy, "--averaging", options.averaging, "--backend", options.backend]
    command += ["--env", f"CHAOS_NOTES={folder}", "--env", f"CHAOS_BATCH_S={options.batch_ms / 1000}"]
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
    later = [at_s for pid, at_s in one.batches(kill.rank) if at_s > kill.at_s and pid != kill.pid]
    return later[0] - kill.at_s if later else None


def longest_gap_s(one: Run, kill: Kill, ranks: int) -> float:
    """Of the survivors: the longest time between two batches, from the kill until the replacement has settled."""
    until_s = kill.at_s + (back_after_s(one, kill) or 0.0) + SETTLED_S
    gaps = [
        after_s - before_s
        for rank in range(ranks)
        for (pid, before_s), (other, after_s) in pairwise(one.batches(rank))
        if pid == other and pid != kill.pid and after_s > kill.at_s and before_s < until_s
    ]
    return max(gaps, default=0.0)


def is_exact(one: Run) -> bool:
    """Whether every sample of every epoch is in the committed rounds once."""
    message = job_pb2.JobSpec()
    message.ParseFromString((one.folder / "out" / "cadence.binpb").read_bytes())
    seen = Counter(
        (part.epoch, position)
        for recorded in message.replay
        for rank in recorded.parts
        for part in rank.slices
        for position in range(part.offset, part.offset + part.size)
    )
    committed = one.result["committed_samples"]
    size = BATCHES_PER_EPOCH * BATCH_SIZE
    return (
        isinstance(committed, list)
        and set(committed) == {size}
        and len(seen) == sum(committed)
        and set(seen.values()) == {1}
    )


def audited(one: Run) -> dict[str, object]:
    """The auditor's verdict, and what the run has thrown away."""
    verdict = elche_audit.judge(one.folder / "out")
    told = elche_audit.document(verdict)
    thrown = sum(part.samples for part in verdict.thrown)
    return {**{name: told[name] for name in ("verdict", "violations", "missing")}, "thrown_samples": thrown}


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Median and worst, in s."""
    return {"median_s": round(median(values), 3), "worst_s": round(max(values), 3)} if values else None


def trained_s(one: Run, ranks: int) -> float:
    """From the first batch to the last."""
    times = [at_s for rank in range(ranks) for _, at_s in one.batches(rank)]
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
        starts = sum(len({pid for pid, _ in fire.batches(rank)}) for rank in range(ranks))
        undisturbed = [after - before for rank in range(ranks)
                       for (_, before), (_, after) in pairwise(peace.batches(rank))]  # fmt: skip
        figures = {
            "state": fire.result["state"],
            "error": fire.result.get("error", ""),
            "samples_exact": is_exact(fire) if fire.result["state"] == "succeeded" else None,
            "audit": audited(fire),
            "kills": len(fire.kills),
            "gap_of_survivors": spread([longest_gap_s(fire, kill, ranks) for kill in fire.kills]),
            "gap_in_peace": spread(undisturbed),
            "replacement_trains_after": spread([one for one in back if one is not None]),
            "never_replaced": back.count(None),
            "started_again_beside_the_killed": starts - ranks - (len(back) - back.count(None)),
            "speed_relative_to_peace": round(trained_s(peace, ranks) / trained_s(fire, ranks), 3),
            "rounds": [peace.result["rounds"], fire.result["rounds"]],
            "load_average": os.getloadavg()[0],
        }
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
