"""Ranks that part without waiting for each other: their gradients fit, and are of other batches."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from elche_worker.trainer import Trainer, TrainerConfig
from support.loops import NAMES, new_model, new_optimizer, samples
from support.worlds import Raised, Worlds


def train(does: str, place: str) -> None:
    model = new_model()
    trainer = Trainer.setup(model, new_optimizer(model), TrainerConfig(max_anchor=0, overlap=False))
    trainer.set_data_loader(DataLoader(samples(40), batch_size=4), forward_input="inputs", names=NAMES)
    for number, batch in enumerate(trainer.epoch(0)):
        trainer.forward_batch(batch).square().mean().backward()
        if does == "skips" and number == 3 and trainer.rank == 1:
            continue
        before = [one.detach().clone() for one in model.parameters()]
        try:
            trainer.step()
        except BaseException:
            assert number == 3 + (trainer.rank == 1)
            assert all(map(torch.equal, before, model.parameters()))
            Path(place, str(trainer.rank)).touch()
            raise


def test_a_step_that_is_left_out_mixes_nothing(worlds: Worlds, tmp_path: Path) -> None:
    for raised in worlds.run(3, train, "skips", str(tmp_path), may_raise=True):
        assert isinstance(raised, Raised)
        assert raised.kind == "CallsDiffer"
        assert "each of ranks 0, 2 calls step() after 3 steps and 4 batches" in raised.message
        assert "rank 1 calls step() after 3 steps and 5 batches" in raised.message
    assert len(list(tmp_path.iterdir())) == 3


def step_another() -> None:
    model = nn.ModuleDict({"g": nn.Linear(2, 2), "d": nn.Linear(2, 2)})
    optimizers = {name: torch.optim.SGD(one.parameters(), lr=0.1) for name, one in model.items()}
    trainer = Trainer.setup(model, optimizers)
    for one in model.values():
        one(torch.ones(1, 2)).sum().backward()
    trainer.step(optimizer="g" if trainer.rank else "d")


def test_ranks_that_step_other_optimizers_mix_nothing(worlds: Worlds) -> None:
    for raised in worlds.run(2, step_another, may_raise=True):
        assert isinstance(raised, Raised)
        assert raised.kind == "CallsDiffer"
        assert "rank 0 calls step(optimizer='d')" in raised.message
        assert "rank 1 calls step(optimizer='g')" in raised.message


@pytest.mark.parametrize("size", [1, 2])
def test_a_loop_whose_ranks_go_together_is_left_alone(worlds: Worlds, tmp_path: Path, size: int) -> None:
    assert worlds.run(size, train, "nothing", str(tmp_path)) == [None] * size
