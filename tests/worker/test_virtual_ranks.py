"""Trainings in virtual time (`benchmarks/virtual_ranks.py`), by which the defaults are chosen, do what ranks do."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from elche_worker import TrainingJob


@pytest.fixture
def virtual_ranks(from_benchmarks: Callable[[str], Any]) -> Any:
    return from_benchmarks("virtual_ranks")


@pytest.fixture
def virtual_peers(from_benchmarks: Callable[[str], Any]) -> Any:
    return from_benchmarks("virtual_peers")


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


WITH_MEAN = 5.0


def normalised(buffers: str) -> TrainingJob:
    """Evaluated by the statistics of the data, whose mean is far from where they begin."""
    x = WITH_MEAN + torch.randn(640, 4, generator=torch.Generator().manual_seed(0))

    def evaluate(model: nn.Module) -> dict[str, float]:
        return {"mean": model[0].running_mean.mean().item(), "batches": model[0].num_batches_tracked.item()}

    return TrainingJob(
        model=lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
        dataset=lambda: TensorDataset(x),
        train_step=lambda model, batch: model(batch[0]).square().mean(),
        evaluate=evaluate,
        batch_size=16,
        epochs=2,
        buffers=buffers,
    )


@pytest.mark.parametrize("buffers", ["average", "from_source", "local"])
def test_results_have_the_statistics_that_the_setting_says(virtual_ranks: Any, buffers: str) -> None:
    *_, last = virtual_ranks.train(normalised(buffers), virtual_ranks.Way(), [1.0, 2.3], seed=1)
    assert last.metrics["mean"] == pytest.approx(WITH_MEAN, abs=0.5)
    assert 20 <= last.metrics["batches"] < 80, "the first rank's, less what it made while rounds were under way"


@pytest.mark.parametrize("peer", ["ddp", "uneven", "local"])
def test_peers_have_one_devices_statistics_or_their_mean(virtual_peers: Any, peer: str) -> None:
    *_, last = virtual_peers.train(normalised("average"), peer, [1.0, 2.3], seed=1)
    assert last.metrics["mean"] == pytest.approx(WITH_MEAN, abs=0.5)
    assert last.metrics["batches"] < 80


class Halved(nn.Linear):
    """Its step changes a frozen parameter by hand, as a momentum encoder's does."""

    def __init__(self) -> None:
        super().__init__(4, 1)
        self.count = nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.count += 1
        return super().forward(x)


def test_frozen_parameters_come_from_one_rank(virtual_ranks: Any) -> None:
    job = replace(regression(), model=Halved, evaluate=lambda model: {"count": model.count.item()})
    *_, last = virtual_ranks.train(job, virtual_ranks.Way(), [1.0, 2.3], seed=1)
    assert last.metrics["count"] == int(last.metrics["count"]), "no mean, and no gain"
    assert 30 < last.metrics["count"] < 120, "the first rank's, less what it made while rounds were under way"


def by_hand(model: nn.Module, batch: list[torch.Tensor], optimizer: torch.optim.Optimizer) -> torch.Tensor:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss


def test_steps_by_hand_do_what_others_do(virtual_ranks: Any, virtual_peers: Any) -> None:
    ways: list[Callable[[TrainingJob], Any]] = [
        lambda job: virtual_ranks.train(job, virtual_ranks.Way(), [1.0, 2.3], seed=1),
        lambda job: virtual_peers.train(job, "ddp", [1.0, 2.3], seed=1),
        lambda job: virtual_peers.train(job, "local", [1.0, 2.3], seed=1),
    ]
    job = replace(regression(), epochs=1)
    for way in ways:
        *_, usual = way(job)
        *_, last = way(replace(job, train_step=by_hand, manual_optimization=True))
        assert last.metrics["loss"] == pytest.approx(usual.metrics["loss"], rel=1e-3)


def test_devices_read_shards_of_their_own_and_each_sample_once(virtual_ranks: Any, virtual_peers: Any) -> None:
    numbers = torch.arange(12)
    job = replace(regression(), dataset=lambda: virtual_ranks.InShards([4, 4, 4], numbers), epochs=1)
    samples = virtual_peers.Samples(job, seed=1)
    read: list[list[int]] = [[], []]
    while samples.taken < samples.total:
        for device in (0, 1):
            read[device] += samples.take(3, device)[0].tolist()
    assert sorted(read[0] + read[1]) == list(range(12))
    for one in read:
        assert all(now == before + 1 or now % 4 == 0 for before, now in pairwise(one))


def test_ranks_train_each_sample_of_shards_once(virtual_ranks: Any) -> None:
    seen: list[int] = []

    def count(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        seen.extend(batch[2].tolist())
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    job = regression()
    x, y = job.dataset().tensors
    sizes, numbers = [40] * 16, torch.arange(640)
    job = replace(job, dataset=lambda: virtual_ranks.InShards(sizes, x, y, numbers), train_step=count, epochs=2)
    virtual_ranks.train(job, virtual_ranks.Way(), [1.0, 2.3], seed=1)
    assert sorted(seen) == sorted([*range(640)] * 2)
