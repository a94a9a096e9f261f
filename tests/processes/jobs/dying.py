"""A model whose parameters count samples, on ranks that note what they do, and that die where a test wants them to."""

import json
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn

from elche_worker import TrainingJob

NUM_SAMPLES = 960
RANK = int(os.environ.get("ELCHE_RANK", "-1"))
FOLDER = Path(__file__).parent
NOTES = FOLDER / f"rank-{RANK}"
IS_FIRST = not NOTES.exists()
"""Whether this is the rank's first process."""
BATCH_S = 0.05
"""How long a batch takes, until the file `hurry` is there."""
DIES_AT: dict[int, int] = {}
"""At the end of which batch a rank's first process dies, by rank."""
AWAITS = 0
"""How many batches the others are to make before a process that is started again has its data set."""
GIVE_UP_S = 100.0
num_trained = 0


def note(kind: str, *values: object) -> None:
    """One line: [kind, process id, time in s, values...]."""
    with NOTES.open("a") as notes:
        notes.write(json.dumps([kind, os.getpid(), time.monotonic(), *values]) + "\n")


def die() -> None:
    note("dies")
    os.kill(os.getpid(), signal.SIGKILL)


def die_once(kind: str) -> None:
    """The first process of all ranks that comes here dies."""
    try:
        (FOLDER / f"dying-{kind}").touch(exist_ok=False)
    except FileExistsError:
        return
    note("dies")
    (FOLDER / f"died-{kind}").touch()
    os.kill(os.getpid(), signal.SIGKILL)


def others_go_on(num_batches: int) -> None:
    """Waits until each rank whose first process lives has made so many batches more: who waits for this one never does.

    Raises `TimeoutError` when they do not.
    """
    before, deadline_s = batches_of_others(), time.monotonic() + GIVE_UP_S
    while any(before.get(rank, 0) + num_batches > count for rank, count in batches_of_others().items()):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"the others have not made {num_batches} batches: do they wait for rank {RANK}?")
        time.sleep(0.02)


def batches_of_others() -> dict[str, int]:
    """How many batches the first processes have made that live."""
    found = {}
    for path in FOLDER.glob("rank-[0-9]"):
        notes = [json.loads(line) for line in path.read_text().splitlines()]
        is_alone = len({pid for _, pid, *_ in notes}) == 1
        if path != NOTES and is_alone and Path(f"/proc/{notes[0][1]}/cwd").exists():
            found[path.name] = sum(kind == "batch" for kind, *_ in notes)
    return found


def dataset() -> list[int]:
    if RANK >= 0 and not IS_FIRST:
        others_go_on(AWAITS)
    return list(range(NUM_SAMPLES))


def warm_up() -> None:
    """What the first batch of a process costs that is started while others train."""


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(NUM_SAMPLES))


def train_step(model: Counts, batch: torch.Tensor) -> torch.Tensor:
    global num_trained
    if not (FOLDER / "hurry").exists():
        time.sleep(BATCH_S)
    if not IS_FIRST and num_trained == 0:
        warm_up()  # where others train; its gradients are dropped
    else:
        note("batch")
    if IS_FIRST and DIES_AT.get(RANK) == num_trained:
        die()
    num_trained += 1
    return -model.counts[batch].sum()


if RANK >= 0:
    note("starts")

job = TrainingJob(
    model=Counts,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
    dataset=dataset,
    train_step=train_step,
    batch_size=16,
    epochs=16,
    anchor=4,
    merge="mean",
)
