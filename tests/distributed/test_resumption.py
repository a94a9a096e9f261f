"""Loops that take their batches themselves go on where they were, or say what they train twice."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from elche_worker.trainer import Trainer, TrainerConfig
from support.loops import flat
from support.worlds import Worlds

NUM_SAMPLES = 24


class Batches:
    """A loader with a state, such as torchdata's: as many batches of an epoch as it has given."""

    def __init__(self) -> None:
        self.num_given = 0

    def __iter__(self) -> Iterator[int]:
        while self.num_given < NUM_SAMPLES:
            self.num_given += 1
            yield self.num_given - 1
        self.num_given = 0

    def state_dict(self) -> dict[str, int]:
        return {"num_given": self.num_given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_given = state["num_given"]


class Loop:
    """Trains on numbered samples, saves after a step or is asked to, and is stopped, or goes on."""

    def __init__(self, place: Path, *, resumes: bool) -> None:
        torch.manual_seed(7)
        self.place, self.resumes = place, resumes
        self.model = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        config = TrainerConfig(device="cpu", checkpoint_dir=str(place), checkpoint_every_minutes=1e6)
        self.trainer = Trainer.setup(self.model, torch.optim.SGD(self.model.parameters(), lr=0.1), config)
        if resumes:
            self.trainer.load(str(place))
        self.split = torch.randperm(NUM_SAMPLES)[:4]
        """Drawn before training: a resume draws the same."""
        self.trained: list[list[int]] = []

    def train(self, numbers: Tensor, *, save_at: int = 0, ask_at: int = 0) -> None:
        self.trained.append(numbers.reshape(-1).tolist())
        self.trainer(numbers.reshape(-1, 1) / NUM_SAMPLES).square().mean().backward()
        self.trainer.step()
        if not self.resumes and len(self.trained) == save_at:
            self.trainer.save()
        if not self.resumes and len(self.trained) == ask_at:
            self.trainer._progress.attachment.operator.wants_checkpoint = True

    def end(self) -> tuple[list[list[int]], Tensor]:
        self.trainer.close()
        return self.trained, flat(self.model)


def count_steps(place: Path, *, resumes: bool) -> Loop:
    """As nanoGPT: batches at random offsets, and no epochs."""
    loop = Loop(place, resumes=resumes)
    while loop.trainer.num_steps < 8:
        loop.train(torch.randint(NUM_SAMPLES, (4,)), save_at=5)
    return loop


def omit_batches(place: Path, *, resumes: bool) -> Loop:
    """A loader with shuffle=True, whose first batches of the epoch are omitted."""
    loop = Loop(place, resumes=resumes)
    loader = DataLoader(TensorDataset(torch.arange(NUM_SAMPLES)), batch_size=4, shuffle=True)
    for _ in loop.trainer.epochs(2):
        for index, (numbers,) in enumerate(loader):
            if index >= loop.trainer.num_epoch_steps:
                loop.train(numbers, save_at=8)
    return loop


@pytest.mark.parametrize(("train", "num_saved"), [(count_steps, 5), (omit_batches, 8)])
def test_a_loop_that_asks_where_it_is_goes_on_with_the_same_samples_bit_for_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], train: Any, num_saved: int
) -> None:
    first = train(tmp_path, resumes=False)
    whole, parameters = first.end()
    again = train(tmp_path, resumes=True)
    assert torch.equal(again.split, first.split)
    rest, resumed = again.end()
    assert rest == whole[num_saved:]
    assert torch.equal(resumed, parameters)
    assert "twice" not in capsys.readouterr().err


def test_a_loop_that_was_interrupted_says_that_its_epoch_begins_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a notebook, whose cell is run again."""
    loop = Loop(tmp_path, resumes=False)

    def cell(num_steps: int) -> None:
        for _ in loop.trainer.epochs(3):
            for index in range(4):
                if loop.trainer.num_steps == num_steps:
                    raise KeyboardInterrupt
                loop.train(torch.tensor([index]))

    with pytest.raises(KeyboardInterrupt):
        cell(6)
    assert "begins again" not in capsys.readouterr().err
    cell(-1)
    told = "epoch 0 begins again: this loop was left in epoch 1, after 2 of its steps, and the model keeps all 6"
    assert capsys.readouterr().err.count(told) == 1
    assert loop.trainer.num_steps == 6 + 12
    cell(-1)
    assert "begins again" not in capsys.readouterr().err


def test_a_loader_with_a_state_goes_on_behind_the_batch_of_the_last_step(tmp_path: Path) -> None:
    def train(*, resumes: bool) -> list[list[int]]:
        loop, loader = Loop(tmp_path, resumes=resumes), Batches()
        loop.trainer.register_state(loader=loader)
        for _ in loop.trainer.epochs(1):
            for number in loader:
                loop.train(torch.tensor([number]), ask_at=4)
        return loop.end()[0]

    whole = train(resumes=False)
    (saved,) = tmp_path.iterdir()
    num_saved = int(saved.name.removeprefix("step-"))
    assert 4 < num_saved < NUM_SAMPLES
    assert train(resumes=True) == whole[num_saved:]


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ("epochs", "epoch 1 begins again, as this loop takes its batches itself: 2 steps are trained twice"),
        ("range", "the checkpoint is of step 5, and this loop has not asked where it goes on"),
        ("given", ""),
    ],
)
def test_what_a_loop_trains_twice_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], counts: str, words: str
) -> None:
    def train(*, resumes: bool) -> None:
        loop = Loop(tmp_path, resumes=resumes)
        loader = DataLoader(TensorDataset(torch.arange(12)), batch_size=4)
        if counts == "given":
            loop.trainer.set_data_loader(loader, forward_input="input", names=("input",))
        for epoch in loop.trainer.epochs(3) if counts == "epochs" else range(3):
            for (numbers,) in loader if counts != "given" else (one.values() for one in loop.trainer.epoch(epoch)):
                loop.train(numbers, save_at=5)
        loop.end()

    train(resumes=False)
    capsys.readouterr()
    train(resumes=True)
    said = [line for line in capsys.readouterr().err.splitlines() if "twice" in line]
    assert (len(said) == 1 and words in said[0]) if words else not said


@pytest.mark.parametrize("frozen", [True, False])
def test_a_resumed_loop_that_trains_other_parameters_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], frozen: bool
) -> None:
    """What a script unfreezes in its second epoch was frozen for good when it was resumed in the third."""

    def train(requires_grad: bool, *, resumes: bool) -> None:
        model = nn.ModuleDict({"base": nn.Linear(1, 1), "head": nn.Linear(1, 1)})
        trainer = Trainer.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), TrainerConfig(device="cpu"))
        if resumes:
            trainer.load(str(tmp_path))
        model["base"].requires_grad_(requires_grad)
        for _ in range(2):
            model["head"](model["base"](torch.ones(1, 1))).sum().backward()
            trainer.step()
        trainer.save(str(tmp_path))
        trainer.close()

    train(True, resumes=False)
    capsys.readouterr()
    train(not frozen, resumes=True)
    words = "base.bias and 1 more: trained when the checkpoint was made, frozen now"
    assert capsys.readouterr().err.count(words) == int(frozen)


def draw_on_ranks(place: str, resumes: bool) -> list[tuple[float, ...]]:
    """Ranks draw alike with Python's generator, and apart with torch's and numpy's. The script seeds after setup."""
    model = nn.Linear(1, 1)
    trainer = Trainer.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), TrainerConfig(max_anchor=0))
    if resumes:
        trainer.load(place)
    torch.manual_seed(40 + trainer.rank)
    np.random.seed(50 + trainer.rank)
    random.seed(60)
    drawn = []
    while trainer.num_steps < 6:
        drawn.append((float(torch.rand(1)), float(np.random.rand()), random.random()))
        trainer(torch.ones(1, 1)).mean().backward()
        trainer.step()
        if trainer.num_steps == 3 and not resumes:
            trainer.save(place)
    trainer.close()
    return drawn


def test_ranks_that_draw_alike_go_on_alike_and_others_draw_nothing_twice(worlds: Worlds, tmp_path: Path) -> None:
    first, second = worlds.run(2, draw_on_ranks, str(tmp_path), False)
    later, other = worlds.run(2, draw_on_ranks, str(tmp_path), True)
    assert later == first[3:]  # rank 0 has written the checkpoint
    assert [one[2] for one in other] == [one[2] for one in later]
    for generator in (0, 1):
        drawn = [one[generator] for told in (first, second, other) for one in told]
        assert len(set(drawn)) == len(drawn)


def test_a_resumed_loop_that_has_nothing_left_to_train_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It succeeded in silence, with fewer epochs than the checkpoint has."""
    loop = Loop(tmp_path, resumes=False)
    for _ in loop.trainer.epochs(2):
        loop.train(torch.zeros(4))
    loop.trainer.save()
    loop.end()
    for told in ("has 2 epochs", "has 2 steps"):
        loop = Loop(tmp_path, resumes=True)
        assert not list(loop.trainer.epochs(1) if "epochs" in told else loop.trainer.shares(4, 2))
        loop.end()
        assert f"the checkpoint {told} already" in capsys.readouterr().err
