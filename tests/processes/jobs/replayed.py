"""A model with all that draws random numbers or has a state: what a replay must repeat, on ranks that die."""

import os
import signal
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

from elche_worker import TrainingJob

NUM_SAMPLES = 960
RANK = int(os.environ.get("ELCHE_RANK", "-1"))
NOTES = Path(__file__).parent / "notes"
"""Without this folder, as in a replay, nobody dies or waits."""
BATCH_S = 0.05
"""How long a batch takes until the last process that is to train has trained."""
DIES_AT = {1: 30}
"""In which batch a rank's first process dies."""
IS_FIRST = NOTES.exists() and not (NOTES / f"rank-{RANK}").exists()
if NOTES.exists() and RANK >= 0:
    (NOTES / f"rank-{RANK}").touch()
num_trained = 0


class Noisy(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self) -> None:
        self.inputs = torch.randn(NUM_SAMPLES, 12, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index] + 0.01 * torch.randn(12), self.inputs[index, :3].argmax()


def train_step(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    global num_trained
    num_trained += 1
    if NOTES.exists():
        act_as_told()
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels)


def act_as_told() -> None:
    if not (NOTES / "back").exists():
        time.sleep(BATCH_S)
    if IS_FIRST and DIES_AT.get(RANK) == num_trained:
        os.kill(os.getpid(), signal.SIGKILL)
    if not IS_FIRST and num_trained == 8:
        (NOTES / "back").touch()


def evaluate(model: nn.Module) -> dict[str, float]:
    torch.rand(3)  # which training does not get
    return {"sum": float(sum(one.sum() for one in model.parameters()))}


job = TrainingJob(
    model=lambda: nn.Sequential(nn.Linear(12, 33), nn.BatchNorm1d(33), nn.Dropout(0.3), nn.ReLU(), nn.Linear(33, 3)),
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    dataset=Noisy,
    train_step=train_step,
    evaluate=evaluate,
    batch_size=16,
    epochs=16,
    anchor=4,
)
