"""Loops whose group breaks while some ranks have ended what all do together, and others have not."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from elche.errors import PeerLost
from elche_worker.collectives.world import World
from elche_worker.trainer import Trainer, TrainerConfig, stepping
from elche_worker.trainer.attachment import Attachment, NextGroup
from elche_worker.trainer.requests import RequestConsensus
from support.loops import NAMES, close, flat, new_model, new_optimizer, samples, train_alone
from support.worlds import UNDO, Worlds


class SameMembers(Attachment):
    """In place of a coordinator: all who were there form the next group."""

    def __init__(self, world: World, folder: Path) -> None:
        super().__init__()
        self._world = world
        self._folder = folder

    def next_group(self, generation: int, reason: str) -> NextGroup:
        store = dist.FileStore(str(self._folder / f"group-{generation + 1}"), -1)
        store.set_timeout(timedelta(seconds=20))
        return NextGroup(generation + 1, self._world.rank, self._world.size, store)


def breaking(owner: Any, name: str, at: int) -> None:
    """A method of this rank fails at its call with this number, after it was done: the others have its result."""
    method: Callable[..., Any] = getattr(owner, name)
    calls: list[int] = []

    def broken(*arguments: Any, **named: Any) -> Any:
        done = method(*arguments, **named)
        calls.append(1)
        if len(calls) == at:
            raise PeerLost("on purpose")
        return done

    setattr(owner, name, broken)
    UNDO.append(lambda: setattr(owner, name, method))


def regroup_with(trainer: Trainer, folder: Path) -> None:
    """As if the trainer had made the group, which the harness has, and had a coordinator."""
    trainer._world._is_own = True
    trainer._world._exchange_addresses(set())
    trainer._together.attachment = SameMembers(trainer._world, folder)
    trainer._together.on_regrouped = trainer._rejoin


class Noted(RequestConsensus):
    """Notes what ranks ask for at each step; nothing is done about it."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.sums: list[float] = []

    def put(self, sums: torch.Tensor) -> None:
        self.sums.append(float(sums[0]))


def train(folder: Path, where: str, config: TrainerConfig) -> tuple[torch.Tensor, list[float], list[float], int]:
    model = new_model()
    trainer = Trainer.setup(model, new_optimizer(model), config)
    loader = DataLoader(samples(64), batch_size=8)
    trainer.set_data_loader(loader, forward_input="inputs", names=NAMES)
    regroup_with(trainer, folder)
    if trainer.rank == 1:
        kind, _, at = where.partition(" ")
        world = trainer._world
        broken: dict[str, tuple[Any, str]] = {
            "average": (trainer._stepper.averager, "average"),
            "buffers": (stepping, "broadcast"),
            "order": (world, "share_whole_numbers"),
            "numbers": (world, "gather_numbers"),
        }
        breaking(*broken[kind], int(at))
    means = []
    trainer._iterations.consensus = noted = Noted()
    trainer._iterations.take_requests = lambda: (trainer.num_steps + 1.0, 0.0, 0.0, 0.0)  # type: ignore[method-assign]
    for epoch in range(2):
        for batch in trainer.epoch(epoch):
            cross_entropy(trainer.forward_batch(batch), batch["labels"]).backward()
            trainer.average_gradients()
            means.append(trainer.mean({"at": float(trainer.num_steps + trainer.rank)})["at"])
            trainer.step()
    return flat(model), means, noted.sums, trainer._world.generation


PLACES = ("average 3", "average 9", "order 1", "order 2", "numbers 2", "numbers 3", "buffers 3")


@pytest.mark.parametrize(
    ("where", "overlap"), [*((where, True) for where in PLACES), ("average 9", False), ("buffers 3", False)]
)
def test_who_is_behind_gets_what_the_others_have(worlds: Worlds, tmp_path: Path, where: str, overlap: bool) -> None:
    told = worlds.run(2, train, tmp_path, where, TrainerConfig(max_anchor=0, overlap=overlap))
    (first, means, sums, generation), (second, other_means, other_sums, _) = told
    assert generation == 1
    assert torch.equal(first, second)
    assert means == other_means == [step + 0.5 for step in range(16)]
    assert sums == other_sums == [2.0 * (step + 1) for step in range(16)]
    twice = torch.utils.data.TensorDataset(*(torch.cat([one, one]) for one in samples(64).tensors))
    assert close(first, train_alone(twice, [8] * 16))


def attach(folder: Path, name: str, at: int) -> tuple[torch.Tensor, int]:
    """The group breaks while ranks agree on their loaders."""
    model = new_model()
    trainer = Trainer.setup(model, new_optimizer(model), TrainerConfig(max_anchor=0))
    regroup_with(trainer, folder)
    if trainer.rank == 1:
        breaking(trainer._world, name, at)
    trainer.set_data_loader(DataLoader(samples(64), batch_size=8), forward_input="inputs", names=NAMES)
    for batch in trainer.epoch(0):
        cross_entropy(trainer.forward_batch(batch), batch["labels"]).backward()
        trainer.step()
    return flat(model), trainer._world.generation


@pytest.mark.parametrize(("name", "at"), [("agree", 1), ("gather_numbers", 1), ("gather_texts", 2)])
def test_the_group_breaks_while_loaders_are_compared(worlds: Worlds, tmp_path: Path, name: str, at: int) -> None:
    (first, generation), (second, _) = worlds.run(2, attach, tmp_path, name, at)
    assert generation == 1
    assert torch.equal(first, second)
    assert close(first, train_alone(samples(64), [8] * 8))


def step_and_average(folder: Path) -> tuple[torch.Tensor, float, list[float]]:
    """The plain way, `step()` alone: who is behind finds the others in the next step, or at their end."""
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    trainer = Trainer.setup(model, optimizer, TrainerConfig(max_anchor=0))
    trainer.set_data_loader(DataLoader(samples(64), batch_size=8), forward_input="inputs", names=NAMES)
    regroup_with(trainer, folder)
    trainer._iterations.consensus = noted = Noted()
    trainer._iterations.take_requests = lambda: (trainer.num_steps + 1.0, 0.0, 0.0, 0.0)  # type: ignore[method-assign]
    if trainer.rank == 1:
        breaking(trainer._stepper.averager, "average", 4)
    for batch in trainer.epoch(0):
        cross_entropy(trainer.forward_batch(batch), batch["labels"]).backward()
        trainer.step()
        scheduler.step()
    moments = sum(float(one["exp_avg"].abs().sum()) for one in optimizer.state.values())
    return torch.cat([flat(model), torch.tensor([moments])]), float(optimizer.param_groups[0]["lr"]), noted.sums


def test_a_rank_that_is_a_step_behind_adopts_model_and_moments(worlds: Worlds, tmp_path: Path) -> None:
    (first, rate, sums), (second, other_rate, other_sums) = worlds.run(2, step_and_average, tmp_path)
    assert torch.equal(first, second)
    assert rate == other_rate == pytest.approx(0.01 * 0.9**8)
    assert sums == other_sums == [2.0 * (step + 1) for step in range(8)]


def accumulate(folder: Path) -> torch.Tensor:
    model = new_model()
    trainer = Trainer.setup(model, new_optimizer(model), TrainerConfig(max_anchor=0))
    regroup_with(trainer, folder)
    if trainer.rank == 1:
        breaking(trainer._stepper.averager, "average", 2)
    inputs, labels = samples(64).tensors
    for step in range(4):
        for part in range(2):
            start = 16 * step + 8 * trainer.rank + 4 * part
            own = slice(start, start + 4)
            cross_entropy(model(inputs[own]), labels[own]).backward()
        trainer.step()
    return flat(model)


def test_steps_of_several_backward_passes_go_on(worlds: Worlds, tmp_path: Path) -> None:
    first, second = worlds.run(2, accumulate, tmp_path)
    assert torch.equal(first, second)


class Survivors(SameMembers):
    """All but the last rank form the next group."""

    def next_group(self, generation: int, reason: str) -> NextGroup:
        group = super().next_group(generation, reason)
        return NextGroup(group.generation, group.position, group.world_size - 1, group.store)


def scatter(folder: Path, is_averaged: bool) -> tuple[list[int], bool, list[float]]:
    model = new_model()
    trainer = Trainer.setup(model, new_optimizer(model), TrainerConfig(max_anchor=0))
    regroup_with(trainer, folder)
    trainer._together.attachment = Survivors(trainer._world, folder)
    if trainer.rank == dist.get_world_size() - 1:
        trainer._world.give_up(0)
        return [], True, []
    inputs, labels = samples(9).tensors
    if is_averaged:
        cross_entropy(model(inputs), labels).backward()
        trainer.step()
    output = trainer.forward_scattered(inputs)
    return trainer.shard_sizes, close(output, model(inputs)), trainer.chunk_ratios


@pytest.mark.parametrize(("size", "is_averaged"), [(3, False), (3, True), (2, False)])
def test_a_batch_is_scattered_among_those_that_are_left(
    worlds: Worlds, tmp_path: Path, size: int, is_averaged: bool
) -> None:
    *told, _ = worlds.run(size, scatter, tmp_path, is_averaged)
    for sizes, is_right, ratios in told:
        assert is_right
        assert sum(sizes) in ((9,) if size == 3 else (0, 9))
        assert ratios == ([0.5, 0.5] if size == 3 else [])


def cannot(folder: Path) -> str:
    model = new_model()
    trainer = Trainer.setup(model, new_optimizer(model), TrainerConfig(max_anchor=0))
    regroup_with(trainer, folder)
    trainer._together.attachment = Attachment()
    if trainer.rank == 1:
        trainer._world.give_up(0)
        return ""
    try:
        trainer.mean({"a": 1.0})
    except PeerLost as error:
        return str(error)
    return "no error"


def test_without_a_coordinator_a_dead_rank_is_an_error(worlds: Worlds, tmp_path: Path) -> None:
    error, _ = worlds.run(2, cannot, tmp_path)
    assert "another rank of this loop has ended, or cannot be reached" in error
