"""A checkpoint that is asked for has whole iterations of a loop: what follows the step, and nothing of the next one."""

from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, StepLR
from torch.utils.data import DataLoader

from elche.errors import Misuse
from elche_worker.trainer import Trainer, TrainerConfig
from elche_worker.trainer.iterations import MAX_WAIT_STEPS, StepOrder
from support.loops import NAMES, flat, samples

NUM_STEPS = 12
ASKED_AT = 4
"""The step at which an operator asks: all ranks act upon it two steps later."""
SCHEDULES: dict[str, Callable[[SGD], LRScheduler]] = {
    "step": lambda optimizer: StepLR(optimizer, 2, gamma=0.7),
    "cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=0.3, total_steps=NUM_STEPS + 1),
}


class Counter:
    """A count of the script's own, which it keeps in checkpoints."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def ask(trainer: Trainer) -> None:
    """An operator asks for a checkpoint; as a coordinator would pass it on."""
    trainer._progress.attachment.operator.wants_checkpoint = True


class Loop:
    """A loop with BatchNorm, dropout, a schedule and a counter, over batches that it draws itself, or elche's."""

    def __init__(self, place: Path, schedule: str, *, resumes: bool = False, own: bool = True) -> None:
        torch.manual_seed(2)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))
        optimizer = SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        # An interval is what makes a loop without a coordinator take requests.
        config = TrainerConfig(device="cpu", checkpoint_dir=str(place), checkpoint_every_minutes=1e6)
        self.trainer = Trainer.setup(self.model, optimizer, config)
        if resumes:
            self.trainer.load(str(place))
        self.schedule, self.counter = SCHEDULES[schedule](optimizer), Counter()
        self.trainer.register_state(schedule=self.schedule, counter=self.counter)
        self.rates: list[float] = []
        self.own = own

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        trainer, dataset = self.trainer, samples(48)
        if self.own:
            for step in range(trainer.num_steps, NUM_STEPS):
                torch.manual_seed(step)
                yield dataset[step * 4 : step * 4 + 4]
            return
        loader = DataLoader(dataset, batch_size=8, shuffle=True)
        trainer.set_data_loader(loader, forward_input="inputs", names=NAMES)
        for epoch in trainer.epochs(2):
            for batch in trainer.epoch(epoch):
                yield batch["inputs"], batch["labels"]

    def train(self) -> tuple[Tensor, Tensor, list[float], int]:
        trainer = self.trainer
        for inputs, labels in self.batches():
            self.rates.append(self.schedule.get_last_lr()[0])
            cross_entropy(trainer(inputs), labels).backward()
            trainer.step()
            if trainer.num_steps == ASKED_AT:
                ask(trainer)
            self.model.eval()
            self.model(inputs)  # an evaluation is part of the iteration
            self.model.train()
            self.schedule.step()
            with torch.no_grad():
                self.model[0].weight.clamp_(-0.4, 0.4)
            self.counter.count += 1
        trainer.close()
        buffers = torch.cat([one.double().reshape(-1) for one in self.model.buffers()])
        return flat(self.model), buffers, self.rates, self.counter.count


@pytest.mark.parametrize(("schedule", "own"), [("step", True), ("cycle", True), ("cycle", False)])
def test_what_follows_the_step_is_in_a_checkpoint_and_a_loop_goes_on_bit_for_bit(
    tmp_path: Path, schedule: str, own: bool
) -> None:
    parameters, buffers, rates, count = Loop(tmp_path, schedule, own=own).train()
    (saved,) = tmp_path.iterdir()
    num_saved = int(saved.name.removeprefix("step-"))
    assert ASKED_AT < num_saved < NUM_STEPS
    again = Loop(tmp_path, schedule, resumes=True, own=own)
    assert again.counter.count == again.trainer.num_steps == num_saved
    later = again.train()
    assert torch.equal(later[0], parameters)
    assert torch.equal(later[1], buffers)
    assert later[2:] == (rates[num_saved:], count)


def train_by_epochs(
    place: Path, *, ask_at: int, counts: bool, resumes: bool = False
) -> tuple[list[list[float]], Tensor]:
    """Returns each epoch's losses, and the parameters. A schedule is stepped after each epoch; `counts`: the epochs are
    those of `trainer.epochs`.
    """
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 3))
    optimizer = SGD(model.parameters(), lr=0.1)
    config = TrainerConfig(max_anchor=0, device="cpu", checkpoint_dir=str(place), checkpoint_every_minutes=1e6)
    trainer = Trainer.setup(model, optimizer, config)
    if resumes:
        trainer.load(str(place))
    schedule = StepLR(optimizer, 1, gamma=0.5)
    trainer.register_state(schedule=schedule)
    trainer.set_data_loader(DataLoader(samples(48), batch_size=16, shuffle=True), forward_input="inputs", names=NAMES)
    losses: list[list[float]] = []
    for epoch in trainer.epochs(3) if counts else range(3):
        losses.append([])
        for batch in trainer.epoch(epoch):
            loss = cross_entropy(trainer.forward_batch(batch), batch["labels"])
            loss.backward()
            trainer.step()
            losses[-1].append(loss.item())
            if trainer.num_steps == ask_at and not resumes:
                ask(trainer)
        if losses[-1]:
            schedule.step()
    trainer.close()
    return losses, flat(model)


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("ask_at", [2, 3, 4])
def test_what_follows_an_epoch_is_in_a_checkpoint_that_its_last_step_makes(
    tmp_path: Path, ask_at: int, *, counts: bool
) -> None:
    """A resumed loop got an epoch without batches, and scripts that use its last loss ended with UnboundLocalError."""
    losses, parameters = train_by_epochs(tmp_path, ask_at=ask_at, counts=counts)
    (saved,) = tmp_path.iterdir()
    num_saved = int(saved.name.removeprefix("step-"))
    again, resumed = train_by_epochs(tmp_path, ask_at=ask_at, counts=counts, resumes=True)
    assert all(again) or not counts, "no epoch is without batches"
    assert list(chain.from_iterable(again)) == list(chain.from_iterable(losses))[num_saved:]
    assert torch.equal(resumed, parameters)


def hooks_of(model: nn.Module) -> int:
    return sum(len(one._forward_pre_hooks) for one in model.modules())


def train_gan(place: Path, sequence: str, *, ask_at: int = 5, num_steps: int = 18) -> tuple[Trainer, nn.Module]:
    """Steps the optimizers in this sequence, again and again."""
    torch.manual_seed(4)
    model = nn.ModuleDict({"g": nn.Linear(6, 6), "d": nn.Linear(6, 3)})
    optimizers = {name: SGD(one.parameters(), lr=0.1) for name, one in model.items()}
    config = TrainerConfig(device="cpu", checkpoint_dir=str(place), checkpoint_every_minutes=1e6)
    trainer = Trainer.setup(model, optimizers, config)
    for step in range(num_steps):
        inputs, labels = samples(4)[:]
        cross_entropy(model["d"](model["g"](inputs)), labels).backward()
        trainer.step(optimizer=sequence[step % len(sequence)])
        model.zero_grad()
        if trainer.num_steps == ask_at:
            ask(trainer)
    return trainer, model


@pytest.mark.parametrize("sequence", ["dg", "gdd", "ddddg"])
@pytest.mark.parametrize("ask_at", [5, 6, 7])
def test_no_checkpoint_is_between_two_optimizers_of_an_iteration(tmp_path: Path, sequence: str, ask_at: int) -> None:
    trainer, model = train_gan(tmp_path, sequence, ask_at=ask_at)
    trainer.close()
    (saved,) = tmp_path.iterdir()
    assert int(saved.name.removeprefix("step-")) % len(sequence) == 0
    assert hooks_of(model) == 0


def test_a_checkpoint_whose_iteration_is_never_seen_to_end_is_given_up_aloud(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer, model = train_gan(tmp_path, "d" + "dg" * 3 + "d" * 200, num_steps=MAX_WAIT_STEPS + 20)
    assert hooks_of(model) == 0
    trainer.close()
    assert list(tmp_path.iterdir()) == []
    assert "no iteration was seen to end in 100 steps: call trainer.save() at its end" in capsys.readouterr().err


def test_a_loop_that_an_error_ends_within_an_iteration_writes_none_of_it(tmp_path: Path) -> None:
    trainer, _ = train_gan(tmp_path, "dg", num_steps=7)
    trainer.close(ValueError("on purpose"))
    assert list(tmp_path.iterdir()) == []
    whole, _ = train_gan(tmp_path, "dg", num_steps=8)
    whole.close()
    assert [one.name for one in tmp_path.iterdir()] == ["step-00000008"]


def test_an_iteration_is_known_once_it_is_repeated() -> None:
    order, seen = StepOrder(2), []
    for key in "ddgddgdg":
        order.add([key])
        seen.append(order.is_whole)
    assert seen == [False, False, False, False, False, True, False, False]
    together = StepOrder(2)
    together.add(["d", "g"])
    assert together.is_whole


def test_a_state_that_is_lost_or_cannot_be_kept_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop = Loop(tmp_path, "step")
    with pytest.raises(Misuse, match="there is a state 'counter' already"):
        loop.trainer.register_state(counter=Counter())
    with pytest.raises(Misuse, match="'names' is a list, without state_dict"):
        loop.trainer.register_state(names=[])
    strange = Counter()
    strange.count = object()  # type: ignore[assignment]
    with pytest.raises(Misuse, match=r"'strange': the state.*is of type object, which a checkpoint cannot hold"):
        loop.trainer.register_state(strange=strange)
    loop.train()

    def begin() -> Trainer:
        model: Any = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))
        return Trainer.setup(model, SGD(model.parameters(), lr=0.1, momentum=0.9), TrainerConfig(device="cpu"))

    capsys.readouterr()
    trainer = begin()
    trainer.load(str(tmp_path))
    trainer.register_state(counter=Counter(), best=Counter())
    assert "the checkpoint has no state of 'best', which starts fresh" in capsys.readouterr().err
    with pytest.raises(Misuse, match=r"has the state of 'schedule', and the script has registered nothing of that"):
        trainer.step()


def test_a_schedule_that_is_in_no_checkpoint_is_hinted_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Linear(6, 3)
    optimizer = SGD(model.parameters(), lr=0.1)
    trainer = Trainer.setup(model, optimizer, TrainerConfig(device="cpu"))
    trainer.save(str(tmp_path))
    assert "schedule" not in capsys.readouterr().err
    StepLR(optimizer, 2)
    trainer.save(str(tmp_path))
    trainer.save(str(tmp_path))
    trainer.close()
    assert capsys.readouterr().err.count("trainer.register_state(schedule=...)") == 1
