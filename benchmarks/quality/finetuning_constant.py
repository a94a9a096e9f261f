"""Fine-tuning from a pretrained optimum at a constant rate: a net that fits one function learns one that is near it,
from noisy samples. Judged without the noise.
"""

from functools import cache
from typing import Any

import torch
from quality._common import Samples, adam, job_of
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from virtual_tasks import Task

NUM_INPUTS, WIDTH = 6, 32
NUM_SAMPLES, NUM_HELD_OUT = 8000, 4000
NOISE, CHANGE = 0.5, 0.3


def waves(x: Tensor, seed: int) -> Tensor:
    return torch.sin(x @ torch.randn(NUM_INPUTS, 3, generator=torch.Generator().manual_seed(seed))).sum(1, keepdim=True)


def samples(seed: int) -> Samples:
    """Inputs, noisy targets, and exact ones."""
    noise = torch.Generator().manual_seed(seed)
    x = torch.rand(NUM_SAMPLES + NUM_HELD_OUT, NUM_INPUTS, generator=noise) * 2 - 1
    y = waves(x, -1) + CHANGE * waves(x, seed)
    return x, y + NOISE * torch.randn(y.shape, generator=noise), y


def new_net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(NUM_INPUTS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)
    )


@cache
def pretrained() -> dict[str, Any]:
    """The state of a net that fits the first function."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = new_net()
        x = torch.rand(2000, NUM_INPUTS) * 2 - 1
    y, optimizer = waves(x, -1), torch.optim.Adam(net.parameters(), lr=1e-2)
    for step in range(500):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (1 - step / 500)
        optimizer.zero_grad()
        mse_loss(net(x), y).backward()
        optimizer.step()
    return net.state_dict()


def build_model() -> nn.Module:
    net = new_net()
    net.load_state_dict(pretrained())
    return net


def loss(model: nn.Module, batch: Samples) -> Tensor:
    return mse_loss(model(batch[0]), batch[1])


def exact_loss(model: nn.Module, batch: Samples) -> Tensor:
    return mse_loss(model(batch[0]), batch[2])


TASK = Task(
    title="fine-tuning, constant rate",
    rate=4e-4,
    job=job_of(
        samples,
        NUM_HELD_OUT,
        model=build_model,
        optimizer=adam,
        loss=loss,
        metric=exact_loss,
        batch_size=16,
        schedule=None,
    ),
)
