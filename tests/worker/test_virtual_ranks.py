"""Trainings in virtual time (`benchmarks/virtual_ranks.py`), by which the defaults are chosen, do what ranks do."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from elche_worker import TrainingJob

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def virtual_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import virtual_ranks

    yield virtual_ranks
    for name in ("virtual_ranks", "virtual_means"):
        del sys.modules[name]


def regression() -> TrainingJob:
    x = torch.randn(640, 4, generator=torch.Generator().manual_seed(0))
    y = x.sum(1, keepdim=True)
    return TrainingJob(
        model=lambda: nn.Linear(4, 1),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
        dataset=lambda: TensorDataset(x, y),
        train_step=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        evaluate=lambda model: {"loss": nn.functional.mse_loss(model(x), y).item()},
        batch_size=16,
        epochs=3,
    )


@pytest.mark.parametrize("averaging", ["overlapped", "blocking"])
def test_unequal_ranks_learn_in_virtual_time(virtual_ranks: Any, averaging: str) -> None:
    way = virtual_ranks.Way(averaging=averaging)
    *_, last = virtual_ranks.train(regression(), way, [1.0, 2.3], seed=1)
    assert last.samples == 3 * 640
    assert last.metrics["loss"] < 0.01
