"""A deep linear net on inputs whose scales differ thirtyfold: steep and flat directions, SGD with momentum."""

import torch
from quality._common import Samples, job_of, momentum_sgd
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from virtual_tasks import Task

WIDTH, NUM_OUTPUTS = 16, 4
NUM_SAMPLES, NUM_HELD_OUT = 6400, 4000
NOISE = 0.1


def samples(seed: int) -> Samples:
    noise = torch.Generator().manual_seed(seed)
    scales = torch.logspace(0, -1.5, WIDTH)
    x = torch.randn(NUM_SAMPLES + NUM_HELD_OUT, WIDTH, generator=noise) * scales
    y = x @ (torch.randn(WIDTH, NUM_OUTPUTS, generator=noise) / scales.unsqueeze(1)) / WIDTH**0.5
    return x, y + NOISE * torch.randn(y.shape, generator=noise)


def build_model() -> nn.Module:
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)]
    for one in layers:
        nn.init.orthogonal_(one.weight)
    return nn.Sequential(*layers, nn.Linear(WIDTH, NUM_OUTPUTS, bias=False))


def loss(model: nn.Module, batch: Samples) -> Tensor:
    return mse_loss(model(batch[0]), batch[1])


TASK = Task(
    title="steep deep linear net",
    rate=0.05,
    job=job_of(samples, NUM_HELD_OUT, model=build_model, optimizer=momentum_sgd, loss=loss, batch_size=16),
)
