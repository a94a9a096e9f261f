"""Batches that a loop takes before it makes steps with them, and epochs whose size changes."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr
from io import StringIO

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset, default_collate

from elche.errors import Misuse
from elche_worker.trainer import Trainer, TrainerConfig
from support.loops import NAMES, close, flat, new_model, new_optimizer, samples, train_alone
from support.worlds import Worlds


def set_up(dataset: TensorDataset, sampler: "Sampler[int] | None" = None) -> Trainer:
    model = new_model()
    trainer = Trainer.setup(model, new_optimizer(model), TrainerConfig(max_anchor=0))
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    trainer.set_data_loader(loader, forward_input="inputs", names=NAMES)
    return trainer


def train_listed(is_listed: bool, per_step: int) -> str:
    """What is said while it trains."""
    trainer = set_up(samples(16))
    with redirect_stderr(StringIO()) as said:
        for number, batch in enumerate(list(trainer.epoch(0)) if is_listed else trainer.epoch(0)):
            cross_entropy(trainer.forward_batch(batch), batch["labels"]).backward()
            if number % per_step == per_step - 1:
                trainer.step()
        trainer.step()
    return said.getvalue()


@pytest.mark.parametrize(("is_listed", "per_step"), [(True, 1), (False, 1), (False, 2), (False, 9)])
@pytest.mark.parametrize("size", [1, 2])
def test_a_list_of_an_epochs_batches_is_said_once(worlds: Worlds, size: int, is_listed: bool, per_step: int) -> None:
    """The epoch counts as trained from the first step on: a resumed loop leaves it out."""
    said, *others = worlds.run(size, train_listed, is_listed, per_step)
    assert said.count("as list(trainer.epoch(0)) does") == int(is_listed), said
    assert not any(others)


def test_batches_that_another_thread_fetches_ahead_are_refused() -> None:
    """With two ranks it was left to the threads how many a step counted: "the ranks make different calls"."""
    trainer, ahead = set_up(samples(16)), ThreadPoolExecutor(1)
    batch = ahead.submit(next, trainer.epoch(0)).result()
    ahead.shutdown()
    cross_entropy(trainer.forward_batch(batch), batch["labels"]).backward()
    with pytest.raises(Misuse, match="batches are taken in another thread than the one that calls step"):
        trainer.step()
    trainer.close()


def test_batches_that_were_only_looked_at_are_not_counted_by_a_step() -> None:
    """The next one had them all as trained, so that a resumed loop left out as many samples of its epoch."""
    with set_up(samples(16)) as trainer:
        for epoch in (0, 0, 1):
            with torch.no_grad():
                trained = [trainer.forward_batch(batch) for batch in trainer.epoch(epoch)]
        assert len(trained) == 4
        batch = next(batches := trainer.epoch(1))
        cross_entropy(trainer.forward_batch(batch), batch["labels"]).backward()
        trainer.step()
        assert trainer._progress.position.done == 4
        assert len(list(batches)) == 3


def train_another(says: bool) -> str:
    """What is said while a second model is trained with the batches that the first one's trainer gives out."""
    trainer, model = set_up(samples(16)), new_model(5)
    another = Trainer.setup(model, new_optimizer(model), TrainerConfig(max_anchor=0))
    with redirect_stderr(StringIO()) as said:
        for batch in trainer.epoch(0):
            cross_entropy(trainer.forward_batch(batch), batch["labels"]).backward()
            trainer.step()
            cross_entropy(another(batch["inputs"]), batch["labels"]).backward()
            another.step(batch.size if says else None)
    return said.getvalue()


@pytest.mark.parametrize("says", [True, False])
def test_a_batch_that_another_trainer_has_given_out_counts_alike_on_all_ranks_only_in_words(
    worlds: Worlds, says: bool
) -> None:
    said, _ = worlds.run(2, train_another, says)
    assert said.count("while another one has given out its own") == int(not says), said


def accumulate(per_step: int) -> tuple[list[tuple[int, int, int]], torch.Tensor]:
    """Positions after each epoch, of which the last step is made behind the loop over its batches."""
    trainer = set_up(samples(40))
    positions = []
    for epoch in trainer.epochs(2):
        for number, batch in enumerate(trainer.epoch(epoch)):
            cross_entropy(trainer.forward_batch(batch), batch["labels"]).backward()
            if number % per_step == per_step - 1:
                trainer.step()
        trainer.step()
        position = trainer._progress.position
        positions.append((position.epoch, position.done, position.epoch_steps))
    return positions, flat(trainer.model)


@pytest.mark.parametrize("per_step", [4, 100])
@pytest.mark.parametrize("size", [1, 2])
def test_a_step_behind_an_epoch_is_not_of_the_next(worlds: Worlds, size: int, per_step: int) -> None:
    """A loop that was resumed from a checkpoint made there left out as many samples of the next epoch."""
    for positions, _ in worlds.run(size, accumulate, per_step):
        assert positions == [(1, 0, 0), (2, 0, 0)]


class Growing(Sampler[int]):
    """A curriculum: in each epoch 8 samples more."""

    def __init__(self) -> None:
        self.count = 0

    def __len__(self) -> int:
        return self.count + 8

    def __iter__(self) -> Iterator[int]:
        self.count += 8
        return iter(range(self.count))


def train_growing() -> tuple[int, int, torch.Tensor]:
    trainer = set_up(samples(40), Growing())
    for epoch in trainer.epochs(3):
        for batch in trainer.epoch(epoch):
            cross_entropy(trainer.forward_batch(batch), batch["labels"]).backward()
            trainer.step()
    return trainer.num_steps, trainer._progress.epoch_size, flat(trainer.model)


@pytest.mark.parametrize("size", [1, 2])
def test_an_epoch_has_what_the_sampler_gives_in_it(worlds: Worlds, size: int) -> None:
    """Each had as many as the first: what a curriculum added was never trained."""
    expected = train_in_epochs([8, 16, 24])
    for num_steps, epoch_size, trained in worlds.run(size, train_growing):
        assert (num_steps, epoch_size) == (12, 24)
        assert close(trained, expected)


def train_in_epochs(sizes: list[int]) -> torch.Tensor:
    inputs, labels = samples(40).tensors
    order = torch.tensor([one for size in sizes for one in range(size)])
    return train_alone(TensorDataset(inputs[order], labels[order]), [4] * (len(order) // 4))


def train_relabelled(num_workers: int) -> torch.Tensor:
    """Self-training: the second epoch has other labels, by a new tensor, and the third others again, in its place; the
    fourth has a `collate_fn` of its own.
    """
    dataset = samples(16)
    model = new_model()
    trainer = Trainer.setup(model, new_optimizer(model), TrainerConfig(max_anchor=0))
    loader = DataLoader(dataset, batch_size=4, num_workers=num_workers)
    trainer.set_data_loader(loader, forward_input="inputs", names=NAMES)
    for epoch in trainer.epochs(4):
        relabel(loader, epoch)
        for batch in trainer.epoch(epoch):
            cross_entropy(trainer.forward_batch(batch), batch["labels"]).backward()
            trainer.step()
    return flat(model)


class Drawn(Dataset[torch.Tensor]):
    """Draws its samples, whatever their number: a text at random offsets, pairs of images."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, _: int) -> torch.Tensor:
        return torch.tensor([torch.rand(()).item(), random.random(), float(np.random.rand())])


def with_noise(items: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([torch.stack(items), torch.rand(len(items), 1)], dim=1)


def take_drawn(num_workers: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two epochs of this rank's part, and what the script itself draws next."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = torch.nn.Linear(4, 1)
    trainer = Trainer.setup(model, new_optimizer(model), TrainerConfig(max_anchor=0))
    loader = DataLoader(Drawn(), batch_size=8, collate_fn=with_noise, num_workers=num_workers)
    trainer.set_data_loader(loader, names=("drawn",))
    taken = []
    for epoch in trainer.epochs(2):
        for batch in trainer.epoch(epoch):
            taken.append(batch["drawn"])
            model(batch["drawn"]).mean().backward()
            trainer.step()
    return torch.cat(taken), torch.rand(1)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_ranks_that_are_seeded_alike_draw_other_samples(worlds: Worlds, num_workers: int) -> None:
    """Without worker processes the two ranks trained the same samples, in a loop whose data set draws them."""
    (first, first_next), (second, second_next) = worlds.run(2, take_drawn, num_workers)
    assert len(first) + len(second) == 2 * 64
    for drawn in torch.cat([first, second]).T:
        assert len(drawn.unique()) == 2 * 64
    assert torch.equal(first_next, second_next)


def test_on_one_process_a_data_set_draws_as_without_elche(worlds: Worlds) -> None:
    ((taken, following),) = worlds.run(1, take_drawn, 0)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    torch.nn.Linear(4, 1)
    loader = DataLoader(Drawn(), batch_size=8, collate_fn=with_noise)
    assert torch.equal(taken, torch.cat([batch for _ in range(2) for batch in loader]))
    assert torch.equal(following, torch.rand(1))


def relabel(loader: "DataLoader[tuple[torch.Tensor, ...]]", epoch: int) -> None:
    dataset = loader.dataset
    assert isinstance(dataset, TensorDataset)
    match epoch:
        case 1:
            dataset.tensors = (dataset.tensors[0], (dataset.tensors[1] + 1) % 3)
        case 2:
            dataset.tensors[1].fill_(2)
        case 3:
            loader.collate_fn = halved


def halved(items: list[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
    inputs, labels = default_collate(items)
    return [inputs / 2, labels]


def train_relabelled_alone() -> torch.Tensor:
    model = new_model()
    optimizer = new_optimizer(model)
    loader = DataLoader(samples(16), batch_size=4)
    for epoch in range(4):
        relabel(loader, epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    return flat(model)


@pytest.mark.parametrize(("size", "num_workers"), [(1, 0), (2, 0), (2, 1)])
def test_what_a_script_changes_in_the_data_between_epochs_is_trained(
    worlds: Worlds, size: int, num_workers: int
) -> None:
    """The labels of the first epoch were trained to the end, without a word."""
    for trained in worlds.run(size, train_relabelled, num_workers):
        assert close(trained, train_relabelled_alone())
