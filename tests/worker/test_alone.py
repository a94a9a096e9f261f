"""A rank that is alone in its group keeps a copy of its result only where somebody may ask for it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from support.device_ranks import Rank, alone, new_rank
from support.simulated_cuda import Device


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """A device on which nothing may have gone wrong at the test's end."""
    with Device().in_order(monkeypatch) as device:
        yield device


def values(model: nn.Module) -> torch.Tensor:
    return torch.cat([one.detach().cpu().reshape(-1) for one in model.parameters()])


def told(rank: Rank) -> list[str | None]:
    """What the rank has said, when it has written all checkpoints."""
    rank.replica.checkpoints.writer._thread.shutdown(wait=True)
    return [one.WhichOneof("message") for one in rank.said]


def test_an_evaluation_sees_the_result_although_the_rank_has_trained_on(device: Device, tmp_path: Path) -> None:
    """Of the round in which it has trained all that it had: an epoch may end there."""
    seen: list[torch.Tensor] = []

    def evaluate(model: nn.Module) -> dict[str, float]:
        seen.append(values(model))
        return {}

    with new_rank(tmp_path, alone(), evaluate=evaluate) as rank:
        rank.round()
        result = values(rank.replica.model)
        rank.train(2)
        newest = values(rank.replica.model)
        rank.look(evaluates=True)
        assert torch.equal(seen[0], result)
        assert torch.equal(values(rank.replica.model), newest)
        assert not torch.equal(result, newest)


@pytest.mark.parametrize("num_newer", [0, 1])
def test_a_result_that_nobody_was_to_ask_for_is_the_model_until_the_rank_trains_on(
    device: Device, tmp_path: Path, num_newer: int
) -> None:
    """It becomes a late checkpoint as it is, and none afterwards: its samples would count twice."""
    with new_rank(tmp_path, alone()) as rank:
        rank.enter()  # of a new group, in which a lost rank's evaluation may be asked for
        rank.hold()
        rank.lease(1)
        rank.round()
        assert not rank.replica.layout.has_result
        rank.train(num_newer)
        rank.write()
        assert told(rank) == ["checkpoint_failed" if num_newer else "checkpoint_saved"]
        assert rank.said[0].checkpoint_failed.is_late == bool(num_newer)
