"""A loop is saved and goes on where it was, with the same random numbers, and removes its own checkpoints only."""

import re
import shutil
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from elche.errors import Misuse
from elche_worker.trainer import Trainer, TrainerConfig
from elche_worker.trainer import trainer as trainers
from support.loops import NAMES, flat, new_model, new_optimizer, samples
from support.worlds import Worlds


def save_and_go_on(place: str, el_che: bool) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Trains two epochs at once, and again from a checkpoint in the middle of the first."""

    def begin() -> Trainer:
        model = new_model()
        config = TrainerConfig(anchor=2, max_anchor=2) if el_che else TrainerConfig(max_anchor=0)
        trainer = Trainer.setup(model, new_optimizer(model), config)
        generator = torch.Generator().manual_seed(3)
        loader = DataLoader(samples(64), batch_size=8, shuffle=True, generator=generator)
        trainer.set_data_loader(loader, forward_input="inputs", names=NAMES)
        trainer.set_loss_fn(lambda context: cross_entropy(context.output, context.batch["labels"]))
        return trainer

    trainer, later_epoch = begin(), []
    for _ in trainer.epochs(1):
        for batch in trainer.epoch(0):
            trainer.forward_batch(batch)
            trainer.step()
            if trainer.num_steps == 1:
                trainer.save(place)
    trainer.close()
    again = begin()
    again.load(place)
    dist.barrier()
    for epoch in again.epochs(1):
        batches = again.epoch(epoch)
        if el_che:
            with pytest.raises(TypeError, match="follows from the ranks' speed"):
                len(batches)
        else:
            assert (len(batches), len(again.epoch(1))) == (7, 8), "what is left, and a whole epoch"
        for batch in batches:
            later_epoch.append(batch.size)
            again.forward_batch(batch)
            again.step()
    assert again.num_steps == trainer.num_steps
    assert el_che or len(later_epoch) == len(batches)
    again.close()
    return flat(trainer.model), flat(again.model), later_epoch


@pytest.mark.parametrize("el_che", [True, False])
def test_a_loop_goes_on_in_the_middle_of_an_epoch(worlds: Worlds, tmp_path: Path, el_che: bool) -> None:
    told = worlds.run(2, save_and_go_on, str(tmp_path), el_che)
    for whole, resumed, _ in told:
        assert torch.equal(whole, resumed)
    assert sum(sum(sizes) for _, _, sizes in told) == (64 - 32 if el_che else 64 - 8)


def test_a_data_set_that_has_become_smaller_is_refused_within_its_epoch(tmp_path: Path) -> None:
    """It was an IndexError of the data set, some batches later."""
    for size, resumes in ((16, False), (8, True)):
        model = new_model()
        with Trainer.setup(model, new_optimizer(model), TrainerConfig(device="cpu")) as trainer:
            trainer.set_data_loader(DataLoader(samples(size), batch_size=4), forward_input="inputs", names=NAMES)
            if resumes:
                trainer.load(str(tmp_path))
                with pytest.raises(Misuse, match="of which sample 15 is still to be trained, and the data set has 8"):
                    next(trainer.epoch(0))
                return
            batch = next(trainer.epoch(0))
            cross_entropy(trainer.forward_batch(batch), batch["labels"]).backward()
            trainer.step()
            trainer.save(str(tmp_path))


def test_a_checkpoint_that_is_none_is_refused(tmp_path: Path) -> None:
    model = new_model()
    trainer = Trainer.setup(model, new_optimizer(model), TrainerConfig(device="cpu"))
    trainer.load(str(tmp_path))  # nothing is there yet
    with pytest.raises(Misuse, match="there is no checkpoint"):
        trainer.load(str(tmp_path / "none"))
    with pytest.raises(Misuse, match="save\\(\\) needs a place"):
        trainer.save()
    trainer.save(str(tmp_path))
    trainer.close()
    other = nn.Linear(6, 2)
    trainer = Trainer.setup(other, new_optimizer(other), TrainerConfig(device="cpu"))
    with pytest.raises(Misuse, match="the model has changed since the checkpoint"):
        trainer.load(str(tmp_path))


class Counting(nn.Linear):
    """Counts its batches in its extra state."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.seen: dict[str, Any] = {"batches": 0, "last": ()}

    def get_extra_state(self) -> dict[str, Any]:
        return self.seen

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.seen = state

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen = {"batches": self.seen["batches"] + 1, "last": (len(inputs),)}
        return super().forward(inputs)


def test_a_modules_extra_state_goes_on(tmp_path: Path) -> None:
    """Its checkpoint lacked it, and so could not be loaded."""
    config = TrainerConfig(device="cpu", checkpoint_dir=str(tmp_path))
    for begins_with in (0, 1):
        model = Counting()
        with Trainer.setup(model, new_optimizer(model), config) as trainer:
            trainer.load(str(tmp_path))
            assert model.seen["batches"] == begins_with
            model(samples(4).tensors[0]).sum().backward()
            trainer.step()
            trainer.save()


class Cached(nn.Linear):
    """Makes a table, which no `state_dict` has, for the longest input that it has seen."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.register_buffer("table", torch.ones(1), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if len(inputs) > len(self.table):
            self.register_buffer("table", torch.ones(len(inputs)), persistent=False)
        return super().forward(inputs) * self.table[: len(inputs), None]


def test_a_cache_that_has_grown_since_the_start_keeps_no_loop_from_going_on(tmp_path: Path) -> None:
    """All that was trained was lost: "it had table float32 [4] buffer, and the job's has table float32 [1]"."""
    config = TrainerConfig(device="cpu", checkpoint_dir=str(tmp_path))
    for begins_with in (0, 1):
        model = Cached()
        with Trainer.setup(model, new_optimizer(model), config) as trainer:
            trainer.load(str(tmp_path))
            assert trainer.num_steps == begins_with
            model(samples(4).tensors[0]).sum().backward()
            trainer.step()
            trainer.save()


@pytest.mark.parametrize("persistent", [True, False])
def test_a_buffer_that_no_resumed_script_makes_of_this_size_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], persistent: bool
) -> None:
    """That no training goes on from the checkpoints was seen when it was to."""
    model = nn.Linear(6, 3)
    model.register_buffer("memory", torch.zeros(0, 6), persistent=persistent)
    with Trainer.setup(model, new_optimizer(model), TrainerConfig(device="cpu")) as trainer:
        trainer.save(str(tmp_path))
        assert "memory" not in capsys.readouterr().err
        for _ in range(2):
            model(samples(4).tensors[0]).sum().backward()
            trainer.step()
            model.memory = torch.ones(4, 6)
            trainer.save(str(tmp_path))
    said = "elche: the model's buffer memory was [0, 6] when training began and is [4, 6] now, so that this script"
    assert capsys.readouterr().err.count(said) == persistent


class Renamed(nn.Linear):
    def state_dict(self, *arguments: Any, **named: Any) -> Any:
        return {f"net.{name}": one for name, one in super().state_dict(*arguments, **named).items()}


def test_a_model_of_which_no_checkpoint_can_be_made_is_named_before_it_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint was written, and could not be loaded."""
    for model, why in (
        (Renamed(6, 3), " cannot load its own"),
        (nn.Linear(6, 3, dtype=torch.complex128), "'s weight is"),
    ):
        config = TrainerConfig(device="cpu", checkpoint_dir=str(tmp_path))
        with Trainer.setup(model, new_optimizer(model), config) as trainer:
            assert f"elche: this loop makes no checkpoints: the model{why}" in capsys.readouterr().err
            model(samples(4).tensors[0].to(model.weight.dtype)).abs().sum().backward()
            trainer.step()
            trainer.save()
            assert "elche: no checkpoint of step 1: the model" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_resumed_script_gives_a_checkpoint_to_the_trainer_that_has_written_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In cross validation the first fold went on from the second one's model, which had seen its held-out samples."""

    def fold(num_steps: int) -> int:
        model = new_model()
        trainer = Trainer.setup(model, new_optimizer(model), TrainerConfig(device="cpu", checkpoint_dir=str(tmp_path)))
        begun_at = trainer.num_steps
        for _ in range(num_steps):
            trainer(torch.ones(1, 6)).sum().backward()
            trainer.step()
        trainer.save()
        trainer.close()
        return begun_at

    def run() -> list[int]:
        monkeypatch.setattr(trainers, "_numbers", count(1))
        return [fold(num_steps) for num_steps in (3, 2, 1)]

    assert run() == [0, 0, 0]
    monkeypatch.setenv("ELCHE_RESUME", str(tmp_path / "step-00000002"))
    assert run() == [0, 2, 0]
    assert "has no checkpoint of this script's trainer 1, which begins at the start" in capsys.readouterr().err
    monkeypatch.setenv("ELCHE_RESUME", str(tmp_path))
    assert run() == [3, 4, 1]


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors"])
def test_a_damaged_checkpoint_is_skipped_for_an_older_one_of_the_same_trainer_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """With a damaged manifest of its only one a trainer began at the start, though all its work was there."""
    begin = partial(Trainer.setup, config=TrainerConfig(device="cpu", checkpoint_dir=str(tmp_path)))

    def run(*num_steps: int) -> list[int]:
        monkeypatch.setattr(trainers, "_numbers", count(1))
        begun_at = []
        for number in num_steps:
            model = new_model()
            with begin(model, new_optimizer(model)) as trainer:
                begun_at.append(trainer.num_steps)
                for _ in range(number):
                    trainer(torch.ones(1, 6)).sum().backward()
                    trainer.step()
                    trainer.save()
        return begun_at

    run(3, 1)
    monkeypatch.setenv("ELCHE_RESUME", str(tmp_path))
    flip(tmp_path / "step-00000003" / name)
    assert run(0, 0) == [2, 1]
    assert "step-00000003" in capsys.readouterr().err
    flip(tmp_path / "step-00000001-2" / name)
    with pytest.raises(Misuse, match=r"step-00000001-2.* is"):
        run(0, 0)


def flip(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])


def save_and_load_own_copies(folder: str) -> str:
    """Each rank has a copy of its own; the newest checkpoint in that of rank 1 is damaged."""
    model = new_model()
    with Trainer.setup(model, new_optimizer(model), TrainerConfig(max_anchor=0)) as trainer:
        for _ in range(2):
            trainer(torch.ones(1, 6)).sum().backward()
            trainer.step()
            trainer.save(f"{folder}/0")
    dist.barrier()
    if dist.get_rank() == 1:
        shutil.copytree(f"{folder}/0", f"{folder}/1")
        flip(Path(folder) / "1/step-00000002/model.safetensors")
    model = new_model()
    trainer = Trainer.setup(model, new_optimizer(model), TrainerConfig(max_anchor=0))
    with trainer, pytest.raises(Misuse) as raised:
        trainer.load(f"{folder}/{dist.get_rank()}")
    return str(raised.value)


def test_ranks_that_find_different_checkpoints_do_not_go_on(worlds: Worlds, tmp_path: Path) -> None:
    """At the first step it was said that the script changes the models."""
    for said in worlds.run(2, save_and_load_own_copies, str(tmp_path)):
        assert re.search("different checkpoints at .*: rank 0 one of step 2, rank 1 one of step 1;", said)


def test_trainers_that_train_in_turn_are_not_resumed_with_one_of_them_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The discriminator went on from the checkpoint, and the generator began at the start."""

    def train() -> list[int]:
        monkeypatch.setattr(trainers, "_numbers", count(1))
        models = new_model(), new_model()
        config = TrainerConfig(device="cpu", checkpoint_dir=str(tmp_path))
        both = [Trainer.setup(model, new_optimizer(model), config) for model in models]
        begun_at = [trainer.num_steps for trainer in both]
        try:
            for trainer in both * 3:
                trainer(torch.ones(1, 6)).sum().backward()
                trainer.step()
        finally:
            for trainer in both:
                trainer.save()
                trainer.close(ValueError())
        return begun_at

    said = "trainers 1 and 2 of this script train in turn, and a checkpoint is of one of them"
    assert train() == [0, 0]
    assert capsys.readouterr().err.count(said) == 1
    monkeypatch.setenv("ELCHE_RESUME", str(tmp_path))
    assert train() == [3, 3], "a folder has both"
    monkeypatch.setenv("ELCHE_RESUME", str(tmp_path / "step-00000006-2"))
    with pytest.raises(Misuse, match="trainers 1 and 2 of this script train in turn, and only one of them goes on"):
        train()


def test_a_loop_removes_its_own_checkpoints_only(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "train.py").write_text("mine")
    model = new_model()
    trainer = Trainer.setup(model, new_optimizer(model), TrainerConfig(device="cpu"))
    for _ in range(5):
        model(torch.ones(1, 6)).sum().backward()
        trainer.step()
        trainer.save(str(tmp_path))
        trainer.save(str(tmp_path))
    trainer.close()
    assert sorted(one.name for one in tmp_path.iterdir()) == [
        "data",
        "step-00000003",
        "step-00000004",
        "step-00000005",
        "train.py",
    ]
    other = new_model()
    again = Trainer.setup(other, new_optimizer(other), TrainerConfig(device="cpu"))
    for _ in range(3):
        other(torch.ones(1, 6)).sum().backward()
        again.step()
    again.save(str(tmp_path))
    again.close()
    assert (tmp_path / "step-00000003-2" / "manifest.json").is_file()


def random_run(place: str, resume: bool, *, shuffled_by: str) -> tuple[torch.Tensor, list[list[int]]]:
    """Three epochs with dropout, shuffled, saved in the second; or the rest of them. A loop that counts its epochs
    itself shuffles with random numbers of its loader's own.
    """
    torch.manual_seed(11)
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 3))
    trainer = Trainer.setup(model, new_optimizer(model), TrainerConfig(device="cpu"))
    if resume:
        trainer.load(place)
    drawn = torch.rand(1)
    dataset = TensorDataset(*samples(24).tensors, torch.arange(24))
    own = torch.Generator().manual_seed(3)
    loader: DataLoader[Any] = {
        "torch": lambda: DataLoader(dataset, batch_size=8, shuffle=True),
        "the loader": lambda: DataLoader(dataset, batch_size=8, shuffle=True, generator=own),
        "the sampler": lambda: DataLoader(dataset, batch_size=8, sampler=RandomSampler(dataset, generator=own)),
    }[shuffled_by]()
    trainer.set_data_loader(loader, forward_input="inputs", names=(*NAMES, "number"))
    orders = []
    for epoch in range(3) if shuffled_by == "the loader" else trainer.epochs(3):
        for batch in trainer.epoch(epoch):
            orders.append(batch["number"].tolist())
            cross_entropy(trainer.forward_batch(batch), batch["labels"]).backward()
            trainer.step()
            if trainer.num_steps == 4 and not resume:
                trainer.save(place)
    trainer.close()
    orders.append(drawn.tolist())
    return flat(model), orders


@pytest.mark.parametrize("shuffled_by", ["torch", "the loader", "the sampler"])
def test_one_process_goes_on_with_the_same_random_numbers_and_order(tmp_path: Path, shuffled_by: str) -> None:
    whole, orders = random_run(str(tmp_path), False, shuffled_by=shuffled_by)
    resumed, rest = random_run(str(tmp_path), True, shuffled_by=shuffled_by)
    assert rest[:-1] == orders[4:-1]
    assert rest[-1] == orders[-1]  # what the script draws before training is as it was
    assert torch.equal(whole, resumed)
