"""Ranks of a loop that draw the same batches are named: a second device then does only what the first one does."""

import contextlib
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

from elche_worker.trainer import Trainer, TrainerConfig
from support.loops import NAMES, new_model, new_optimizer, samples
from support.worlds import Worlds

STEPS = 4


def train(kind: str, steps: int = STEPS) -> str:
    """What the loop says on stderr."""
    rank, model = dist.get_rank(), new_model()
    dataset, options = samples(64), {"batch_size": 4, "shuffle": True}
    if kind == "sampler":
        options = {"batch_size": 4, "sampler": DistributedSampler(dataset)}
    if kind == "dropout":
        model.insert(2, nn.Dropout(0.5))
    if kind != "seeded by rank":
        torch.manual_seed(7)
    else:
        torch.manual_seed(7 + rank)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        trainer = Trainer.setup(model, new_optimizer(model), TrainerConfig(overlap=kind == "overlapped", max_anchor=0))
        batches = iter(DataLoader(dataset, **options))
        for step in range(steps):
            inputs, labels = next(batches)
            if kind == "one pair" and rank == 2:
                inputs = inputs + 1
            if kind == "at first" and rank == 1 and step == 2:
                inputs = inputs + 1
            loss = cross_entropy(model(inputs), labels)
            if kind == "zero":
                loss = loss * 0
            if kind == "overflows":
                loss = loss * 1e39
            loss.backward()
            trainer.step()
    return said.getvalue()


def share_with_epoch() -> str:
    """Elche gives out the batches, and all samples are equal."""
    model = new_model()
    dataset = torch.utils.data.TensorDataset(torch.ones(64, 6), torch.zeros(64, dtype=torch.long))
    with contextlib.redirect_stderr(io.StringIO()) as said:
        trainer = Trainer.setup(model, new_optimizer(model), TrainerConfig(max_anchor=0))
        trainer.set_data_loader(DataLoader(dataset, batch_size=8), forward_input="inputs", names=NAMES)
        for batch in trainer.epoch(0):
            cross_entropy(trainer.forward_batch(batch), batch["labels"]).backward()
            trainer.step()
    return said.getvalue()


@pytest.mark.parametrize(
    ("kind", "size", "ranks"),
    [
        ("same seed", 2, "0 and 1"),
        ("overlapped", 2, "0 and 1"),
        ("dropout", 3, "0, 1 and 2"),
        ("one pair", 3, "0 and 1"),
    ],
)
def test_ranks_that_draw_the_same_batches_are_named_once(worlds: Worlds, kind: str, size: int, ranks: str) -> None:
    first, *others = worlds.run(size, train, kind)
    assert first.count(f"elche: ranks {ranks} had the same gradients in the first 3 steps") == 1
    assert not any(others)


@pytest.mark.parametrize("kind", ["sampler", "seeded by rank", "at first", "zero", "overflows"])
def test_nothing_is_said_of_ranks_whose_batches_differ_or_say_nothing(worlds: Worlds, kind: str) -> None:
    assert not [said for said in worlds.run(2, train, kind) if "same gradients" in said]


def test_nothing_is_said_before_the_third_step(worlds: Worlds) -> None:
    assert not [said for said in worlds.run(2, train, "same seed", 2) if "same gradients" in said]


def test_nothing_is_said_where_elche_gives_out_the_batches(worlds: Worlds) -> None:
    results: list[Any] = worlds.run(2, share_with_epoch)
    assert not [said for said in results if "same gradients" in said]
