"""Ranks of a loop whose models or learning rates are not the same any more say so: each trained a model of its own."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from elche.errors import Misuse
from elche_worker.collectives import consistency
from elche_worker.trainer import Trainer, TrainerConfig
from support.loops import NAMES, flat, new_model, samples
from support.worlds import Raised, Worlds

STEPS = 40


def train(kind: str, is_mixed: bool = False) -> tuple[int, float]:
    """The number of steps that were made until it was found out, and the sum of the parameters."""
    rank, model = dist.get_rank(), new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer.setup(model, optimizer, TrainerConfig(max_anchor=0, overlap=False))
    trainer._stepper.comparison._is_mixed = is_mixed
    inputs, labels = samples(8 * (1 + rank))[-8:]
    if kind == "loads on one rank" and rank == 1:
        with torch.no_grad():
            model.load_state_dict({name: 2 * one for name, one in model.state_dict().items()})
    for step in range(STEPS):
        cross_entropy(model(inputs), labels).backward()
        if kind == "steps twice with one average":  # as SAM does
            trainer.average_gradients()
            with torch.no_grad():
                for one in model.parameters():
                    one -= one.grad
                    one.grad = None
            cross_entropy(model(inputs), labels).backward()
            with torch.no_grad():
                for one in model.parameters():
                    one -= one.grad
            trainer.finish_step()
        else:
            trainer.step()
        if kind == "draws" and step == 10:
            with torch.no_grad():
                next(model.parameters())[0] = torch.randn(3, generator=torch.Generator().manual_seed(rank))[0]
        if kind == "rates" and step == 10:
            trainer.set_lr(0.1 / (1 + rank))
        if kind == "rounds" and rank == 1:
            with torch.no_grad():
                for one in model.parameters():
                    one *= 1 + 1e-6
    return trainer.num_steps, float(flat(model).double().sum())


@pytest.mark.parametrize("kind", ["loads on one rank", "steps twice with one average", "draws"])
def test_models_that_have_parted_are_found_out(worlds: Worlds, kind: str) -> None:
    for raised in worlds.run(2, train, kind, may_raise=True):
        assert isinstance(raised, Raised)
        assert raised.kind == "Misuse"
        assert "the ranks' models differ: " in raised.message
        assert "of rank 1 is not that of rank 0" in raised.message


def test_other_learning_rates_on_one_rank_are_found_out(worlds: Worlds) -> None:
    """A schedule that follows each rank's own loss, say."""
    for raised in worlds.run(2, train, "rates", may_raise=True):
        assert isinstance(raised, Raised)
        assert "ranks have different learning rates: group 0 has 0.1 on rank 0 and 0.05 on rank 1" in raised.message


@pytest.mark.parametrize("kind", ["nothing", "rounds"])
def test_models_that_differ_by_rounding_train_on(worlds: Worlds, kind: str) -> None:
    assert [steps for steps, _ in worlds.run(2, train, kind)] == [STEPS, STEPS]


def part_late(end: str, parts: bool, place: str) -> list[str]:
    """Changes rank 1's model after the last step that is compared by its number; the checkpoints written by then."""
    model = new_model()
    config = TrainerConfig(max_anchor=0, overlap=False, checkpoint_dir=place, checkpoint_every_minutes=1e9)
    trainer = Trainer.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), config)
    inputs, labels = samples(8)[:]

    def step() -> None:
        cross_entropy(model(inputs), labels).backward()
        trainer.step()
        if parts and trainer.rank == 1 and trainer._progress.num_steps == 18:
            with torch.no_grad():
                next(model.parameters())[0] = torch.randn(3, generator=torch.Generator().manual_seed(7))[0]
        if end == "checkpoint" and trainer.rank == 0 and trainer._progress.num_steps == 18:
            trainer._checkpoints._every_minutes = 0.0  # one is due from now on

    if end == "epochs":
        for _ in trainer.epochs(2):
            for _ in range(10):
                step()
    elif end == "epoch":
        trainer.set_data_loader(DataLoader(samples(40), batch_size=2), forward_input="inputs", names=NAMES)
        for _ in trainer.epoch(0):
            step()
    elif end == "shares":
        for _ in trainer.shares(8, num_steps=20):
            step()
    else:
        for number in range(22):
            step()
            if end == "save" and number == 18 and trainer.rank == 0:  # it need not be called on every rank
                trainer.save()
    trainer.close()
    return [one.name for one in Path(place).iterdir()]


@pytest.mark.parametrize("end", ["epochs", "epoch", "shares", "checkpoint"])
def test_models_that_part_near_an_end_are_found_out_there(worlds: Worlds, tmp_path: Path, end: str) -> None:
    for raised in worlds.run(2, part_late, end, True, str(tmp_path), may_raise=True):
        assert isinstance(raised, Raised)
        assert "the ranks' models differ: " in raised.message
    assert not list(tmp_path.iterdir())


def test_models_that_part_before_a_checkpoint_of_the_script_are_found_out_after_it(
    worlds: Worlds, tmp_path: Path
) -> None:
    for raised in worlds.run(2, part_late, "save", True, str(tmp_path), may_raise=True):
        assert isinstance(raised, Raised)
        assert "the ranks' models differ: " in raised.message


def test_models_that_part_in_the_last_steps_are_found_out_as_the_loop_closes(worlds: Worlds, tmp_path: Path) -> None:
    """The first rank waits for the others' ends, which nobody else need do."""
    raised, _ = worlds.run(2, part_late, "close", True, str(tmp_path), may_raise=True)
    assert isinstance(raised, Raised)
    assert raised.kind == "Misuse"
    assert "the ranks' models differ: 0.weight of rank 1 is not that of rank 0" in raised.message


@pytest.mark.parametrize("end", ["epochs", "epoch", "shares", "checkpoint", "save", "close"])
def test_models_that_are_alike_at_an_end_pass(worlds: Worlds, tmp_path: Path, end: str) -> None:
    assert bool(worlds.run(2, part_late, end, False, str(tmp_path))[0]) == (end in ("checkpoint", "save"))


def stop_early(end: str, then_steps: bool) -> None:
    """Rank 0 alone loads its best weights once it has left its loop."""
    model = new_model()
    trainer = Trainer.setup(
        model, torch.optim.SGD(model.parameters(), lr=0.1), TrainerConfig(overlap=False, max_anchor=0)
    )
    inputs, labels = samples(8)[:]

    def step() -> None:
        cross_entropy(model(inputs), labels).backward()
        trainer.step()

    if end == "shares":
        for _ in trainer.shares(8):
            step()
            if trainer.num_steps == 3:
                break
    else:
        trainer.set_data_loader(DataLoader(samples(6), batch_size=2), forward_input="inputs", names=NAMES)
        for epoch in trainer.epochs(2):
            for _ in trainer.epoch(epoch):
                step()
            if end == "within epochs" and not trainer.rank:
                nn.init.ones_(next(model.parameters()))
            break
    if not trainer.rank:
        nn.init.ones_(next(model.parameters()))
    if then_steps:
        step()
    trainer.close()


@pytest.mark.parametrize("end", ["shares", "epochs", "within epochs"])
def test_weights_that_one_rank_loads_as_its_loop_is_left_part_nothing(worlds: Worlds, end: str) -> None:
    """Early stopping after which rank 0 loaded and saved its best model ended with exit code 1."""
    worlds.run(2, stop_early, end, False)


def test_steps_after_weights_were_loaded_on_one_rank_are_found_out(worlds: Worlds) -> None:
    ended = worlds.run(2, stop_early, "epochs", True, may_raise=True)
    assert any(isinstance(one, Raised) and "the ranks' models differ" in one.message for one in ended)


class Pair:
    """What a world of two ranks is asked; `other` is told beside what this rank tells."""

    def __init__(self, other: str = "") -> None:
        self.other, self.told = other, ""

    def gather_texts(self, text: str) -> list[str]:
        self.told = text
        return [text, self.other or text]


@pytest.mark.parametrize("name", ["0.weight", "0.bias", "1.weight"])
def test_a_small_part_of_a_large_tensor_is_enough(name: str) -> None:
    """A step of 3 % of the norm in a random direction, of any one of the tensors."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(300, 400), nn.Embedding(10, 20))
    rank_0: Any = Pair()
    consistency.check_still_alike(model, [0.1], rank_0)
    one = dict(model.named_parameters())[name]
    with torch.no_grad():
        change = torch.randn_like(one)
        one += change * 0.03 * one.norm() / change.norm()
    rank_1: Any = Pair(rank_0.told)
    with pytest.raises(Misuse, match=f"^the ranks' models differ: {name} of rank 1"):
        consistency.check_still_alike(model, [0.1], rank_1)
