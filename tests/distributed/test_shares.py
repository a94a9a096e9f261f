"""A loop that makes its batches itself gets their sizes by the ranks' speed, and makes the step of the whole batch."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import LBFGS, SGD
from torch.utils.data import DataLoader

from elche_worker.trainer import Trainer, TrainerConfig
from support.loops import NAMES, close, flat, new_model, new_optimizer, samples, train_alone
from support.worlds import Raised, Worlds


def own_part(trainer: Trainer, step: int, batch_size: int, count: int) -> Any:
    """This rank's part of a global batch that all could make."""
    start = step * batch_size + sum(trainer.shard_sizes[: trainer.rank])
    return samples(400)[start : start + count]


def train_by_hint(hint: tuple[int, float] | None, batch_size: int) -> tuple[Tensor, list[int], list[list[int]]]:
    model = new_model()
    trainer = Trainer.setup(model, new_optimizer(model), TrainerConfig(speed_hint=hint))
    own, sizes = [], []
    for step, count in enumerate(trainer.shares(batch_size, num_steps=8)):
        inputs, labels = own_part(trainer, step, batch_size, count)
        cross_entropy(trainer(inputs), labels).backward()
        trainer.step()
        own.append(count)
        sizes.append(trainer.shard_sizes)
    return flat(model), own, sizes


@pytest.mark.parametrize(
    ("hint", "batch_size", "sizes"),
    [(None, 12, [4, 4, 4]), ((1, 4.0), 12, [5, 2, 5]), ((2, 100.0), 20, [10, 8, 2]), ((0, 100.0), 6, [2, 2, 2])],
)
def test_shares_make_the_step_of_the_whole_batch(
    worlds: Worlds, hint: tuple[int, float] | None, batch_size: int, sizes: list[int]
) -> None:
    told = worlds.run(3, train_by_hint, hint, batch_size)
    for rank, (parameters, own, seen) in enumerate(told):
        assert seen == [sizes] * 8
        assert own == [sizes[rank]] * 8
        assert close(parameters, train_alone(samples(400), [batch_size] * 8))
    assert torch.equal(told[0][0], told[1][0])


def train_slow() -> tuple[list[list[int]], list[float]]:
    """Rank 1 takes three times as long for a sample; there is BatchNorm, which needs two samples."""
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    trainer = Trainer.setup(model, SGD(model.parameters(), lr=0.1))
    sizes = []
    for step, count in enumerate(trainer.shares(40, num_steps=14)):
        inputs, labels = own_part(trainer, step % 10, 40, count)
        cross_entropy(trainer(inputs), labels).backward()
        time.sleep(count * 0.001 * (1 + 2 * trainer.rank))
        trainer.step()
        sizes.append(trainer.shard_sizes)
    return sizes, trainer.throughput


def test_shares_follow_what_is_measured(worlds: Worlds) -> None:
    first, second = worlds.run(2, train_slow)
    assert first == second
    sizes, throughput = first
    assert sizes[:10] == [[20, 20]] * 10
    assert all(sum(one) == 40 for one in sizes)
    assert sizes[10][0] > sizes[10][1] >= 2
    assert throughput[0] > throughput[1] > 0


def refused(kind: str) -> None:
    model = new_model()
    config = TrainerConfig(anchor=5, max_anchor=8) if kind == "anchor" else None
    trainer = Trainer.setup(model, new_optimizer(model), config)
    if kind == "loader":
        trainer.set_data_loader(DataLoader(samples(8), batch_size=4), forward_input="inputs", names=NAMES)
    size: Any = {"small": 3, "text": "64", "other": 8 + 2 * dist.get_rank()}.get(kind, 8)
    list(trainer.shares(size, num_steps=1))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("small", "batch_size must be a whole number of at least 4 (2 for each of 2 ranks), not 3"),
        ("text", "not '64'"),
        ("other", "batch_size=10, num_steps=1"),
        ("loader", "set_data_loader has given a loader: use epoch()"),
        ("anchor", "max_anchor=8 has no effect in a loop that takes its batches itself"),
    ],
)
def test_shares_that_cannot_be_are_refused_on_every_rank(worlds: Worlds, kind: str, words: str) -> None:
    for raised in worlds.run(2, refused, kind, may_raise=True):
        assert isinstance(raised, Raised)
        assert raised.kind == "Misuse"
        assert words in raised.message


def train_on_made_up(place: Path, *, resumes: bool) -> tuple[Tensor, list[float]]:
    """Batches are drawn at random, as one process without a data set would."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))
    config = TrainerConfig(device="cpu", checkpoint_dir=str(place), checkpoint_every_minutes=1e6)
    trainer = Trainer.setup(model, new_optimizer(model), config)
    if resumes:
        trainer.load(str(place))
    drawn = []
    for count in trainer.shares(4, num_steps=12):
        inputs = torch.randn(count, 6)
        drawn.append(inputs.sum().item())
        model(inputs).square().mean().backward()
        trainer.step()
        trainer._progress.attachment.operator.wants_checkpoint = trainer.num_steps == 4 and not resumes
        drawn.append(torch.rand(1).item())  # what follows the step
    trainer.close()
    return flat(model), drawn


def test_a_loop_of_shares_goes_on_with_its_random_numbers(tmp_path: Path) -> None:
    whole, drawn = train_on_made_up(tmp_path, resumes=False)
    (saved,) = tmp_path.iterdir()
    num_saved = int(saved.name.removeprefix("step-"))
    assert 4 < num_saved < 12
    resumed, rest = train_on_made_up(tmp_path, resumes=True)
    assert rest == drawn[2 * num_saved :]
    assert torch.equal(whole, resumed)


def test_shares_are_taken_one_after_the_other() -> None:
    model = new_model()
    trainer = Trainer.setup(model, new_optimizer(model), TrainerConfig(device="cpu"))
    first = trainer.shares(1)
    assert next(first) == 1
    assert next(trainer.shares(3)) == 3
    with pytest.raises(Exception, match="was left for another, or for an epoch"):
        next(first)
    assert list(trainer.shares(3, num_steps=0)) == []


def train_by_lbfgs(num_steps: int, place: str = "") -> Tensor:
    """A loop that gives LBFGS its closure; what is saved in `place` goes on from there."""
    model = new_model()
    optimizer = LBFGS(model.parameters(), lr=0.5, max_iter=1, history_size=4)
    trainer = Trainer.setup(model, optimizer)
    if place:
        trainer.load(place)
    for count in trainer.shares(40, num_steps=num_steps):
        inputs, labels = own_part(trainer, 0, 40, count)
        loss = cross_entropy(trainer(inputs), labels)
        loss.backward()
        trainer.average_gradients()
        optimizer.step(lambda loss=loss: loss)  # type: ignore[misc]
        trainer.finish_step()
    if place and not trainer.rank:
        trainer.save(place)
    trainer.close()
    return flat(model)


def test_lbfgs_makes_the_steps_of_the_whole_batch_and_goes_on_with_its_history(worlds: Worlds, tmp_path: Path) -> None:
    alone = train_by_lbfgs(12)
    assert not close(alone, train_by_lbfgs(8))
    for parameters in worlds.run(2, train_by_lbfgs, 12):
        assert torch.allclose(parameters, alone, rtol=0, atol=1e-4)
    train_by_lbfgs(8, str(tmp_path))
    assert torch.equal(train_by_lbfgs(12, str(tmp_path)), alone)
