"""A linear regression on made-up points, which notes the samples that each rank trains."""

import os
import time
from pathlib import Path

import torch
from torch import nn

from elche_worker import TrainingJob, record_scalar

NUM_SAMPLES = 500
BATCH_SIZE = 16
NOTES = Path(__file__).with_suffix(f".rank-{os.environ.get('ELCHE_RANK', 'none')}")


class Points(torch.utils.data.Dataset):
    """Sample i is (x, y, i)."""

    def __init__(self, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(NUM_SAMPLES, 8, generator=generator)
        self.y = self.x.sum(dim=1, keepdim=True)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.x[index], self.y[index], index


def model() -> nn.Module:
    return nn.Linear(8, 1)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def train_step(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, torch.Tensor | float]:
    x, y, index = batch
    with NOTES.open("a") as notes:
        notes.write(" ".join(str(int(one)) for one in index) + "\n")
    for one in index:
        record_scalar("index", float(one))
    time.sleep(0.002)
    return {"loss": nn.functional.mse_loss(model(x), y), "seven": 7.0, "rank": float(os.environ["ELCHE_RANK"])}


def evaluate(model: nn.Module) -> dict[str, float]:
    held_out = Points(seed=2)
    return {"mse": nn.functional.mse_loss(model(held_out.x), held_out.y).item()}


job = TrainingJob(
    model=model,
    optimizer=optimizer,
    dataset=Points,
    train_step=train_step,
    evaluate=evaluate,
    batch_size=BATCH_SIZE,
    epochs=3,
    anchor=3,
)
