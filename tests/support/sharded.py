"""Models, losses and optimizers for tests of sharding, and every strategy in worlds of two and four."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from elche.errors import Misuse
from elche_worker.sharding import Strategy

CLOSE = {"rtol": 1e-5, "atol": 1e-6}
NUM_STEPS = 10
MAX_NORM = 0.02
STRATEGIES = [
    *((world_size, strategy) for world_size in (2, 4) for strategy in (Strategy.FULL_SHARD, Strategy.SHARD_GRAD_OP)),
    *((world_size, Strategy.NO_SHARD) for world_size in (2, 4)),
    *((world_size, Strategy.HYBRID_SHARD(intra_node_size=size)) for world_size, size in ((2, 1), (4, 2))),
]
ALL_OF_TWO = [strategy for world_size, strategy in STRATEGIES if world_size == 2]


class Uneven(nn.Module):
    """No size divides by 2 or 4; one parameter has one value, one is transposed in memory, one is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 3)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)) for _ in range(2)])
        self.blocks[0][0].weight = nn.Parameter(torch.rand(3, 5).t())
        self.scale = nn.Parameter(torch.rand(1))
        self.register_buffer("shift", torch.rand(3))
        self.register_buffer("mask", torch.rand(7) > 0.5)
        self.output = nn.Linear(3, 7)
        self.output.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens) + self.shift
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.output(hidden * self.scale)


class Branching(nn.Module):
    """Takes the ways that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)])
        self.last = nn.Linear(3, 2)

    def forward(self, inputs: Tensor, ways: list[int]) -> Tensor:
        for way in ways:
            inputs = torch.tanh(self.ways[way](inputs))
        return self.last(inputs)


def build(kind: type[nn.Module], seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return kind()


def tokens(rank: int, step: int) -> Tensor:
    return torch.randint(7, (6,), generator=torch.Generator().manual_seed(1000 * rank + step))


def loss_of(output: Tensor, inputs: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, inputs.roll(1))


def whole(parameters: Any) -> list[Tensor]:
    """Gradients, gathered."""
    return [parameter.grad.full_tensor() for parameter in parameters]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def many_at_once(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, foreach=True)


def has_whole_parameters(module: nn.Module) -> bool:
    return not any(isinstance(parameter, DTensor) for parameter in module.parameters())


def refused(function: Callable[..., Any], *arguments: Any) -> str:
    """What the `Misuse` says that the call raises."""
    try:
        function(*arguments)
    except Misuse as error:
        return str(error)
    return "not refused"


class Deep(nn.Module):
    """Blocks a little over the size of a unit, between layers under it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 512)
        self.blocks = nn.ModuleList([nn.Linear(512, 512) for _ in range(3)])
        self.last = nn.Sequential(nn.Linear(512, 1), nn.Tanh())

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return self.last(hidden)
