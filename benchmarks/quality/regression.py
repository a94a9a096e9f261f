"""Regression of a smooth function of eight variables by a small net, with Adam; no sample is seen twice."""

import torch
from quality._common import Samples, adam, job_of
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from virtual_tasks import Task

NUM_INPUTS, WIDTH = 8, 48
NUM_SAMPLES, NUM_HELD_OUT = 6400, 4000


def samples(seed: int) -> Samples:
    noise = torch.Generator().manual_seed(seed)
    x = torch.rand(NUM_SAMPLES + NUM_HELD_OUT, NUM_INPUTS, generator=noise) * 2 - 1
    waves = torch.randn(NUM_INPUTS, 3, generator=noise)
    y = torch.sin(x @ waves).sum(1, keepdim=True) + x.square().sum(1, keepdim=True)
    return x, y + 0.1 * torch.randn(y.shape, generator=noise)


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(NUM_INPUTS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)
    )


def loss(model: nn.Module, batch: Samples) -> Tensor:
    return mse_loss(model(batch[0]), batch[1])


TASK = Task(
    title="regression, small net, Adam",
    rate=2e-2,
    job=job_of(samples, NUM_HELD_OUT, model=build_model, optimizer=adam, loss=loss, batch_size=16),
)
