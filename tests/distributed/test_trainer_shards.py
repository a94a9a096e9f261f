"""A batch is split by the speed of devices, and makes the gradient of one process, whatever the shares."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from elche_worker.trainer import Trainer, TrainerConfig
from support.loops import NAMES, Uneven, close, flat, new_model, new_optimizer, samples, train_alone
from support.worlds import Raised, Worlds


def train_shards(ratios: list[float], num_workers: int, with_loss_fn: bool) -> tuple[torch.Tensor, list[Any]]:
    model = new_model()
    trainer = Trainer.setup(model, new_optimizer(model), TrainerConfig(max_anchor=0))
    loader = DataLoader(samples(100), batch_size=24, num_workers=num_workers)
    trainer.set_data_loader(loader, forward_input="inputs", names=NAMES)
    Uneven(trainer, ratios)
    if with_loss_fn:
        trainer.set_loss_fn(lambda context: cross_entropy(context.output, context.batch["labels"]))
    seen = []
    for epoch in range(2):
        for batch in trainer.epoch(epoch):
            output = trainer.forward_batch(batch)
            if not with_loss_fn:
                cross_entropy(output, batch["labels"]).backward()
            trainer.step()
            seen.append((batch.size, trainer.shard_sizes))
    return flat(model), seen


@pytest.mark.parametrize("with_loss_fn", [True, False])
@pytest.mark.parametrize(
    ("ratios", "num_workers"), [([0.5, 0.3, 0.2], 0), ([0.9, 0.05, 0.05], 0), ([0.2, 0.8], 2)], ids=str
)
def test_unequal_shards_make_the_gradient_of_one_process(
    worlds: Worlds, ratios: list[float], num_workers: int, with_loss_fn: bool
) -> None:
    told = worlds.run(len(ratios), train_shards, ratios, num_workers, with_loss_fn)
    alone = train_alone(
        TensorDataset(*(torch.cat([one, one]) for one in samples(100).tensors)), [24, 24, 24, 24, 4] * 2
    )
    for rank, (parameters, seen) in enumerate(told):
        assert close(parameters, alone)
        assert all(size == sizes[rank] for size, sizes in seen)
        assert [sum(sizes) for _, sizes in seen] == [24, 24, 24, 24, 4] * 2
    assert torch.equal(told[0][0], told[1][0])


def train_tail() -> tuple[torch.Tensor, list[int], list[int]]:
    """The last batch has one sample, and there are three ranks."""
    model = new_model()
    trainer = Trainer.setup(model, new_optimizer(model), TrainerConfig(max_anchor=0))
    trainer.set_data_loader(DataLoader(samples(13), batch_size=6), forward_input="inputs", names=NAMES)
    sizes, outputs = [], []
    for batch in trainer.epoch(0):
        output = trainer.forward_batch(batch)
        cross_entropy(output, batch["labels"]).backward()
        outputs.append(len(trainer.gather().output))
        trainer.step()
        sizes.append(batch.size)
    return flat(model), sizes, outputs


def test_a_rank_without_a_sample_goes_through_the_same_motions_and_counts_nothing(worlds: Worlds) -> None:
    told = worlds.run(3, train_tail)
    for parameters, _, outputs in told:
        assert close(parameters, train_alone(samples(13), [6, 6, 1]))
        assert outputs == [6, 6, 1]
    assert [sum(sizes) for sizes in zip(*(sizes for _, sizes, _ in told), strict=True)] == [6, 6, 1]


def step_with_samples(counts: list[list[int]]) -> torch.Tensor:
    """A loader of one's own, with another number of samples on each rank."""
    rank, model = dist.get_rank(), new_model()
    trainer = Trainer.setup(model, new_optimizer(model))
    dataset, at = samples(1000), 0
    for of_ranks in counts:
        start = at + sum(of_ranks[:rank])
        if of_ranks[rank]:
            inputs, labels = dataset[start : start + of_ranks[rank]]
            cross_entropy(model(inputs), labels).backward()
        trainer.step(samples=of_ranks[rank])
        at += sum(of_ranks)
    return flat(model)


def test_own_loaders_count_by_their_samples(worlds: Worlds) -> None:
    counts = [[5, 2], [0, 7], [8, 1], [0, 0], [3, 3]]
    told = worlds.run(2, step_with_samples, counts)
    alone = train_alone(samples(1000), [7, 7, 9, 6])
    assert close(told[0], alone)
    assert torch.equal(told[0], told[1])


# The balance


class Slow(nn.Linear):
    """Rank 1 takes three times as long for a sample."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        import time

        time.sleep(len(inputs) * 0.001 * (3 if dist.get_rank() == 1 else 1))
        return super().forward(inputs)


def train_slow(el_che: bool) -> tuple[list[list[int]], list[float], list[float], list[int]]:
    model = nn.Sequential(Slow(6, 3))
    config = TrainerConfig(anchor=4, max_anchor=4) if el_che else TrainerConfig(max_anchor=0)
    trainer = Trainer.setup(model, new_optimizer(model), config)
    batch_size = 8 if el_che else 40
    trainer.set_data_loader(DataLoader(samples(40 * 14), batch_size=batch_size), forward_input="inputs", names=NAMES)
    sizes = []
    for batch in trainer.epoch(0):
        cross_entropy(trainer.forward_batch(batch), batch["labels"]).backward()
        trainer.step()
        sizes.append(trainer.shard_sizes)
    return sizes, trainer.chunk_ratios, trainer.throughput, trainer.batch_counts


def test_shards_follow_the_speed_of_devices(worlds: Worlds) -> None:
    first, second = worlds.run(2, train_slow, False)
    assert first == second
    sizes, ratios, throughput, counts = first
    assert sizes[:10] == [[20, 20]] * 10
    assert sum(ratios) == pytest.approx(1)
    assert 26 <= sizes[10][0] <= 33
    assert throughput[0] > 2 * throughput[1] > 0
    assert counts == []


def hinted_shards() -> tuple[list[float], list[int], float]:
    """Before anything is measured: the shares, the first batch's shards, and what that step has learnt of it."""
    model = new_model()
    config = TrainerConfig(max_anchor=0, speed_hint=(1, 3.0))
    trainer = Trainer.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), config)
    trainer.set_data_loader(DataLoader(samples(160), batch_size=40), forward_input="inputs", names=NAMES)
    ratios = trainer.chunk_ratios
    batch = next(trainer.epoch(0))
    cross_entropy(trainer.forward_batch(batch), batch["labels"]).backward()
    trainer.step()
    alone = new_model()
    inputs, labels = samples(160)[: sum(trainer.shard_sizes)]
    cross_entropy(alone(inputs), labels).backward()
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    return ratios, trainer.shard_sizes, float((flat(model) - flat(alone)).abs().max())


def test_a_hint_of_speed_is_the_balance_until_speeds_are_measured(worlds: Worlds) -> None:
    for ratios, sizes, difference in worlds.run(2, hinted_shards):
        assert ratios == pytest.approx([0.75, 0.25])
        assert sizes == [30, 10]
        assert difference < 1e-6


def test_el_che_gives_the_fast_one_more_batches(worlds: Worlds) -> None:
    first, second = worlds.run(2, train_slow, True)
    assert first == second
    sizes, _, throughput, counts = first
    assert sizes[0] == [32, 32]
    assert counts[1] == 4
    assert throughput[0] > 2 * throughput[1] > 0
    assert 8 <= counts[0] <= 5 * throughput[0] / throughput[1], "a rank may be slow by chance on a busy machine"


# Whole batches


def train_whole(ratios: list[float], sizes: list[int], overlap: bool) -> tuple[torch.Tensor, list[list[int]], bool]:
    """Every rank has the whole batch, and computes its share; whether all outputs are the model's is told, too."""
    model = new_model()
    trainer = Trainer.setup(model, new_optimizer(model), TrainerConfig(max_anchor=0, overlap=overlap))
    Uneven(trainer, ratios)
    at, shards, is_whole = 0, [], True
    for size in sizes:
        inputs, labels = samples(100)[at : at + size]
        at += size
        with torch.no_grad():
            is_whole &= close(trainer.forward_scattered(inputs), model(inputs))
        cross_entropy(trainer.forward_scattered(inputs), labels).backward()
        shards.append(trainer.shard_sizes)
        trainer.step()
    return flat(model), shards, is_whole


@pytest.mark.parametrize("overlap", [True, False])
def test_a_whole_batch_is_scattered_by_the_shares_and_its_outputs_come_in_order(worlds: Worlds, overlap: bool) -> None:
    sizes = [20, 12, 2, 20]
    for parameters, shards, is_whole in worlds.run(3, train_whole, [0.6, 0.3, 0.1], sizes, overlap):
        assert is_whole
        assert shards == [[12, 6, 2], [7, 4, 1], [1, 1, 0], [12, 6, 2]]
        assert close(parameters, train_alone(samples(100), sizes))


def scatter_wrongly(kind: str) -> None:
    model = new_model()
    trainer = Trainer.setup(model, new_optimizer(model))
    trainer.set_data_loader(DataLoader(samples(8), batch_size=4), forward_input="inputs", names=NAMES)
    match kind:
        case "length":
            trainer.forward_scattered(torch.ones(4 + trainer.rank, 6))
        case "rows":
            trainer.forward_scattered(3)
        case "part":
            trainer.forward_scattered(next(trainer.epoch(0))["inputs"])
        case "output":
            model.register_forward_hook(lambda module, inputs, output: output.mean())
            trainer.forward_scattered(torch.ones(4, 6))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("length", "the same whole batch on every rank, and they have [4, 5] samples"),
        ("rows", "tensors with a row for each sample"),
        ("part", "forward_batch(batch) is for them"),
        ("output", "a row for each sample, not a tensor of shape ()"),
    ],
)
def test_what_cannot_be_scattered_is_told_on_every_rank(worlds: Worlds, kind: str, words: str) -> None:
    for raised in worlds.run(2, scatter_wrongly, kind, may_raise=True):
        assert isinstance(raised, Raised)
        assert raised.kind == "Misuse"
        assert words in raised.message


def shuffled_order(drop_last: bool, num_workers: int) -> list[list[int]]:
    """The samples of each step, over all ranks, of two epochs."""
    model = new_model()
    trainer = Trainer.setup(model, new_optimizer(model))
    dataset = TensorDataset(*samples(30).tensors, torch.arange(30))
    loader = DataLoader(
        dataset,
        batch_size=8,
        shuffle=True,
        drop_last=drop_last,
        num_workers=num_workers,
        generator=torch.Generator().manual_seed(7 + dist.get_rank()),
    )
    trainer.set_data_loader(loader, forward_input="inputs", names=(*NAMES, "number"))
    steps = []
    for epoch in range(2):
        for batch in trainer.epoch(epoch):
            cross_entropy(trainer.forward_batch(batch), batch["labels"]).backward()
            steps.append(trainer.gather().batch["number"].tolist())
            trainer.step()
    return steps


@pytest.mark.parametrize(("drop_last", "num_workers"), [(False, 0), (True, 1)])
def test_the_order_is_that_of_rank_0s_sampler(worlds: Worlds, drop_last: bool, num_workers: int) -> None:
    generator = torch.Generator().manual_seed(7)
    loader = DataLoader(range(30), batch_size=8, shuffle=True, drop_last=drop_last, generator=generator)  # type: ignore[arg-type,var-annotated]
    expected = [batch.tolist() for _ in range(2) for batch in loader]
    first, second = worlds.run(2, shuffled_order, drop_last, num_workers)
    assert first == second
    assert [len(one) for one in first] == [len(one) for one in expected]
    if num_workers == 0:
        assert first == expected


def train_one_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """The first batch alone, taken out of an epoch that nobody holds any more; shares are three to one."""
    model = new_model()
    trainer = Trainer.setup(model, new_optimizer(model), TrainerConfig(max_anchor=0))
    trainer.set_data_loader(DataLoader(samples(16), batch_size=8), forward_input="inputs", names=NAMES)
    Uneven(trainer, [0.75, 0.25])
    batch = next(trainer.epoch(0))
    cross_entropy(trainer.forward_batch(batch), batch["labels"]).backward()
    trainer.step()
    return flat(model), train_alone(samples(16), [8])


def test_a_batch_counts_by_its_samples_when_its_epoch_is_left(worlds: Worlds) -> None:
    for parameters, alone in worlds.run(2, train_one_batch):
        assert close(parameters, alone)
