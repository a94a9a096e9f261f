"""A net that solves an oscillator's equation, in float64 with LBFGS, which calls its closure several times a step. The
simulator has no loops of the user's own: this is the job's own step (`manual_optimization`) instead.
"""

from collections.abc import Callable

import torch
from quality._common import Samples, job_of
from torch import Tensor, nn
from virtual_tasks import Task

WIDTH, END_S, DAMPING = 16, 4.0, 0.3
NUM_SAMPLES, NUM_HELD_OUT = 3200, 400


def exact(t: Tensor) -> Tensor:
    """x'' + 2 d x' + x = 0 with x(0) = 1 and x'(0) = -d."""
    return torch.exp(-DAMPING * t) * torch.cos((1 - DAMPING**2) ** 0.5 * t)


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(1, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)
    ).double()


def samples(seed: int) -> Samples:
    noise = torch.Generator().manual_seed(seed)
    return (END_S * torch.rand(NUM_SAMPLES + NUM_HELD_OUT, 1, generator=noise, dtype=torch.float64),)


def loss(model: nn.Module, batch: Samples) -> Tensor:
    """How far the equation and the first values are from being met."""
    t = torch.cat([torch.zeros(1, 1, dtype=torch.float64), batch[0]]).requires_grad_()
    x = model(t)
    speed = torch.autograd.grad(x.sum(), t, create_graph=True)[0]
    change = torch.autograd.grad(speed.sum(), t, create_graph=True)[0]
    first = (x[0] - 1).square() + (speed[0] + DAMPING).square()
    return (change + 2 * DAMPING * speed + x)[1:].square().mean() + first.sum()


def train_step(model: nn.Module, batch: Samples, optimizer: torch.optim.Optimizer) -> Tensor:
    def closure() -> float:
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        return value.item()

    return torch.tensor(optimizer.step(closure))


def error(model: nn.Module, batch: Samples) -> Tensor:
    return (model(batch[0]) - exact(batch[0])).square().mean()


def build_optimizer(rate: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.LBFGS(model.parameters(), lr=rate, max_iter=4, history_size=10)


TASK = Task(
    title="float64 physics, LBFGS",
    rate=0.2,
    job=job_of(
        samples,
        NUM_HELD_OUT,
        model=build_model,
        optimizer=build_optimizer,
        loss=error,
        train_step=train_step,
        manual_optimization=True,
        batch_size=32,
    ),
    grows=False,
)
