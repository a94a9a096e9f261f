"""A deep linear net on inputs whose scales differ thirtyfold: steep and flat directions, SGD with momentum."""

import torch
from quality._common import Samples, job_of, sgd
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from virtual_tasks import Task

from elche_worker import TrainingJob

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


def job(rate: float, seed: int, length: float) -> TrainingJob:
    return job_of(
        samples(seed),
        num_held_out=NUM_HELD_OUT,
        length=length,
        model=build_model,
        optimizer=sgd(rate, momentum=0.9),
        loss=loss,
        batch_size=16,
    )


TASK = Task(title="steep deep linear net", metric="loss", rate=0.05, job=job, grows=True)
