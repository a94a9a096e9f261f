"""Regression on an embedding of many rows, most of which come seldom, with Adagrad."""

from collections.abc import Callable

import torch
from quality._common import Samples, job_of
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from virtual_tasks import Task

NUM_ROWS, WIDTH = 2000, 8
NUM_SAMPLES, NUM_HELD_OUT = 12_000, 2000
NOISE = 0.1


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(NUM_ROWS, WIDTH)
        self.out = nn.Linear(WIDTH, 1)
        nn.init.normal_(self.rows.weight, std=0.01)

    def forward(self, rows_n: Tensor) -> Tensor:
        y: Tensor = self.out(self.rows(rows_n))
        return y.squeeze(1)


def samples(seed: int) -> Samples:
    """Rows, of which the first come most often, and a value of each with noise."""
    noise = torch.Generator().manual_seed(seed)
    rows = (torch.rand(NUM_SAMPLES, generator=noise).pow(4) * NUM_ROWS).long()
    values = torch.randn(NUM_ROWS, generator=noise)
    return rows, values[rows] + NOISE * torch.randn(NUM_SAMPLES, generator=noise)


def adagrad(rate: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.Adagrad(model.parameters(), lr=rate)


def loss(model: nn.Module, batch: Samples) -> Tensor:
    return mse_loss(model(batch[0]), batch[1])


TASK = Task(
    title="embedding, rare rows, Adagrad",
    rate=0.3,
    job=job_of(samples, NUM_HELD_OUT, model=Rows, optimizer=adagrad, loss=loss, batch_size=20),
)
