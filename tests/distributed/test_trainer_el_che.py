"""Loops under El Che step along the gradient of all samples, and may be left and trained again."""

import contextlib
import io
from itertools import chain, pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from elche_worker.collectives import world
from elche_worker.trainer import Trainer, TrainerConfig, fleet
from support.loops import NAMES, close, flat, new_model, new_optimizer, samples, train_alone
from support.worlds import Raised, Worlds


def train_cadence(
    hint: tuple[int, float] | None, with_loss_fn: bool, num_workers: int, num_samples: int
) -> tuple[torch.Tensor, list[list[int]], list[int]]:
    model = new_model()
    config = TrainerConfig(anchor=2, max_anchor=2, speed_hint=hint)
    trainer = Trainer.setup(model, new_optimizer(model), config)
    assert trainer.has_el_che
    loader = DataLoader(samples(num_samples), batch_size=4, num_workers=num_workers)
    trainer.set_data_loader(loader, forward_input="inputs", names=NAMES)
    if with_loss_fn:
        trainer.set_loss_fn(lambda context: cross_entropy(context.output, context.batch["labels"]))
    steps, sizes = [], []
    for batch in trainer.epoch(0):
        output = trainer.forward_batch(batch)
        assert output.requires_grad != with_loss_fn
        if not with_loss_fn:
            cross_entropy(output, batch["labels"]).backward()
        sizes.append(batch.size)
        trainer.step()
        steps.append(trainer.shard_sizes)
    return flat(model), steps, sizes


@pytest.mark.parametrize(
    ("with_loss_fn", "num_workers", "num_samples"),
    [(True, 0, 101), (False, 1, 101), (True, 1, 64), (False, 0, 64)],  # each value of one with each of another
)
def test_el_che_steps_along_the_gradient_of_all_samples(
    worlds: Worlds, with_loss_fn: bool, num_workers: int, num_samples: int
) -> None:
    told = worlds.run(2, train_cadence, (1, 3.0), with_loss_fn, num_workers, num_samples)
    (first, steps, first_sizes), (second, other_steps, second_sizes) = told
    assert steps == other_steps
    assert steps[0] == [24, 8]
    assert sum(first_sizes) + sum(second_sizes) == num_samples
    assert [first_sizes, second_sizes] == [list(column) for column in zip(*steps, strict=True)]
    assert torch.equal(first, second)
    assert close(first, train_alone(samples(num_samples), [sum(sizes) for sizes in steps]))


def train_clipped(max_norm: float) -> tuple[torch.Tensor, torch.Tensor]:
    """One El Che step of two batches, and the same by hand: sums are clipped, then divided by their count."""
    model, by_hand = new_model(), [new_model() for _ in range(2)]
    trainer = Trainer.setup(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        TrainerConfig(anchor=2, max_anchor=2, max_grad_norm=max_norm, speed_hint=(1, 2.0)),
    )
    dataset = samples(24)
    trainer.set_data_loader(DataLoader(dataset, batch_size=4), forward_input="inputs", names=NAMES)
    trainer.set_loss_fn(lambda context: cross_entropy(context.output, context.batch["labels"]))
    batches = trainer.epoch(0)
    trainer.forward_batch(next(batches))
    trainer.step()
    expected = flat(new_model())
    for replica, (start, count) in zip(by_hand, [(0, 4), (16, 2)], strict=True):
        for batch in range(count):
            inputs, labels = dataset[start + 4 * batch : start + 4 * batch + 4]
            cross_entropy(replica(inputs), labels).backward()
        nn.utils.clip_grad_norm_(replica.parameters(), max_norm)
        gradient = torch.cat([one.grad.reshape(-1) for one in replica.parameters() if one.grad is not None])
        expected = expected - gradient / count * (count / 6)
    return flat(model), expected


def test_el_che_clips_the_sum_of_each_rank(worlds: Worlds) -> None:
    for parameters, expected in worlds.run(2, train_clipped, 0.05):
        assert close(parameters, expected)


@pytest.mark.parametrize(
    ("settings", "enables"),
    [
        ({}, True),
        ({"anchor": 10}, True),
        ({"max_anchor": 5, "max_grad_norm": 1.0}, True),
        ({"overhead_target": 0.1}, True),
        ({"speed_hint": (1, 3.0)}, True),
        ({"max_anchor": 0}, False),
        ({"max_grad_norm": 1.0}, False),
        ({"checkpoint_dir": "kept", "device": "cpu"}, False),
    ],
)
def test_settings_for_something_else_enable_no_el_che(settings: dict[str, Any], enables: bool) -> None:
    """Who asked for clipping, or for checkpoints, got larger and fewer steps, and a model that had learnt less."""
    assert TrainerConfig(**settings).has_el_che == enables


def on_devices(names: list[str]) -> tuple[bool, bool, str]:
    fleet.model_name = lambda _: names[dist.get_rank()]  # type: ignore[assignment]
    fleet.memory_of = lambda _: [24, 6][dist.get_rank()] << 30  # type: ignore[assignment]
    try:
        model = new_model()
        with contextlib.redirect_stderr(io.StringIO()) as said:
            trainer = Trainer.setup(model, new_optimizer(model))
        return trainer.has_el_che, trainer.is_mixed, said.getvalue()
    finally:
        fleet.model_name = world.model_name  # type: ignore[attr-defined]
        fleet.memory_of = world.memory_of  # type: ignore[attr-defined]


def test_devices_that_differ_divide_each_batch(worlds: Worlds) -> None:
    """Steps of several batches taught a loop with the learning rate of one device much less, in silence."""
    first, second = worlds.run(2, on_devices, ["RTX 4090", "GTX 1060"])
    assert first[:2] == second[:2] == (False, True)
    assert first[2] == "elche: 2 devices (heterogeneous): RTX 4090 (24 GiB), GTX 1060 (6 GiB)\n"
    assert second[2] == ""
    first, second = worlds.run(2, on_devices, ["RTX 4090", "RTX 4090"])
    assert first[:2] == second[:2] == (False, False)
    assert "heterogeneous" not in first[2]


def test_an_epoch_may_be_trained_again_or_left() -> None:
    model = new_model()
    trainer = Trainer.setup(model, new_optimizer(model), TrainerConfig(device="cpu"))
    trainer.set_data_loader(DataLoader(samples(24), batch_size=8), forward_input="inputs", names=NAMES)
    assert [len(list(trainer.epoch(0))) for _ in range(2)] == [3, 3]
    first = [next(trainer.epoch(0))["inputs"] for _ in range(3)]
    assert torch.equal(first[0], first[1])
    assert torch.equal(first[0], first[2])
    assert list(trainer.epochs(2)) == [0, 1]
    assert list(trainer.epochs(2)) == [0, 1]


@pytest.mark.parametrize("num_before", [0, 1])
def test_gradients_of_batches_that_are_left_are_in_no_step(num_before: int) -> None:
    """They were computed, and then their epoch was left for another before a step."""
    told = []
    for leaves in (True, False):
        model = new_model()
        trainer = Trainer.setup(model, new_optimizer(model), TrainerConfig(device="cpu"))
        trainer.set_data_loader(DataLoader(samples(24), batch_size=8), forward_input="inputs", names=NAMES)
        for epoch, num_steps in enumerate((num_before, 3)):
            for step, batch in enumerate(trainer.epoch(epoch)):
                if step == num_steps and not leaves:
                    break
                cross_entropy(trainer.forward_batch(batch), batch["labels"]).backward()
                if step == num_steps:
                    break
                trainer.step()
        assert trainer.num_steps == num_before + 3
        told.append(flat(model))
    assert torch.equal(*told)


def mean_of_ranks() -> tuple[dict[str, float], int, list[int]]:
    model = new_model()
    trainer = Trainer.setup(model, new_optimizer(model), TrainerConfig())
    trainer.set_data_loader(DataLoader(samples(400), batch_size=4), forward_input="inputs", names=NAMES)
    means = trainer.mean({"accuracy": trainer.rank}, weight=1 + 2 * trainer.rank)
    return means, trainer.batch_counts[0], [len(batch.parts) for batch in trainer.epoch(0)][:1]


def test_numbers_are_averaged_and_an_epoch_keeps_its_steps(worlds: Worlds) -> None:
    for means, count, parts in worlds.run(2, mean_of_ranks):
        assert means == {"accuracy": 0.75}
        assert count == 2  # a hundred batches, two ranks, at least twenty steps
        assert parts == [2]


def mean_of(weights: list[float], *named: dict[str, float]) -> dict[str, float]:
    model = new_model()
    trainer = Trainer.setup(model, new_optimizer(model), TrainerConfig())
    return trainer.mean(named[trainer.rank], weights[trainer.rank])


@pytest.mark.parametrize("other", [{"a": 3.0, "c": 2.0}, {"a": 3.0}, {}])
def test_numbers_of_other_names_are_not_averaged(worlds: Worlds, other: dict[str, float]) -> None:
    """They were averaged with whatever stood at their place: a loss with an accuracy."""
    for raised in worlds.run(2, mean_of, [1.0, 1.0], {"a": 1.0, "b": 2.0}, other, may_raise=True):
        assert isinstance(raised, Raised)
        assert raised.message.startswith("mean(): rank 0 gives 'a', 'b', and rank 1 ")


def test_numbers_are_averaged_by_name_and_those_without_weight_do_not_count(worlds: Worlds) -> None:
    mixed = worlds.run(2, mean_of, [1.0, 3.0], {"a": 1.0, "b": 2.0}, {"b": 4.0, "a": 0.0})
    assert mixed == [{"a": 0.25, "b": 3.5}] * 2
    assert worlds.run(2, mean_of, [0.0, 3.0], {}, {"b": 4.0}) == [{"b": 4.0}] * 2


def leave_an_epoch(el_che: bool, num_workers: int) -> tuple[torch.Tensor, list[int]]:
    """Epochs that are left in their middle, before a step and after it."""
    model = new_model()
    config = TrainerConfig(anchor=1, max_anchor=4, speed_hint=(1, 4.0)) if el_che else TrainerConfig(max_anchor=0)
    trainer = Trainer.setup(model, new_optimizer(model), config)
    loader = DataLoader(samples(64), batch_size=4, num_workers=num_workers)
    trainer.set_data_loader(loader, forward_input="inputs", names=NAMES)
    sizes = []
    for epoch, num_steps in enumerate((2, 0, 1, 1000)):
        for step, batch in enumerate(trainer.epoch(epoch)):
            if step >= num_steps:
                break
            cross_entropy(trainer.forward_batch(batch), batch["labels"]).backward()
            trainer.step()
            sizes.append(sum(trainer.shard_sizes))
    return flat(model), sizes


@pytest.mark.parametrize(("el_che", "num_workers"), [(True, 0), (True, 1), (False, 0)])
def test_an_epoch_may_be_left_in_its_middle(worlds: Worlds, el_che: bool, num_workers: int) -> None:
    (first, sizes), (second, other_sizes) = worlds.run(2, leave_an_epoch, el_che, num_workers)
    assert torch.equal(first, second)
    assert sizes == other_sizes
    assert sum(sizes[3:]) == 64


def look_ahead(how: str) -> str:
    """What a loop prints that takes batches before it steps (`how` "ahead"), or sums up gradients ("summed")."""
    model = new_model()
    trainer = Trainer.setup(model, new_optimizer(model), TrainerConfig(max_anchor=0))
    trainer.set_data_loader(DataLoader(samples(32), batch_size=8), forward_input="inputs", names=NAMES)
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        for epoch in range(2):
            batches = trainer.epoch(epoch)
            if how == "ahead":
                batches = (one for one, _ in pairwise(chain(batches, [None])) if one is not None)
            for number, batch in enumerate(batches):
                cross_entropy(trainer.forward_batch(batch), batch["labels"]).backward()
                if how == "ahead" or number in (2, 3):
                    trainer.step()
    return printed.getvalue()


def test_a_step_without_a_batch_is_said_once(worlds: Worlds) -> None:
    """Batches were taken before the steps, in which the ranks then counted alike, in silence."""
    first, other = worlds.run(2, look_ahead, "ahead")
    assert first.count("a step is made without a batch of epoch() or shares() since the one before") == 1
    assert not other
    assert worlds.run(2, look_ahead, "summed") == ["", ""]
