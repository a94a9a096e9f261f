"""One fault after the other in a run of three ranks, SIGKILL of one, or SIGSTOP and later SIGCONT: what does it cost?

Runs `elche run` on this file; a batch is a sleep. Prints a JSON object with median and worst of: the longest gap
between two batches of a survivor, when the rank was lost or left out, when the next round was committed, and when the
rank trained again, after its death or after SIGCONT.

    python benchmarks/one_fault.py                # five kills: a minute
    python benchmarks/one_fault.py --fault stop
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from elche_worker import TrainingJob

RANKS = 3
BATCH_SIZE = 16
BATCH_S = 0.025
BATCHES_PER_EPOCH = 200
EVERY_S = 8.0
"""Between two faults."""
STOPPED_S = 4.0
SETTLED_S = 1.0
"""How long after the rank's return a gap of the others still counts."""

NOTES = os.environ.get("FAULT_NOTES", "")
RANK = os.environ.get("ELCHE_RANK", "")


def train_step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    time.sleep(BATCH_S)
    with open(f"{NOTES}/rank-{RANK}", "a") as notes:
        notes.write(f"{os.getpid()} {time.monotonic()}\n")
    loss: torch.Tensor = model(batch).square().mean()
    return loss


job = TrainingJob(
    model=lambda: nn.Linear(8, 1),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.001),
    dataset=lambda: torch.randn(BATCHES_PER_EPOCH * BATCH_SIZE, 8, generator=torch.Generator().manual_seed(0)),
    train_step=train_step,
    batch_size=BATCH_SIZE,
    epochs=1,
)

Batches = list[tuple[int, float]]
"""(process id, time in s) of each."""


def batches_of(folder: Path, rank: int) -> Batches:
    """But for the first one of a process that was started while others trained: that is on trial."""
    path = folder / f"rank-{rank}"
    rows = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    made = [(int(pid), float(at_s)) for pid, at_s in rows]
    first = {pid: (pid, at_s) for pid, at_s in reversed(made) if pid != made[0][0]}
    return [one for one in made if one != first.get(one[0])]


class Run:
    """The run, whose events come with the time at which they were read."""

    def __init__(self, folder: Path, seconds: float, backend: str) -> None:
        epochs = max(1, round(seconds * RANKS / BATCH_S / BATCHES_PER_EPOCH))
        command = [sys.executable, "-m", "elche_client", "run", __file__, "--events", "--out", str(folder / "out")]
        command += ["--ranks", str(RANKS), "--device", "cpu", "--no-logs", "--backend", backend]
        command += ["--epochs", str(epochs), "--env", f"FAULT_NOTES={folder}"]
        self.folder = folder
        self.events: list[tuple[float, dict[str, Any]]] = []
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self._reading = threading.Thread(target=self._read)
        self._reading.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.append((time.monotonic(), json.loads(line)))

    def wait(self) -> dict[str, Any]:
        self.process.wait()
        self._reading.join()
        return self.events[-1][1]

    def first_after(self, kind: str, at_s: float) -> float | None:
        """Seconds from a moment to the first event of a kind."""
        later = [event_s for event_s, event in self.events if event["event"] == kind and event_s > at_s]
        return later[0] - at_s if later else None


def strike(run: Run, fault: str, rank: int) -> tuple[int, float]:
    """The process that is hit, and when."""
    pid = batches_of(run.folder, rank)[-1][0]
    at_s = time.monotonic()
    os.kill(pid, signal.SIGSTOP if fault == "stop" else signal.SIGKILL)
    if fault == "stop":
        time.sleep(STOPPED_S)
        os.kill(pid, signal.SIGCONT)
    return pid, at_s


def longest_gap_s(run: Run, rank: int, at_s: float, until_s: float) -> float:
    """Of the other ranks, between two batches from the fault on."""
    gaps = [
        after_s - before_s
        for other in range(RANKS)
        if other != rank
        for (pid, before_s), (next_pid, after_s) in pairwise(batches_of(run.folder, other))
        if pid == next_pid and after_s > at_s and before_s < until_s
    ]
    return max(gaps)


def spread(values: Sequence[float | None]) -> dict[str, float | int]:
    known = [one for one in values if one is not None]
    figures = {"median_s": round(median(known), 2), "worst_s": round(max(known), 2)} if known else {}
    return {**figures, "missing": len(values) - len(known)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", choices=["kill", "stop"], default="kill")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    dice = random.Random(options.seed)
    every_s = EVERY_S + (STOPPED_S if options.fault == "stop" else 0.0)
    with tempfile.TemporaryDirectory() as name:
        run = Run(Path(name), (options.times + 0.5) * every_s, options.backend)
        while any(len(batches_of(run.folder, rank)) < 100 for rank in range(RANKS)):
            time.sleep(0.1)
        faults = []
        for _ in range(options.times):
            rank = dice.randrange(RANKS)
            faults.append((rank, *strike(run, options.fault, rank)))
            time.sleep(max(0.0, faults[-1][2] + every_s * dice.uniform(0.9, 1.1) - time.monotonic()))
        result = run.wait()
        back, gaps = [], []
        for rank, pid, at_s in faults:
            later = [batch_s for one, batch_s in batches_of(run.folder, rank) if batch_s > at_s and one != pid]
            from_s = at_s + (STOPPED_S if options.fault == "stop" else 0.0)
            back.append(later[0] - from_s if later else None)
            gaps.append(longest_gap_s(run, rank, at_s, from_s + (back[-1] or 0.0) + SETTLED_S))
        figures = {
            "state": result["state"],
            "faults": len(faults),
            "samples_exact": set(result["committed_samples"]) == {BATCHES_PER_EPOCH * BATCH_SIZE},
            "longest_gap_of_survivors": spread(gaps),
            "left_out_or_lost_after": spread([run.first_after("membership", at_s) for _, _, at_s in faults]),
            "next_round_committed_after": spread([run.first_after("round", at_s) for _, _, at_s in faults]),
            "trains_again_after": spread(back),
        }
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
