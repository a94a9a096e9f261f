"""A model with one of everything: tied, frozen and bfloat16 parameters, batch norm, integer and complex buffers."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from elche_worker import TrainingJob

NUM_SAMPLES = 330
NOTES = Path(__file__).with_suffix(f".rank-{os.environ.get('ELCHE_RANK', 'none')}")


class Pair(NamedTuple):
    """Part of a batch."""

    image: torch.Tensor
    label: torch.Tensor


class Animals:
    """Any object with a length and an index will do."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


def collate(indices: list[int]) -> Mapping[str, Any]:
    """A nested batch; sample i is the same on every rank."""
    image = torch.stack([torch.full((8,), (index % 17) / 17) for index in indices])
    label = torch.tensor([[float(index % 2)] for index in indices])
    return {"pairs": [Pair(image, label)], "meta": ({"name": "zoo", "indices": torch.tensor(indices)},)}


class Zoo(nn.Module):
    """One of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, bias=False)
        self.second = nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(8)
        self.coarse = nn.Linear(8, 8).bfloat16()
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(8, dtype=torch.float64))
        self.head = nn.Linear(8, 1)
        self.register_buffer("seen", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("phase", torch.ones(2, dtype=torch.complex64))
        self.register_buffer("flags", torch.zeros(3, dtype=torch.bool))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += len(image)
            self.phase.mul_(1j)
            self.flags[int(self.seen) % 3] ^= True
        hidden = self.norm(self.second(self.first(image)))
        hidden = self.coarse(hidden.bfloat16()).float() + self.frozen(hidden)
        return self.head((hidden * self.scale).float())


def train_step(model: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
    (pair,) = batch["pairs"]
    meta = batch["meta"][0]
    assert meta["name"] == "zoo"
    with NOTES.open("a") as notes:
        notes.write(" ".join(str(int(one)) for one in meta["indices"]) + "\n")
    return nn.functional.mse_loss(model(pair.image), pair.label)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [p for name, p in model.named_parameters() if p.requires_grad and name.endswith("weight")]
    other = [p for name, p in model.named_parameters() if p.requires_grad and not name.endswith("weight")]
    return torch.optim.AdamW([{"params": decayed}, {"params": other, "weight_decay": 0.0}], lr=1e-3)


job = TrainingJob(
    model=Zoo,
    optimizer=optimizer,
    dataset=Animals,
    train_step=train_step,
    collate_fn=collate,
    evaluate=lambda model: {"norm": float(model.norm.running_mean.abs().sum()), "seen": float(model.seen)},
    batch_size=8,
    epochs=2,
    drop_last=True,
    anchor=2,
)
