"""A small model, its data, and plain PyTorch to compare loops with."""

from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from elche_worker.collectives import gradients
from elche_worker.trainer import Trainer

NAMES = ("inputs", "labels")

# So that a small model has several buckets, which may leave during backward, on every rank that runs what is here. Set
# by some tests alone, it would stay in the processes that have run those, and a later world has ranks without it.
gradients.FIRST_BUCKET_BYTES, gradients.BUCKET_BYTES = 200, 400


def new_model(seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def samples(count: int, seed: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(count, 6, generator=generator), torch.randint(0, 3, (count,), generator=generator))


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([one.detach().reshape(-1) for one in model.parameters()])


def train_alone(dataset: TensorDataset, batch_sizes: list[int], model: nn.Module | None = None) -> torch.Tensor:
    """Plain PyTorch on one process: the samples in order, in batches of these sizes."""
    model = model or new_model()
    optimizer = new_optimizer(model)
    at = 0
    for size in batch_sizes:
        inputs, labels = dataset[at : at + size]
        at += size
        cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return flat(model)


def close(one: torch.Tensor, other: torch.Tensor, tolerance: float = 1e-6) -> bool:
    return bool(torch.allclose(one, other, rtol=0, atol=tolerance))


class Uneven:
    """Gives ranks these sizes of each batch."""

    def __init__(self, trainer: Trainer, ratios: list[float]) -> None:
        planner: Any = trainer._stepper.planner
        planner._ratios = ratios
        planner._decided.decide(0, ratios, 0)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.encoder = nn.Linear(6, 4)
        self.cell = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.encoder(inputs)
        for _ in range(3):
            hidden = torch.tanh(self.cell(hidden))
        result: torch.Tensor = self.head(hidden)
        return result


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor, scale: torch.Tensor, bias: float = 0.0) -> torch.Tensor:
        result: torch.Tensor = self.linear(inputs) * scale + bias
        return result


def dicts(**more: Any) -> list[dict[str, Any]]:
    inputs, labels = samples(8).tensors
    return [{"picture": inputs[one], "scale": torch.ones(1), "labels": labels[one], **more} for one in range(8)]
