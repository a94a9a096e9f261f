"""The moving average of the weights (`ema`): how it moves, who has it, and where it takes the weights' place."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from elche.errors import InvalidJob
from elche.manifest import EMA
from elche_worker.model.mean import mean_in_model
from elche_worker.rank.acts import UseResult
from elche_worker.rank.best import keep_best
from elche_worker.rank.replica import Replica
from support.replicas import Make, Rank, World, weight, written
from support.solo import JOB, SIZE

FINAL = UseResult(round=2, version=2, evaluates=True, epoch=0, offset=0, size=0, calls_back=False, saves_final=True)


def mean(rank: Rank) -> torch.Tensor:
    return rank.replica.averaging.reduction.mean()["weight"].clone()


def test_it_decays_by_the_batches_that_a_round_has_of_all_ranks(world: Make) -> None:
    """Also where a rank has none, and bit for bit the same on all of them."""
    ranks = world(2, ema=0.9, averaging="blocking")
    ranks.round(1)
    expected = weight(ranks.ranks[0])
    for round_id, batches in enumerate(((3, 2), (1, 0), (0, 0), (2, 2)), start=2):
        for rank, num_batches in zip(ranks.ranks, batches, strict=True):
            rank.train(num_batches)
        ranks.round(round_id)
        kept = 0.9 ** sum(batches)
        expected = kept * expected + (1 - kept) * weight(ranks.ranks[0])
        assert torch.allclose(mean(ranks.ranks[0]), expected, atol=1e-6)
        assert torch.equal(mean(ranks.ranks[0]), mean(ranks.ranks[1]))
    assert not torch.allclose(expected, weight(ranks.ranks[0]), atol=1e-3)


def test_it_follows_the_results_and_not_what_a_rank_trains_on_meanwhile(world: Make) -> None:
    ranks = world(2, ema=0.5)
    ranks.round(1)
    begun = mean(ranks.ranks[0])
    for rank in ranks.ranks:
        rank.train(1)
    ranks.round(2, 4, 0)
    result = ranks.ranks[0].replica.layout.result_views()["weight"]
    assert torch.allclose(mean(ranks.ranks[0]), 0.25 * begun + 0.75 * result, atol=1e-6)
    assert not torch.equal(weight(ranks.ranks[0]), result)


def test_without_the_setting_there_is_none(world: Make) -> None:
    ranks = world(1)
    ranks.round(1)
    assert ranks.ranks[0].replica.averaging.reduction.mean() == {}
    ranks.ranks[0].train(1)
    ranks.all(lambda at, rank: rank.enter(2, may_be_checkpoint=True))
    ranks.all(lambda at, rank: rank.replica.apply_result())
    loaded = written(ranks.ranks[0].replica, 2)
    assert loaded.mean == {}
    assert not (Path(loaded.path) / EMA).exists()


def test_it_is_what_is_evaluated_and_the_final_model_and_training_goes_on_from_the_weights(
    world: Make, tmp_path: Path
) -> None:
    seen: list[torch.Tensor] = []

    def evaluate(model: Any) -> dict[str, float]:
        seen.append(model.weight.detach().clone())
        return {"one": 1.0}

    ranks = world(2, ema=0.5, evaluate=evaluate)
    ranks.round(1)
    for rank in ranks.ranks:
        rank.train(2)
    ranks.round(2, 3, 0)
    rank = ranks.ranks[0]
    trained, result = weight(rank), rank.replica.layout.result_views()["weight"].clone()
    rank.replica.use_result(FINAL)
    assert torch.equal(seen[0], mean(rank))
    assert torch.equal(load_file(tmp_path / "model.safetensors")["weight"], mean(rank))
    assert torch.equal(weight(rank), trained)
    assert torch.equal(rank.replica.layout.result_views()["weight"], result)


def test_a_rank_that_joins_gets_it(world: Make) -> None:
    first, second = world(1, ema=0.9), world(1, ema=0.9)
    first.round(1)
    for round_id in (2, 3):
        first.ranks[0].train(2)
        first.round(round_id)
    both = World([*first.ranks, *second.ranks])
    both.all(lambda at, rank: rank.join(2, at, 2))
    both.ranks[0].train(1)
    before = mean(both.ranks[0])
    both.round(4)
    assert torch.equal(mean(both.ranks[0]), mean(both.ranks[1]))
    assert torch.allclose(mean(both.ranks[0]), 0.9 * before + 0.1 * weight(both.ranks[1]), atol=1e-6)


def trained(world: Make, **options: Any) -> tuple[World, Any]:
    """A rank after three rounds, and the checkpoint of the last one."""
    ranks = world(1, averaging="blocking", **options)
    ranks.round(1)
    for round_id in (2, 3):
        ranks.ranks[0].train(2)
        ranks.all(lambda at, rank: rank.enter(round_id, may_be_checkpoint=round_id == 3))  # noqa: B023
        ranks.all(lambda at, rank: rank.replica.apply_result())
    return ranks, written(ranks.ranks[0].replica, 3, training='{"version": 3, "samples": 16}')


def test_a_resumed_training_goes_on_with_it_bit_for_bit(world: Make, tmp_path: Path) -> None:
    first, loaded = trained(world, ema=0.9)
    assert torch.equal(loaded.weights["weight"], weight(first.ranks[0]))
    assert torch.equal(loaded.model["weight"], mean(first.ranks[0]))
    assert torch.equal(load_file(Path(loaded.path) / EMA)["weight"], mean(first.ranks[0]))
    keep_best(tmp_path / "model.safetensors", loaded.path, restores=False)
    assert torch.equal(load_file(tmp_path / "best.safetensors")["weight"], mean(first.ranks[0]))
    again = world(1, averaging="blocking", ema=0.9, loaded=loaded)
    again.ranks[0].num_leased = first.ranks[0].num_leased
    again.round(4)
    for those, round_id in ((first, 4), (again, 5)):
        those.ranks[0].train(3)
        those.round(round_id)
    assert torch.equal(weight(again.ranks[0]), weight(first.ranks[0]))
    assert torch.equal(mean(again.ranks[0]), mean(first.ranks[0]))


@pytest.mark.parametrize(
    ("then", "now", "said"),
    [
        (0.9, None, "has a moving average of the weights (ema), which the job does not use"),
        (None, 0.9, "has no moving average of the weights (ema): it begins at the checkpoint's weights"),
        (None, None, ""),
    ],
)
def test_a_checkpoint_of_a_job_with_another_setting_is_resumed_and_it_is_said(
    world: Make, capsys: pytest.CaptureFixture[str], then: float | None, now: float | None, said: str
) -> None:
    first, loaded = trained(world, ema=then)
    again = world(1, averaging="blocking", ema=now, loaded=loaded)
    assert said in capsys.readouterr().out.replace("\n", " ")
    again.round(4)
    assert torch.equal(weight(again.ranks[0]), weight(first.ranks[0]))
    assert not now or torch.equal(mean(again.ranks[0]), weight(first.ranks[0]))


def test_it_has_the_precision_of_rounds_and_leaves_the_model_as_it_was(world: Make) -> None:
    """In 8 bits of a bfloat16 an average with such a decay would never move."""

    def model() -> nn.Module:
        built = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)).to(torch.bfloat16)
        nn.init.ones_(built[1].weight)  # type: ignore[arg-type]
        return built

    def train_step(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(model(batch[0].bfloat16()), batch[1].bfloat16())

    ranks = world(1, model=model, train_step=train_step, ema=0.999)
    ranks.round(1)
    ranks.ranks[0].train(4)
    ranks.round(2)
    replica: Replica = ranks.ranks[0].replica
    kept = replica.averaging.reduction.mean()
    assert kept.keys() == {"0.weight", "0.bias", "0.running_mean", "0.running_var", "1.weight", "1.bias"}
    assert {one.dtype for one in kept.values()} == {torch.float32}
    assert 0 < (kept["1.weight"] - 1).abs().max() < 2**-9
    before = replica.layout.digest()
    with mean_in_model(replica.layout, kept):
        inside: Any = replica.model
        assert torch.equal(inside[1].weight, torch.ones(1, 3, dtype=torch.bfloat16))
        assert inside[0].num_batches_tracked == 4
        assert replica.layout.digest() != before
    assert replica.layout.digest() == before


def test_optimizer_moments_that_rounds_average_are_not_part_of_it(world: Make) -> None:
    momentum = {"optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)}
    ranks = world(1, optimizer_state="average", ema=0.9, **momentum)
    ranks.round(1)
    ranks.ranks[0].train(1)
    ranks.round(2)
    assert ranks.ranks[0].replica.averaging.reduction.mean().keys() == {"weight", "bias"}


# One process, without rounds


def test_in_one_process_it_moves_after_each_batch_and_a_short_one_counts_less() -> None:
    seen: list[torch.Tensor] = []

    def train_step(model: Any, batch: Any) -> torch.Tensor:
        seen.append(model.weight.detach().clone())
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    evaluated: list[torch.Tensor] = []
    job = replace(JOB, train_step=train_step, batch_size=300, epochs=1, evaluate=lambda model: {"one": 1.0})
    seen.append(job.run(device="cpu").params["weight"])
    begun, after_whole, after_rest = seen

    def evaluate(model: Any) -> dict[str, float]:
        evaluated.append(model.weight.detach().clone())
        return {"one": 1.0}

    state = replace(job, ema=0.9, evaluate=evaluate).run(device="cpu")
    wanted = begun.lerp(after_whole, 1 - 0.9).lerp(after_rest, 1 - 0.9 ** (100 / 300))
    assert torch.equal(state.params["weight"], wanted)
    assert torch.equal(evaluated[0], wanted)


def test_one_process_and_one_rank_that_averages_after_each_batch_have_the_same(world: Make) -> None:
    state = replace(JOB, ema=0.99, epochs=1).run(device="cpu")
    ranks = world(1, ema=0.99, epochs=1, policy="sync")
    ranks.round(1)
    for round_id in range(2, 2 + SIZE // JOB.batch_size):  # type: ignore[operator]
        ranks.ranks[0].train(1)
        ranks.round(round_id)
    assert torch.equal(mean(ranks.ranks[0]), state.params["weight"])


# What is refused


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"ema": 1}, "ema must be below 1, not 1"),
        ({"ema": -0.1}, "ema must be at least 0, not -0.1"),
        ({"ema": "much"}, "ema must be a number or None, not 'much'"),
        ({"ema": 0.9, "group_size": 2, "shard": "full_shard"}, "ema=0.9 does not work with shard yet"),
    ],
)
def test_a_decay_that_cannot_work_is_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidJob, match=says):
        replace(JOB, **values)
