"""Kills the coordinator of a job that trains, starts it again later, and measures what that costs.

A batch is a sleep; two ranks, 2.3:1. Prints a JSON object for each time away: batches per second from the kill until
two seconds after the new start, as a fraction of those before; ranks that were started again; and whether every sample
was committed exactly once.

    python benchmarks/outage.py                          # 3 s at defaults, 30 s with ride_out_s=35: 2 minutes
    python benchmarks/outage.py --away 3 --ride-out 10 --times 5
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from elche_client import Client
from elche_worker import TrainingJob

BATCH_SIZE = 16
BATCH_S = 0.02
SLOW = 2.3
BEFORE_S = 8.0
AFTER_S = 2.0

NOTES = os.environ.get("OUTAGE_NOTES", "")
RANK = os.environ.get("ELCHE_RANK", "")
BATCHES = int(os.environ.get("OUTAGE_BATCHES", "100"))


def train_step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    time.sleep(BATCH_S)
    with open(f"{NOTES}/rank-{RANK}", "a") as notes:
        notes.write(f"{os.getpid()} {time.monotonic()}\n")
    return model(batch).square().mean()


job = TrainingJob(
    model=lambda: nn.Linear(8, 1),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.001),
    dataset=lambda: torch.randn(BATCHES * BATCH_SIZE, 8, generator=torch.Generator().manual_seed(0)),
    train_step=train_step,
    batch_size=BATCH_SIZE,
    epochs=1,
)


def notes_of(folder: Path) -> list[tuple[int, float]]:
    """(process id, time in s) of every batch."""
    rows = [line.split() for path in folder.glob("rank-*") for line in path.read_text().splitlines()]
    return [(int(pid), float(at_s)) for pid, at_s in rows]


def start_coordinator(folder: Path, listen: str) -> "tuple[subprocess.Popen[str], str]":
    """A coordinator, and its address."""
    command = [sys.executable, "-m", "elche_coordinator", "--listen", listen, "--http", "127.0.0.1:0"]
    with (folder / "coordinator.log").open("a") as log:
        process = subprocess.Popen(
            [*command, "--data", str(folder / "data")], stdout=subprocess.PIPE, stderr=log, text=True
        )
    assert process.stdout is not None
    return process, process.stdout.readline().split()[-1]


def measure(folder: Path, away_s: float, ride_out_s: float, policy: str) -> dict[str, object]:
    """One run with one outage."""
    notes = folder / "notes"
    notes.mkdir()
    rate = (1 + 1 / SLOW) / BATCH_S
    num_batches = round(rate * (BEFORE_S + away_s + AFTER_S + 15.0))
    coordinator, address = start_coordinator(folder, "127.0.0.1:0")
    command = [sys.executable, "-m", "elche_worker.agent", "--coordinator", address, "--devices", "cpu,cpu"]
    with (folder / "agent.log").open("w") as log:
        agent = subprocess.Popen([*command, "--work-dir", str(folder / "work")], stderr=log)
    try:
        client = Client(address, reconnect_s=away_s + 60)
        environment = {"OUTAGE_NOTES": str(notes), "OUTAGE_BATCHES": str(num_batches)}
        handle = client.submit(
            __file__,
            num_ranks=2,
            slow_factors={1: SLOW},
            environment=environment,
            ride_out_s=ride_out_s,
            policy=policy,
        )
        while len(notes_of(notes)) < 5 * rate:
            time.sleep(0.1)
        began_s = time.monotonic()
        time.sleep(BEFORE_S)
        killed_s = time.monotonic()
        os.kill(coordinator.pid, signal.SIGKILL)
        coordinator.wait()
        time.sleep(away_s)
        coordinator, _ = start_coordinator(folder, address)
        back_s = time.monotonic()
        time.sleep(AFTER_S)
        end_s = time.monotonic()
        result = client.job(handle.id).result()
    finally:
        agent.send_signal(signal.SIGKILL)
        agent.wait()
        coordinator.kill()
        coordinator.wait()
    made = notes_of(notes)
    before = sum(began_s <= at_s < killed_s for _, at_s in made) / (killed_s - began_s)
    during = sum(killed_s <= at_s < end_s for _, at_s in made) / (end_s - killed_s)
    return {
        "away_s": round(back_s - killed_s, 2),
        "ride_out_s": ride_out_s,
        "throughput_fraction": round(during / before, 4),
        "ranks_started_again": len({pid for pid, _ in made}) - 2,
        "exact": result.committed_samples == (num_batches * BATCH_SIZE,) and len(made) == num_batches,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--away", type=float, help="seconds until the coordinator starts again")
    parser.add_argument("--ride-out", type=float, default=10.0, help="ride_out_s of the job")
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--policy", default="cadence")
    options = parser.parse_args(arguments)
    cases = [(3.0, 10.0), (30.0, 35.0)] if options.away is None else [(options.away, options.ride_out)]
    for away_s, ride_out_s in cases * options.times:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measure(Path(folder), away_s, ride_out_s, options.policy)), flush=True)


if __name__ == "__main__":
    main()
