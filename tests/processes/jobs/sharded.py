"""A small regression whose model is divided among the processes of a replica group, some of which get no row of it."""

import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from elche_worker import TrainingJob

NUM_SAMPLES = 500
NOTES = Path(__file__).with_suffix(f".rank-{os.environ.get('ELCHE_RANK', 'none')}")


class Net(nn.Module):
    """Sizes that no group divides evenly, a frozen layer, buffers, and a row too few for every process."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(8, 13), nn.Tanh(), nn.Linear(13, 7), nn.Tanh())
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.head = nn.Linear(7, 1)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
        hidden = self.blocks(x)
        return self.head(hidden + self.frozen(hidden))


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_SAMPLES, 8, generator=generator)
    return TensorDataset(x, x.sum(dim=1, keepdim=True).tanh(), torch.arange(NUM_SAMPLES))


def train_step(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    x, y, index = batch
    if "NOTE" in os.environ:
        with NOTES.open("a") as notes:
            notes.write(" ".join(str(int(one)) for one in index) + "\n")
    time.sleep(float(os.environ.get("SLEEP_S", "0.002")))
    return nn.functional.mse_loss(model(x), y)


def evaluate(model: nn.Module) -> dict[str, float]:
    x, y, _ = dataset().tensors
    return {"mse": nn.functional.mse_loss(model(x), y).item()}


job = TrainingJob(
    model=Net,
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    dataset=dataset,
    train_step=train_step,
    evaluate=evaluate,
    batch_size=16,
    epochs=3,
    anchor=3,
    group_size=2,
    shard="full_shard",
)
