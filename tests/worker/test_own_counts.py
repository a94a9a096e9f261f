"""A step that sets learning rates itself, or counts batches in the model, is told once: each rank has its own count."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from elche_worker.user.own_counts import WATCHED_BATCHES
from support.replicas import Make
from support.solo import JOB


class Falling(SGD):
    """Lowers its rates itself."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] *= 0.9
        return super().step(closure)


def by_hand() -> dict[str, Any]:
    """As scripts do that look for the optimizer's groups in the loop's body."""
    made: list[Optimizer] = []

    def optimizer(model: nn.Module) -> Optimizer:
        made.append(SGD(model.parameters(), lr=0.1))
        return made[-1]

    def train_step(model: nn.Module, batch: Any) -> torch.Tensor:
        for group in made[-1].param_groups:
            group["lr"] = 0.05
        return JOB.train_step(model, batch)

    return {"optimizer": optimizer, "train_step": train_step}


SET = "the learning rate was 0.1 before train_step and is {} after it"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (by_hand, SET.format("0.05")),
        (lambda: {"optimizer": lambda model: Falling(model.parameters(), lr=0.1)}, SET.format("0.09")),
        (lambda: {"optimizer": lambda model: SGD(model.parameters(), lr=torch.tensor(0.1))}, ""),
        (dict, ""),
    ],
    ids=["by hand", "by the optimizer", "a tensor that stays", "not at all"],
)
def test_a_rate_that_the_step_sets_is_told_once(
    world: Make, changes: Callable[[], dict[str, Any]], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (rank,) = world(1, **changes()).ranks
    rank.train(WATCHED_BATCHES // 4)
    told = capsys.readouterr().err
    assert told.count("the learning rate was") == bool(said)
    assert said in told


def test_rates_are_looked_at_in_the_first_batches_alone(world: Make, capsys: pytest.CaptureFixture[str]) -> None:
    (rank,) = world(1).ranks
    rank.train(WATCHED_BATCHES)
    assert rank.replica._own_counts.batch() is rank.replica._own_counts.batch()
    assert not capsys.readouterr().err


class Warming(nn.Module):
    """Counts its batches, as for the weight of a KL term or a temperature."""

    def __init__(self, by: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 1), nn.BatchNorm1d(1))
        self.by = by
        self.register_buffer("num_batches", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.num_batches += self.by
        y: torch.Tensor = self.inner(x)
        return y


@pytest.mark.parametrize("by", [0, 1])
def test_a_counter_of_the_model_is_told_once(world: Make, by: int, capsys: pytest.CaptureFixture[str]) -> None:
    (rank,) = world(1, model=lambda: Warming(by)).ranks
    rank.train(3)
    told = capsys.readouterr().err
    assert told.count("the model's num_batches counts batches") == by
    assert "num_batches_tracked" not in told
