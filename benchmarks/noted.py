"""A job whose batches are sleeps, and a note of each: which process of which rank has made it, and when.

NOTED_FOLDER   where the notes go
NOTED_BATCH_S  seconds of a batch
NOTED_BATCHES  batches of an epoch
"""

import os
import time
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

from elche_worker import TrainingJob

BATCH_SIZE = 16
BATCH_S = float(os.environ.get("NOTED_BATCH_S", "0"))
NUM_SAMPLES = BATCH_SIZE * int(os.environ.get("NOTED_BATCHES", "100"))

Batches = list[tuple[int, float]]
"""(process id, time in s) of each."""


def train_step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    time.sleep(BATCH_S)
    with open(f"{os.environ['NOTED_FOLDER']}/rank-{os.environ['ELCHE_RANK']}", "a") as notes:
        notes.write(f"{os.getpid()} {time.monotonic()}\n")
    loss: torch.Tensor = model(batch).square().mean()
    return loss


job = TrainingJob(
    model=lambda: nn.Linear(8, 1),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.001),
    dataset=lambda: torch.randn(NUM_SAMPLES, 8, generator=torch.Generator().manual_seed(0)),
    train_step=train_step,
    batch_size=BATCH_SIZE,
    epochs=1,
)


def environment(folder: Path, batch_s: float, num_batches: int) -> dict[str, str]:
    """The job's variables."""
    return {"NOTED_FOLDER": str(folder), "NOTED_BATCH_S": str(batch_s), "NOTED_BATCHES": str(num_batches)}


def all_batches(folder: Path, rank: int | str = "*") -> Batches:
    """The batches of a rank, or of all ranks, in order for each rank."""
    rows = [line.split() for path in folder.glob(f"rank-{rank}") for line in path.read_text().splitlines()]
    return [(int(pid), float(at_s)) for pid, at_s in rows]


def batches(folder: Path, rank: int) -> Batches:
    """The batches of a rank but for the first one of each later process: who joins others makes it on trial."""
    made = all_batches(folder, rank)
    first = {pid: (pid, at_s) for pid, at_s in reversed(made) if pid != made[0][0]}
    return [one for one in made if one != first.get(one[0])]


def longest_gap_s(folder: Path, ranks: Iterable[int], pid: int, since_s: float, until_s: float) -> float:
    """The longest time between two batches of one process of these ranks, except `pid`, that is partly in this time."""
    gaps = [
        after_s - before_s
        for rank in ranks
        for (one, before_s), (other, after_s) in pairwise(batches(folder, rank))
        if one == other != pid and after_s > since_s and before_s < until_s
    ]
    return max(gaps, default=0.0)
