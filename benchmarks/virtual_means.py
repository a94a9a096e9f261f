"""Ways to average that were tried beside elche's (`virtual_convergence`), and are no part of it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

REFERENCE_BATCHES = 10.0
"""Work for which momentum and decay are said: so many batches at the job's learning rate."""


@dataclass(frozen=True, slots=True)
class ByWork:
    """Outer Nesterov whose momentum and rate follow the round's work, and end with the training.

    A round of half the work keeps the square root of the momentum; near the end no momentum reaches past the last
    round. What is kept is a mean of steps, so that each step is made `total` times in the end, whatever the momentum.
    """

    total: float
    momentum: float

    def num_moments(self) -> int:
        return 1

    def at(self, work: float, rounds_to_come: float) -> "Nesterovs":
        """The outer optimizer of a round; `work` in batches at the job's learning rate."""
        momentum = self.momentum ** (work / REFERENCE_BATCHES)
        return Nesterovs(self.total, min(momentum, 1 - 1 / (1 + max(rounds_to_come, 0.0))))


@dataclass(frozen=True, slots=True)
class Nesterovs:
    """One step of `ByWork`."""

    total: float
    momentum: float

    def num_moments(self) -> int:
        return 1

    def step(self, last: torch.Tensor, average: torch.Tensor, moments: list[torch.Tensor], num_steps: int) -> None:
        step = average - last
        kept = moments[0].mul_(self.momentum).add_(step, alpha=1 - self.momentum)
        ahead = self.momentum * kept + (1 - self.momentum) * step
        average.copy_(last + self.total * ahead)


def apart(
    average: torch.Tensor,
    last: torch.Tensor,
    shares: Sequence[float],
    brought: Sequence[torch.Tensor],
    shapes: Sequence[tuple[int, int]],
) -> None:
    """Averages directions and norms apart: unit steps of each row, as long as the mean of lengths.

    `shapes` are (rows, values of a row) of the parts of which the tensors are made.
    """
    sizes = [rows * values for rows, values in shapes]
    steps = [torch.split(values - last, sizes) for values in brought]
    for at, (before, out) in enumerate(zip(last.split(sizes), average.split(sizes), strict=True)):
        parts = torch.stack([step[at].view(shapes[at]) for step in steps])
        weights = torch.tensor(shares).view(-1, 1, 1)
        norms = parts.norm(dim=2, keepdim=True)
        direction = (weights * parts / norms.clamp(min=1e-12)).sum(0)
        length = (weights * norms).sum(0)
        moved = direction * (length / direction.norm(dim=1, keepdim=True).clamp(min=1e-12))
        out.copy_(before + moved.reshape(-1))


class Ema:
    """Exponential moving average of the results, by work; what would be exported beside the last one."""

    def __init__(self, decay: float) -> None:
        self._decay, self._values = decay, torch.empty(0)

    def add(self, values: torch.Tensor, work: float) -> torch.Tensor:
        """The average after a round of so much work."""
        if not len(self._values):
            self._values = values.clone()
        keep = math.pow(self._decay, work / REFERENCE_BATCHES)
        self._values.lerp_(values, 1 - keep)
        return self._values
