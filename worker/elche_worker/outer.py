"""Outer optimizers, which step on the average of a round (DiLoCo, Douillard et al., arXiv 2311.08105).

The step from the last result to the average is used as a gradient (the pseudo-gradient), from which the outer optimizer
makes the next result. Every rank computes it from equal values, by single additions and multiplications, so that
results are equal bit for bit also on processors that fuse them differently.
"""

import math
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from elche.errors import InvalidJob


class OuterOptimizer(Protocol):
    """Computes the next result from the last one and the average."""

    def num_moments(self) -> int:
        """Number of tensors of the parameters' size in its state."""

    def step(self, last: torch.Tensor, average: torch.Tensor, moments: list[torch.Tensor], num_steps: int) -> None:
        """Turns `average` into the next result, in place, and updates the moments. `num_steps` counts from 1."""


@dataclass(frozen=True, slots=True)
class Average:
    """The result is the average itself."""

    def num_moments(self) -> int:
        return 0

    def step(self, last: torch.Tensor, average: torch.Tensor, moments: list[torch.Tensor], num_steps: int) -> None:
        return


@dataclass(frozen=True, slots=True)
class SGD:
    """SGD on the pseudo-gradient: `lr` times the step from the last result to the average, with momentum."""

    lr: float = 1.0
    momentum: float = 0.0

    def __post_init__(self) -> None:
        _check(self, lr=math.inf, momentum=1.0)

    def num_moments(self) -> int:
        return 1 if self.momentum else 0

    def step(self, last: torch.Tensor, average: torch.Tensor, moments: list[torch.Tensor], num_steps: int) -> None:
        step = average.sub_(last)
        if self.momentum:
            step = moments[0].mul_(self.momentum).add_(step)
        average.copy_(step).mul_(self.lr).add_(last)


@dataclass(frozen=True, slots=True)
class Nesterov:
    """SGD with Nesterov momentum; the defaults are DiLoCo's."""

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        _check(self, lr=math.inf, momentum=1.0)

    def num_moments(self) -> int:
        return 1

    def step(self, last: torch.Tensor, average: torch.Tensor, moments: list[torch.Tensor], num_steps: int) -> None:
        step = average.sub_(last)
        ahead = moments[0].mul_(self.momentum).add_(step).mul(self.momentum)
        step.add_(ahead).mul_(self.lr).add_(last)


@dataclass(frozen=True, slots=True)
class Adam:
    """Adam on the pseudo-gradient (FedAdam, Reddi et al., arXiv 2003.00295)."""

    lr: float = 0.01
    betas: tuple[float, float] = field(default=(0.9, 0.99))
    eps: float = 1e-3

    def __post_init__(self) -> None:
        _check(self, lr=math.inf, eps=math.inf)
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise InvalidJob(f"outer_optimizer: betas must be at least 0 and below 1, not {self.betas}")

    def num_moments(self) -> int:
        return 2

    def step(self, last: torch.Tensor, average: torch.Tensor, moments: list[torch.Tensor], num_steps: int) -> None:
        first, second = moments
        step = average.sub_(last)
        first.mul_(self.betas[0]).add_(step.mul(1 - self.betas[0]))
        second.mul_(self.betas[1]).add_(step.mul_(step).mul_(1 - self.betas[1]))
        # Multiplied, since a GPU divides by multiplying with the inverse as float32: ranks would differ.
        mean = first.mul(1 / (1 - self.betas[0] ** num_steps))
        size = second.mul(1 / (1 - self.betas[1] ** num_steps)).sqrt_().add_(self.eps)
        average.copy_(mean.div_(size)).mul_(self.lr).add_(last)


def _check(optimizer: Any, **limits: float) -> None:
    """Raises `InvalidJob` unless each named field is above 0 (momentum: at least 0) and below its limit."""
    for name, limit in limits.items():
        value = getattr(optimizer, name)
        is_number = isinstance(value, int | float) and math.isfinite(value)
        least_ok = is_number and (value >= 0 if name == "momentum" else value > 0)
        if not least_ok or value >= limit:
            raise InvalidJob(f"outer_optimizer: {type(optimizer).__name__} cannot work with {name}={value!r}")
