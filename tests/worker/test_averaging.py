"""Rounds over real gloo groups: weighted, spread by the first, bitwise equal, and refused when they do not fit."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch import nn

from elche_worker.rank.averaging import Averaging, Row
from elche_worker.rank.group import Group, GroupFailed
from elche_worker.rank.layout import Layout


def wait(done: threading.Event) -> None:
    assert done.wait(20)


def row(layout: Layout, **changes: int) -> Row:
    values = {
        "attempt": 1,
        "generation": 1,
        "round": 1,
        "layout_hash": layout.hash,
        "weight": 1,
        "finite": 1,
        "cut": 0,
        "local_step": 0,
        "compute_us": 0,
        "version": 1,
    }
    return Row(**{**values, **changes})


def round_of(models: list[nn.Module], rows: Callable[[int, Layout], Row]) -> list[list[Row]]:
    """One round with a thread for each rank; applies the result."""
    store = dist.HashStore()

    def one(position: int) -> list[Row]:
        group = Group(store, attempt=1, generation=1, position=position, size=len(models), peer="127.0.0.1:1")
        layout = Layout(models[position])
        averaging = Averaging(layout, wake=lambda: None, wait=wait)
        averaging.start(group, rows(position, layout), keeps_snapshot=False)
        return averaging.complete(has_newer_steps=False).rows

    with ThreadPoolExecutor(len(models)) as threads:
        return [future.result() for future in [threads.submit(one, position) for position in range(len(models))]]


def weights(*values: float) -> list[nn.Module]:
    models: list[nn.Module] = []
    for value in values:
        model = nn.Linear(3, 2)
        nn.init.constant_(model.weight, value)
        models.append(model)
    return models


def test_the_average_is_weighted_by_samples() -> None:
    models = weights(1.0, 2.0, 4.0)
    headers = round_of(models, lambda position, layout: row(layout, weight=[64, 128, 64][position], cut=position))
    assert headers[0] == headers[1] == headers[2]
    assert [one.cut for one in headers[0]] == [0, 1, 2]
    for model in models:
        assert torch.equal(model.weight, torch.full((2, 3), 2.25))


def test_results_are_bitwise_equal_on_every_member() -> None:
    torch.manual_seed(0)
    models: list[nn.Module] = [nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)) for _ in range(3)]
    models[1][1].num_batches_tracked.fill_(99)  # type: ignore[index, union-attr]
    round_of(models, lambda position, layout: row(layout, weight=17 * position + 5))
    digests = {Layout(model).digest() for model in models}
    assert len(digests) == 1


def test_the_first_round_gives_everybody_the_source() -> None:
    models = weights(1.5, 2.0, 4.0)
    round_of(models, lambda position, layout: row(layout, weight=0, version=0))
    assert [model.weight[0, 0].item() for model in models] == [1.5, 1.5, 1.5]  # type: ignore[index]


def test_a_newcomer_with_nan_receives_and_does_not_spread_it() -> None:
    models = weights(1.0, float("nan"), 3.0)
    header = round_of(
        models, lambda position, layout: row(layout, weight=[1, 0, 1][position], version=[5, 0, 5][position])
    )[0]
    assert [model.weight[0, 0].item() for model in models] == [2.0, 2.0, 2.0]  # type: ignore[index]
    assert all(one.finite for one in header)


def test_values_that_are_not_finite_are_flagged() -> None:
    models = weights(1.0, float("inf"))
    header = round_of(models, lambda position, layout: row(layout))[0]
    assert [one.finite for one in header] == [1, 0]


def test_ranks_with_other_models_or_other_rounds_are_refused() -> None:
    with pytest.raises(GroupFailed, match="the models of ranks 0 and 1 differ"):
        round_of(weights(1.0, 2.0), lambda position, layout: row(layout, layout_hash=position))
    with pytest.raises(GroupFailed, match="met in different rounds: 7 and 8"):
        round_of(weights(1.0, 2.0), lambda position, layout: row(layout, round=7 + position))


def test_one_rank_alone_keeps_its_parameters() -> None:
    models = weights(0.1)
    round_of(models, lambda position, layout: row(layout, weight=64))
    assert models[0].weight[0, 0].item() == pytest.approx(0.1)  # type: ignore[index]


def test_an_overlapped_result_is_a_correction_that_keeps_newer_steps() -> None:
    store = dist.HashStore()
    models = weights(1.0, 3.0)
    may_finish = threading.Barrier(2)

    def one(position: int) -> None:
        group = Group(store, attempt=1, generation=1, position=position, size=2, peer="127.0.0.1:1")
        layout = Layout(models[position])
        averaging = Averaging(layout, wake=lambda: None, wait=wait)
        averaging.start(group, row(layout), keeps_snapshot=True)
        with torch.no_grad():
            models[position].weight.add_(10.0)  # type: ignore[operator, union-attr]
        may_finish.wait(20)
        averaging.complete(has_newer_steps=True)

    with ThreadPoolExecutor(2) as threads:
        for future in [threads.submit(one, position) for position in range(2)]:
            future.result()
    for model in models:
        assert torch.equal(model.weight, torch.full((2, 3), 12.0))
