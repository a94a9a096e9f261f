"""Frozen parameters that a job leaves out of its files (`save_frozen=False`), and the model that is whole again."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from elche.errors import InvalidJob
from elche_worker.model.checkpoint import Loaded
from elche_worker.model.frozen import DIGEST
from elche_worker.model.layout import Layout
from elche_worker.model.state import load_state
from elche_worker.rank.acts import UseResult
from elche_worker.rank.best import keep_best
from support.replicas import Make, World, written
from support.solo import JOB

FINAL = UseResult(round=2, version=2, evaluates=False, epoch=0, offset=0, size=0, calls_back=False, saves_final=True)


class Adapted(nn.Module):
    """A frozen base, a part of which is tied to another, and an adapter that is trained."""

    def __init__(self, base: float = 2.0) -> None:
        super().__init__()
        self.base, self.again, self.adapter = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1)
        self.again.weight = self.base.weight
        nn.init.constant_(self.base.weight, base)
        self.base.requires_grad_(False)
        self.again.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        adapted: torch.Tensor = self.adapter(self.again(self.base(x)))
        return adapted


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.01)


ADAPTED: dict[str, Any] = {"model": Adapted, "save_frozen": False, "optimizer": sgd}


def trained(world: Make, **options: Any) -> tuple[World, Loaded]:
    """A rank after two rounds, which has saved its model, and the checkpoint of the last one."""
    ranks = world(1, **ADAPTED | options)
    ranks.round(1)
    ranks.ranks[0].train(2)
    ranks.all(lambda at, rank: rank.enter(2, may_be_checkpoint=True))
    ranks.all(lambda at, rank: rank.replica.apply_result())
    ranks.ranks[0].replica.use_result(FINAL)
    return ranks, written(ranks.ranks[0].replica, 2, training='{"version": 2, "samples": 8}')


def built() -> nn.Module:
    """As every rank builds it."""
    torch.manual_seed(JOB.seed)
    return Adapted()


def test_files_have_what_is_trained_and_a_digest_of_the_rest(world: Make, tmp_path: Path) -> None:
    ranks, loaded = trained(world)
    path = tmp_path / "model.safetensors"
    keep_best(path, loaded.path, restores=False)
    for file in (path, tmp_path / "best.safetensors", Path(loaded.path) / "model.safetensors"):
        assert load_file(file).keys() == {"adapter.weight", "adapter.bias"}
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {DIGEST: loaded.frozen}
        whole = built()
        load_state(whole, file)
        assert Layout(whole).digest() == ranks.ranks[0].replica.layout.digest()
        elsewhere = built()
        elsewhere.load_state_dict(load_file(file), strict=False)
        assert torch.equal(elsewhere.adapter.weight, whole.adapter.weight)  # type: ignore[union-attr, arg-type]


def test_a_file_is_not_read_into_a_model_with_another_base(world: Make, tmp_path: Path) -> None:
    trained(world)
    other = Adapted(base=3.0)
    with pytest.raises(InvalidJob, match=r"model.safetensors is without its frozen parameters .* the same base"):
        load_state(other, tmp_path / "model.safetensors")


@pytest.mark.parametrize("save_frozen", [False, True])
def test_a_resumed_training_takes_its_own_base(world: Make, save_frozen: bool) -> None:
    first, loaded = trained(world)
    again = world(1, loaded=loaded, **ADAPTED | {"save_frozen": save_frozen})
    again.round(3)
    assert again.ranks[0].replica.layout.digest() == first.ranks[0].replica.layout.digest()


WRAPPED = "_checkpoint_wrapped_module."


class Recomputed(Adapted):
    """The base computes its activations again in backward, and so its parameters have other names than in the state."""

    def __init__(self, base: float = 2.0) -> None:
        super().__init__(base)
        block = nn.Sequential(self.base, nn.BatchNorm1d(3), nn.Linear(3, 3))
        self.base: Any = checkpoint_wrapper(block)  # type: ignore[no-untyped-call, assignment]


@pytest.mark.parametrize("ema", [None, 0.5])
def test_a_model_whose_state_has_other_names_is_saved_as_others_are(ema: float | None, world: Make) -> None:
    """Frozen parameters were in the files all the same, so that none could be resumed from; checkpoints had weights and
    statistics of a rank's newer steps in place of the round's, and no moving average of them.
    """
    parts = ADAPTED | {"model": Recomputed, "ema": ema}
    ranks = world(1, **parts)
    replica = ranks.ranks[0].replica
    ranks.round(1)
    ranks.ranks[0].train(2)
    ranks.all(lambda at, rank: rank.enter(2, may_be_checkpoint=True))
    result = {name: one.clone() for name, one in replica.model.state_dict().items()}
    ranks.ranks[0].train(1)
    ranks.all(lambda at, rank: rank.replica.apply_result())
    means = {name.replace(WRAPPED, ""): one for name, one in replica.averaging.reduction.mean().items()}
    loaded = written(replica, 2, training='{"version": 2, "samples": 8}')
    base = {"base.0.weight", "base.0.bias", "again.weight", "again.bias"}
    assert loaded.weights.keys() == result.keys() - base
    assert not loaded.state["buffers"]
    for name in loaded.weights.keys() - {"base.1.num_batches_tracked"}:  # rounds do not average a counter
        assert torch.equal(loaded.weights[name], result[name]), name
        assert torch.equal(loaded.model[name], means.get(name, result[name])), name
    assert not ema or not torch.equal(loaded.model["base.2.bias"], result["base.2.bias"])
    world(1, loaded=loaded, **parts).round(3)


def test_a_resumed_training_with_another_base_is_refused(world: Make) -> None:
    _, loaded = trained(world)
    with pytest.raises(InvalidJob, match=r"the checkpoint .* is without its frozen parameters .* the same base"):
        world(1, loaded=loaded, **ADAPTED | {"model": lambda: Adapted(base=3.0)})


def test_a_checkpoint_with_another_base_is_not_gone_on_from_without_saving_it(world: Make) -> None:
    """Its own checkpoints could not be resumed from."""
    _, loaded = trained(world, save_frozen=True)
    assert "base.weight" in loaded.weights
    again = world(1, loaded=loaded, **ADAPTED | {"model": lambda: Adapted(base=3.0)})
    with pytest.raises(InvalidJob, match=r"save_frozen=False leaves .* use save_frozen=True"):
        again.round(3)


def test_frozen_parameters_that_training_changes_are_refused(world: Make) -> None:
    """Such as a teacher that follows the weights: a resumed training would have lost it."""
    ranks = world(1, **ADAPTED)
    ranks.round(1)
    teacher: Any = ranks.ranks[0].replica.model
    teacher.again.bias.data += 1
    with pytest.raises(InvalidJob, match=r"nothing may change them; else use save_frozen=True"):
        ranks.round(2)


def test_ranks_with_different_bases_are_refused_in_their_first_round(world: Make) -> None:
    bases = iter([2.0, 3.0])
    ranks = world(2, **ADAPTED | {"model": lambda: Adapted(next(bases))})
    with pytest.raises(InvalidJob, match=r"on some rank they are not those that model\(\) makes"):
        ranks.round(1)


def test_a_model_without_frozen_parameters_is_saved_as_ever(world: Make, tmp_path: Path) -> None:
    plain = {"model": JOB.model, "optimizer": JOB.optimizer}
    _, loaded = trained(world, **plain)
    assert loaded.frozen == ""
    assert load_file(tmp_path / "model.safetensors").keys() == {"weight", "bias"}
    load_state(nn.Linear(3, 1), tmp_path / "model.safetensors")


def test_a_base_of_zeros_is_left_out_too(world: Make, tmp_path: Path) -> None:
    def model() -> nn.Module:
        made = Adapted(base=0.0)
        nn.init.zeros_(made.base.bias)
        nn.init.zeros_(made.again.bias)
        return made

    trained(world, model=model)
    load_state(model(), tmp_path / "model.safetensors")


def test_it_does_not_go_with_shard_yet() -> None:
    with pytest.raises(InvalidJob, match="save_frozen=False does not work with shard yet"):
        replace(JOB, save_frozen=False, group_size=2, shard="full_shard")
