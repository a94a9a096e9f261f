"""Poisson regression whose rates are sums of weights of at least a small number: the optimizer projects after each
step, and the loss is not defined outside.
"""

from collections.abc import Callable
from typing import Any

import torch
from quality._common import Samples, job_of
from torch import Tensor, nn
from virtual_tasks import Task

NUM_INPUTS, LEAST = 40, 0.003
NUM_SAMPLES, NUM_HELD_OUT = 4800, 8000


class ProjectedSGD(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        returned = super().step(closure)
        for group in self.param_groups:
            for one in group["params"]:
                one.clamp_(min=LEAST)
        return returned


class Rates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.full((NUM_INPUTS, 1), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weights).squeeze(1)


def samples(seed: int) -> Samples:
    """Which inputs are on, always one at least; and counts. Most weights are 0."""
    noise = torch.Generator().manual_seed(seed)
    weights = torch.rand(NUM_INPUTS, generator=noise) * (torch.rand(NUM_INPUTS, generator=noise) < 0.3)
    num = NUM_SAMPLES + NUM_HELD_OUT
    x = (torch.rand(num, NUM_INPUTS, generator=noise) < 0.1).float()
    x[torch.arange(num), torch.randint(NUM_INPUTS, (num,), generator=noise)] = 1.0
    return x, torch.poisson(x @ weights + 0.05, generator=noise)


def loss(model: nn.Module, batch: Samples) -> Tensor:
    rates_n = model(batch[0])
    return (rates_n - batch[1] * rates_n.log()).mean()


def build_optimizer(rate: float) -> Callable[[nn.Module], ProjectedSGD]:
    return lambda model: ProjectedSGD(model.parameters(), lr=rate)


TASK = Task(
    title="constrained weights, projection",
    rate=0.03,
    job=job_of(samples, NUM_HELD_OUT, model=Rates, optimizer=build_optimizer, loss=loss, batch_size=8),
)
