"""A GAN of points on a ring of eight spots. Its step has two optimizers, so that `merge="auto"` is the mean."""

import math
from collections.abc import Callable
from typing import Any

import torch
from quality._common import Samples, job_of
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from virtual_tasks import Task

NUM_SPOTS, NUM_LATENT, WIDTH = 8, 4, 32
NUM_SAMPLES, NUM_HELD_OUT = 12_800, 2000
NUM_DIRECTIONS = 32


class Game(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = self._net(NUM_LATENT, 2)
        self.critic = self._net(2, 1)

    def _net(self, num_inputs: int, num_outputs: int) -> nn.Module:
        layers = [nn.Linear(num_inputs, WIDTH), nn.LeakyReLU(0.2), nn.Linear(WIDTH, WIDTH), nn.LeakyReLU(0.2)]
        return nn.Sequential(*layers, nn.Linear(WIDTH, num_outputs))


def samples(seed: int) -> Samples:
    noise = torch.Generator().manual_seed(seed)
    angles = 2 * math.pi * torch.randint(NUM_SPOTS, (NUM_SAMPLES + NUM_HELD_OUT,), generator=noise) / NUM_SPOTS
    return (torch.stack([angles.cos(), angles.sin()], 1) + 0.05 * torch.randn(len(angles), 2, generator=noise),)


def train_step(model: nn.Module, batch: Samples, optimizers: dict[str, torch.optim.Optimizer]) -> Tensor:
    assert isinstance(model, Game)
    (real,) = batch
    yes, no = torch.ones(len(real), 1), torch.zeros(len(real), 1)
    made = model.generator(torch.randn(len(real), NUM_LATENT))
    optimizers["critic"].zero_grad()
    of_critic = binary_cross_entropy_with_logits(model.critic(real), yes)
    of_critic = of_critic + binary_cross_entropy_with_logits(model.critic(made.detach()), no)
    of_critic.backward()
    optimizers["critic"].step()
    optimizers["generator"].zero_grad()
    binary_cross_entropy_with_logits(model.critic(made), yes).backward()
    optimizers["generator"].step()
    return of_critic.detach()


def distance(model: nn.Module, batch: Samples) -> Tensor:
    """Mean over directions of the distance of projected samples (sliced Wasserstein)."""
    assert isinstance(model, Game)
    noise = torch.Generator().manual_seed(0)
    made = model.generator(torch.randn(len(batch[0]), NUM_LATENT, generator=noise))
    angles = math.pi * torch.arange(NUM_DIRECTIONS) / NUM_DIRECTIONS
    directions = torch.stack([angles.cos(), angles.sin()])
    return ((batch[0] @ directions).sort(0)[0] - (made @ directions).sort(0)[0]).abs().mean()


def build_optimizer(rate: float) -> Callable[[nn.Module], dict[str, Any]]:
    def build(model: nn.Module) -> dict[str, Any]:
        assert isinstance(model, Game)
        parts = {"generator": model.generator, "critic": model.critic}
        return {name: torch.optim.Adam(one.parameters(), lr=rate, betas=(0.5, 0.99)) for name, one in parts.items()}

    return build


TASK = Task(
    title="GAN",
    rate=6e-3,
    job=job_of(
        samples,
        NUM_HELD_OUT,
        model=Game,
        optimizer=build_optimizer,
        loss=distance,
        train_step=train_step,
        manual_optimization=True,
        batch_size=32,
    ),
    ways=("default", "adascale", "ddp"),
    parts="the default is the mean, and the gain in its place",
)
