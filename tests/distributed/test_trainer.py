"""Loops of the user's own on real processes: what `step()` does is what one process would do with all samples."""

import contextlib
import copy
import io
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from worlds import Raised, Worlds

from elche.errors import Misuse
from elche_worker.collectives import gradients, world
from elche_worker.trainer import LossContext, Trainer, TrainerConfig, fleet

NAMES = ("inputs", "labels")

# So that a small model has several buckets, which may leave during backward, on every rank that runs what is here. Set
# by some tests alone, it would stay in the processes that have run those, and a later world has ranks without it.
gradients.FIRST_BUCKET_BYTES, gradients.BUCKET_BYTES = 200, 400


def new_model(seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def samples(count: int, seed: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(count, 6, generator=generator), torch.randint(0, 3, (count,), generator=generator))


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([one.detach().reshape(-1) for one in model.parameters()])


def train_alone(dataset: TensorDataset, batch_sizes: list[int], model: nn.Module | None = None) -> torch.Tensor:
    """Plain PyTorch on one process: the samples in order, in batches of these sizes."""
    model = model or new_model()
    optimizer = new_optimizer(model)
    at = 0
    for size in batch_sizes:
        inputs, labels = dataset[at : at + size]
        at += size
        cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return flat(model)


def close(one: torch.Tensor, other: torch.Tensor, tolerance: float = 1e-6) -> bool:
    return bool(torch.allclose(one, other, rtol=0, atol=tolerance))


# Equal shards: as PyTorch's DDP


def train_beside_ddp(num_steps: int, overlap: bool) -> float:
    """The largest difference of parameters, after as many steps of the same loop with each."""
    rank, size = dist.get_rank(), dist.get_world_size()
    ours, theirs = new_model(), DistributedDataParallel(new_model())
    our_optimizer, their_optimizer = new_optimizer(ours), new_optimizer(theirs)
    trainer = Trainer.setup(ours, our_optimizer, TrainerConfig(max_anchor=0, overlap=overlap))
    dataset = samples(num_steps * size * 8)
    for step in range(num_steps):
        start = (step * size + rank) * 8
        inputs, labels = dataset[start : start + 8]
        cross_entropy(ours(inputs), labels).backward()
        trainer.step()
        cross_entropy(theirs(inputs), labels).backward()
        their_optimizer.step()
        their_optimizer.zero_grad()
    trainer.close()
    return float((flat(ours) - flat(theirs.module)).abs().max())


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("size", [2, 3])
def test_a_hundred_steps_equal_those_of_ddp(worlds: Worlds, size: int, overlap: bool) -> None:
    assert max(worlds.run(size, train_beside_ddp, 100, overlap)) < 1e-6


def add_up_gradients(overlap: bool) -> tuple[bool, list[bool]]:
    """Two backward passes in each step; and whether a bucket had left before its end."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = new_model()
    trainer = Trainer.setup(
        model, torch.optim.SGD(model.parameters(), lr=0.1), TrainerConfig(max_anchor=0, overlap=overlap)
    )
    alone = new_model()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    dataset, sent_early = samples(5 * size * 8), []
    for step in range(5):
        start = (step * size + rank) * 8
        for half in (slice(start, start + 4), slice(start + 4, start + 8)):
            inputs, labels = dataset[half]
            (cross_entropy(model(inputs), labels) / 2).backward()
        sent_early.append(trainer._stepper.averager.gradients[0]._num_sent > 0)
        trainer.step()
        inputs, labels = dataset[step * size * 8 : (step + 1) * size * 8]
        cross_entropy(alone(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return close(flat(model), flat(alone)), sent_early


def test_gradients_that_are_added_up_are_sent_after_the_last_backward(worlds: Worlds) -> None:
    for is_equal, sent_early in worlds.run(2, add_up_gradients, True):
        assert is_equal
        assert sent_early == [False, True, True, True, True]
    for is_equal, sent_early in worlds.run(2, add_up_gradients, False):
        assert is_equal
        assert not any(sent_early)


# Unequal shards: as one process


class Uneven:
    """Gives ranks these sizes of each batch."""

    def __init__(self, trainer: Trainer, ratios: list[float]) -> None:
        planner: Any = trainer._stepper.planner
        planner._ratios = ratios
        planner._decided.decide(0, ratios, 0)


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


# El Che


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


@pytest.mark.parametrize("with_loss_fn", [True, False])
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("num_samples", [101, 64])
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


def clip_average(max_norm: float) -> tuple[torch.Tensor, torch.Tensor]:
    model, alone = new_model(), new_model()
    trainer = Trainer.setup(
        model, torch.optim.SGD(model.parameters(), lr=1.0), TrainerConfig(max_anchor=0, max_grad_norm=max_norm)
    )
    inputs, labels = samples(8).tensors
    own = slice(dist.get_rank() * 4, dist.get_rank() * 4 + 4)
    cross_entropy(model(inputs[own]), labels[own]).backward()
    trainer.step()
    cross_entropy(alone(inputs), labels).backward()
    nn.utils.clip_grad_norm_(alone.parameters(), max_norm)
    torch.optim.SGD(alone.parameters(), lr=1.0).step()
    return flat(model), flat(alone)


def test_without_el_che_the_average_is_clipped(worlds: Worlds) -> None:
    for parameters, expected in worlds.run(2, clip_average, 0.05):
        assert close(parameters, expected)


# Gradients that are not everywhere


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.even, self.odd, self.never, self.shared = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, inputs: torch.Tensor, way: int) -> torch.Tensor:
        branch = self.odd if way else self.even
        result: torch.Tensor = self.shared(branch(inputs))
        return result


def train_branches(overlap: bool) -> tuple[dict[str, bool], torch.Tensor, torch.Tensor]:
    """Every rank goes through another branch, none through the last; by hand all gradients are known."""
    rank, model = dist.get_rank(), Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    trainer = Trainer.setup(model, optimizer, TrainerConfig(max_anchor=0, overlap=overlap))
    alone = Branches()
    by_hand = torch.optim.SGD(alone.parameters(), lr=0.1, weight_decay=0.5)
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(2, 3, 4, generator=generator)
        ways = (step % 2, (step // 2) % 2)
        model(inputs[rank], ways[rank]).sum().backward()
        trainer.average_gradients()
        has_gradient = {name: one.grad is not None for name, one in model.named_parameters()}
        trainer.step()
        (sum(alone(inputs[one], ways[one]).sum() for one in range(2)) / 2).backward()  # type: ignore[union-attr]
        assert has_gradient == {name: one.grad is not None for name, one in alone.named_parameters()}
        by_hand.step()
        by_hand.zero_grad()
    return has_gradient, flat(model), flat(alone)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_gradient_that_one_rank_has_is_everybodys_and_one_that_nobody_has_is_nobodys(
    worlds: Worlds, overlap: bool
) -> None:
    for has_gradient, parameters, expected in worlds.run(2, train_branches, overlap):
        assert not has_gradient["never.weight"]
        assert close(parameters, expected)


def unfreeze() -> tuple[torch.Tensor, bool]:
    model = new_model()
    first: Any = model[0]  # type: ignore[index]
    first.requires_grad_(False)
    trainer = Trainer.setup(model, new_optimizer(model))
    before, dataset = first.weight.clone(), samples(100)
    for step in range(6):
        if step == 3:
            assert torch.equal(before, first.weight)
            first.requires_grad_(True)
        if step == 5:
            model[2].requires_grad_(False)  # type: ignore[index,union-attr]
        start = step * 16 + 8 * dist.get_rank()
        inputs, labels = dataset[start : start + 8]
        cross_entropy(model(inputs), labels).backward()
        trainer.step()
    return flat(model), not torch.equal(before, first.weight)


def test_layers_may_be_unfrozen_on_the_way(worlds: Worlds) -> None:
    (first, has_changed), (second, _) = worlds.run(2, unfreeze)
    assert has_changed
    assert torch.equal(first, second)


def one_more_backward() -> None:
    model = new_model()
    trainer = Trainer.setup(model, new_optimizer(model))
    for passes in (1, 2):
        for _ in range(passes):
            model(torch.ones(1, 6)).sum().backward()
        trainer.step()


def test_a_backward_too_many_is_an_error_that_says_what_to_do(worlds: Worlds) -> None:
    for raised in worlds.run(2, one_more_backward, may_raise=True):
        assert isinstance(raised, Raised)
        assert raised.kind == "Misuse"
        assert "overlap=False" in raised.message


# Buffers


def norm_buffers() -> tuple[torch.Tensor, torch.Tensor]:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    trainer = Trainer.setup(model, new_optimizer(model))
    inputs, labels = samples(16).tensors
    own = slice(dist.get_rank() * 8, dist.get_rank() * 8 + 8)
    cross_entropy(model(inputs[own]), labels[own]).backward()
    before = model[1].running_mean.clone()
    trainer.step()
    assert model[1].num_batches_tracked == 1
    return before, model[1].running_mean


def test_buffers_are_those_of_rank_0(worlds: Worlds) -> None:
    (own, after), (other, other_after) = worlds.run(2, norm_buffers)
    assert not torch.equal(own, other)
    assert torch.equal(own, after)
    assert torch.equal(own, other_after)


# The balance


class Slow(nn.Linear):
    """Rank 1 takes three times as long for a sample."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        import time

        time.sleep(len(inputs) * 0.0002 * (3 if dist.get_rank() == 1 else 1))
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
    assert 8 <= counts[0] <= 14
    assert throughput[0] > 2 * throughput[1] > 0


# Tags and traces


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.encoder = nn.Linear(6, 4)
        self.cell = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.encoder(inputs)
        for _ in range(3):
            hidden = torch.tanh(self.cell(hidden))
        result: torch.Tensor = self.head(hidden)
        return result


def catch(with_loss_fn: bool, el_che: bool) -> dict[str, Any]:
    model = Recurrent()
    config = TrainerConfig(anchor=2, max_anchor=2, speed_hint=(1, 2.0)) if el_che else TrainerConfig(max_anchor=0)
    trainer = Trainer.setup(model, new_optimizer(model), config)
    dataset = TensorDataset(*samples(24).tensors, torch.arange(24))
    loader = DataLoader(dataset, batch_size=4)
    trainer.set_data_loader(loader, forward_input="inputs", names=(*NAMES, "number"))
    trainer.capture(tags=["encoder"], traces=["cell"])
    alive: list[bool] = []

    def loss_fn(context: LossContext) -> torch.Tensor:
        alive.append(context.tags["encoder"].requires_grad and len(context.traces["cell"]) == 3)
        return cross_entropy(context.output, context.batch["labels"]) + 0.1 * context.tags["encoder"].square().mean()

    if with_loss_fn:
        trainer.set_loss_fn(loss_fn)
    before = copy.deepcopy(model)
    batch = next(trainer.epoch(0))
    output = trainer.forward_batch(batch)
    if not with_loss_fn:
        cross_entropy(output, batch["labels"]).backward()
    gathered = trainer.gather()
    trainer.step()
    forgotten = trainer.tags == trainer.traces == {}
    inputs = dataset.tensors[0][gathered.batch["number"]]
    return {
        "order": gathered.batch["number"].tolist(),
        "output": close(gathered.output, before(inputs)),
        "tag": close(gathered.tags["encoder"], before.encoder(inputs)),
        "trace": close(gathered.traces["cell"][0], before.cell(before.encoder(inputs))),
        "calls": len(gathered.traces["cell"]),
        "detached": not any(one.requires_grad for one in (gathered.output, *gathered.traces["cell"])),
        "alive": alive,
        "forgotten": forgotten,
    }


@pytest.mark.parametrize("with_loss_fn", [True, False])
def test_tags_and_traces_are_gathered_batch_by_batch_in_the_order_of_the_targets(
    worlds: Worlds, with_loss_fn: bool
) -> None:
    for told in worlds.run(2, catch, with_loss_fn, True):
        batches = [[0, 16], [4, 20], [8], [12]]  # rank 0 has four batches, from 0 on, and rank 1 two, from 16 on
        assert told["order"] == [start + one for starts in batches for start in starts for one in range(4)]
        assert told["calls"] == 3
        assert all(told[name] for name in ("output", "tag", "trace", "detached", "forgotten"))
        assert all(told["alive"])


def test_tags_and_traces_of_shards(worlds: Worlds) -> None:
    for told in worlds.run(2, catch, True, False):
        assert told["order"] == [0, 1, 2, 3]
        assert all(told[name] for name in ("output", "tag", "trace"))
        assert told["calls"] == 3
        assert told["alive"] == [True]


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
        ("output", "a row for each sample, not shape ()"),
    ],
)
def test_what_cannot_be_scattered_is_told_on_every_rank(worlds: Worlds, kind: str, words: str) -> None:
    for raised in worlds.run(2, scatter_wrongly, kind, may_raise=True):
        assert isinstance(raised, Raised)
        assert raised.kind == "Misuse"
        assert words in raised.message


# One process


def test_on_one_process_nothing_is_added(capsys: pytest.CaptureFixture[str]) -> None:
    model = new_model()
    model.eval()
    trainer = Trainer.setup(model, new_optimizer(model), TrainerConfig(device="cpu"))
    assert model.training
    assert capsys.readouterr().err.startswith("elche: 1 device")
    assert not trainer.is_distributed
    assert (trainer.world_size, trainer.rank, trainer.has_el_che) == (1, 0, False)
    assert trainer.devices == trainer.chunk_ratios == trainer.throughput == trainer.shard_sizes == []
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())
    assert not any(one._post_accumulate_grad_hooks for one in model.parameters())
    trainer.set_data_loader(DataLoader(samples(30), batch_size=8), forward_input="inputs", names=NAMES)
    assert (trainer.data_num_batches, trainer.data_batch_size) == (4, 8)
    for batch in trainer.epoch(0):
        cross_entropy(trainer.forward_batch(batch), batch["labels"]).backward()
        trainer.step()
    assert torch.equal(flat(model), train_alone(samples(30), [8, 8, 8, 6]))
    assert torch.equal(trainer.forward_scattered(samples(4).tensors[0]), model(samples(4).tensors[0]))
    trainer.set_lr(0.5)
    assert trainer.optimizer.param_groups[0]["lr"] == 0.5
    assert trainer.num_steps == 4


def test_on_one_process_a_loss_function_and_tags_work_alike() -> None:
    model = Recurrent()
    trainer = Trainer.setup(model, new_optimizer(model), TrainerConfig(device="cpu"))
    trainer.set_data_loader(DataLoader(samples(8), batch_size=8), forward_input="inputs", names=NAMES)
    trainer.capture(tags=["encoder"], traces=["cell"])
    assert not trainer.has_loss_fn
    trainer.set_loss_fn(lambda context: mse_loss(context.tags["encoder"], torch.zeros(8, 4)))
    assert trainer.has_loss_fn
    for batch in trainer.epoch(0):
        output = trainer.forward_batch(batch)
        assert not output.requires_grad
        assert len(trainer.gather().traces["cell"]) == 3
        assert model.head.weight.grad is None
        assert model.encoder.weight.grad is not None
        trainer.step()
        assert model.encoder.weight.grad is None


class Head:
    """A task head: a model, and what belongs to it."""

    def __init__(self) -> None:
        self.net = new_model()
        self.names = ["a", "b", "c"]

    def compute_loss(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self.net(inputs), labels)


def train_head() -> torch.Tensor:
    head = Head()
    trainer = Trainer.setup_head(head, new_optimizer(head.net))
    size, rank, dataset = dist.get_world_size(), dist.get_rank(), samples(40)
    for step in range(5):
        start = step * 8 + rank * (8 // size)
        head.compute_loss(*dataset[start : start + 8 // size]).backward()
        trainer.step()
    return flat(head.net)


def test_a_task_head_trains_with_its_own_methods(worlds: Worlds) -> None:
    for parameters in worlds.run(2, train_head):
        assert close(parameters, train_alone(samples(40), [8] * 5))


# What cannot work


def setup_different(kind: str) -> None:
    rank = dist.get_rank()
    match kind:
        case "shape":
            model: Any = nn.Sequential(nn.Linear(4, 4 + rank), nn.Linear(4 + rank, 1))
        case "name":
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) if rank else nn.ModuleDict({"a": nn.Linear(4, 4)})
        case "number":
            model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(1 + rank)))
        case "buffer":
            model = nn.Sequential(nn.BatchNorm1d(4, track_running_stats=not rank))
        case "frozen":
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            model[0].weight.requires_grad_(not rank)
        case "kind":
            model = nn.Linear(4, 4)
            Trainer.setup(model if rank == 0 else "model", new_optimizer(model))  # type: ignore[arg-type]
        case "optimizer":
            model = nn.Linear(4, 4)
            Trainer.setup(model, new_optimizer(model if rank else nn.Linear(4, 4)))
        case "config":
            model = nn.Linear(4, 4)
            Trainer.setup(model, new_optimizer(model), TrainerConfig(anchor=10 + rank))
    Trainer.setup(model, new_optimizer(model))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("shape", ["'0.weight'", "(4, 4)", "(5, 4)", "rank 0", "rank 1"]),
        ("name", ["'a.weight'", "'0.weight'", "rank 1"]),
        ("number", ["2 tensors", "4", "'1.weight'", "only on rank 1"]),
        ("buffer", ["'0.running_mean'", "only on rank 0"]),
        ("frozen", ["'0.weight'", "frozen", "rank 1"]),
        ("kind", ["rank 1", "torch.nn.Module, not str"]),
        ("optimizer", ["rank 0", "2 parameters that the model does not have"]),
        ("config", ["configs", "anchor=10", "anchor=11"]),
    ],
)
def test_what_differs_between_ranks_is_told_on_every_rank(worlds: Worlds, kind: str, words: list[str]) -> None:
    for raised in worlds.run(2, setup_different, kind, may_raise=True):
        assert isinstance(raised, Raised)
        assert raised.kind == "Misuse"
        assert not [word for word in words if word not in raised.message], raised.message


def attach_different(kind: str) -> None:
    rank, model = dist.get_rank(), new_model()
    trainer = Trainer.setup(model, new_optimizer(model))
    dataset = samples(20 + (rank if kind == "size" else 0))
    loader = DataLoader(dataset, batch_size=4 + (rank if kind == "batch" else 0))
    forward_input = "inputs" if kind != "field" or rank == 0 else "image"
    trainer.set_data_loader(loader, forward_input=forward_input, names=NAMES)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("size", ["(20, 4, 0, 0)", "(21, 4, 0, 0)"]),
        ("batch", ["(20, 4, 0, 0)", "(20, 5, 0, 0)"]),
        ("field", ["rank 1", "'image'", "'inputs', 'labels'"]),
    ],
)
def test_loaders_that_differ_are_told_on_every_rank(worlds: Worlds, kind: str, words: list[str]) -> None:
    for raised in worlds.run(2, attach_different, kind, may_raise=True):
        assert isinstance(raised, Raised)
        assert raised.kind == "Misuse"
        assert not [word for word in words if word not in raised.message], raised.message


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"max_anchor": -1}, "max_anchor"),
        ({"anchor": 0}, "anchor"),
        ({"overhead_target": float("nan")}, "overhead_target"),
        ({"speed_hint": 2.0}, "speed_hint"),
        ({"speed_hint": (0, float("inf"))}, "speed_hint"),
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
        ({"max_grad_norm": "1"}, "max_grad_norm"),
    ],
)
def test_a_config_that_cannot_work_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(Misuse, match=words):
        TrainerConfig(**values)


def start_states() -> tuple[torch.Tensor, torch.Tensor]:
    model = nn.Sequential(new_model(dist.get_rank()), nn.BatchNorm1d(3))
    model[1].running_mean.fill_(dist.get_rank())
    Trainer.setup(model, new_optimizer(model))
    return flat(model), model[1].running_mean


def test_all_ranks_begin_as_rank_0(worlds: Worlds) -> None:
    (first, mean), (second, other_mean) = worlds.run(2, start_states)
    assert torch.equal(first, second)
    assert mean.tolist() == other_mean.tolist() == [0.0] * 3
    assert close(first, flat(nn.Sequential(new_model(0), nn.BatchNorm1d(3))))


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


def test_el_che_is_on_where_devices_differ(worlds: Worlds) -> None:
    first, second = worlds.run(2, on_devices, ["RTX 4090", "GTX 1060"])
    assert first[:2] == second[:2] == (True, True)
    assert first[2].startswith("elche: 2 devices (heterogeneous): RTX 4090 (24 GiB), GTX 1060 (6 GiB); El Che sets")
    assert second[2] == ""
    first, second = worlds.run(2, on_devices, ["RTX 4090", "RTX 4090"])
    assert first[:2] == second[:2] == (False, False)
    assert "heterogeneous" not in first[2]


def test_a_device_that_cannot_be_used_is_one_clear_error() -> None:
    model = new_model()
    with pytest.raises(
        Misuse, match=r"the device 'cuda:9' cannot be used: cuda:9.*; use auto, cpu, cuda, cuda:N or mps"
    ):
        Trainer.setup(model, new_optimizer(model), TrainerConfig(device="cuda:9"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="here cuda:0 can be used")
def test_a_bad_gpu_of_one_of_several_processes_is_named_and_of_one_alone_it_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)  # listed; that they fail is real
    assert world.choose_device("auto") == torch.device("cpu")
    assert capsys.readouterr().err.count("is left out") == 2
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(Misuse, match=r"cannot be used: cuda:1: .*; leave it out: name the others in CUDA_VISIBLE_DEV"):
        world.choose_device("auto")


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor, scale: torch.Tensor, bias: float = 0.0) -> torch.Tensor:
        result: torch.Tensor = self.linear(inputs) * scale + bias
        return result


def dicts(**more: Any) -> list[dict[str, Any]]:
    inputs, labels = samples(8).tensors
    return [{"picture": inputs[one], "scale": torch.ones(1), "labels": labels[one], **more} for one in range(8)]


def test_fields_that_match_the_inputs_go_there() -> None:
    model = TwoInputs()
    trainer = Trainer.setup(model, new_optimizer(model), TrainerConfig(device="cpu"))
    trainer.set_data_loader(DataLoader(dicts(), batch_size=4), forward_input="picture")  # type: ignore[arg-type]
    assert trainer._forward.wiring is not None
    assert (trainer._forward.wiring.primary, trainer._forward.wiring.others) == ("picture", ("scale",))
    assert trainer._forward.wiring.targets == ("labels",)
    batch = next(trainer.epoch(0))
    assert list(batch) == ["picture", "scale", "labels"]
    assert len(batch) == 3
    assert trainer.forward_batch(batch).shape == (4, 3)
    with pytest.raises(Misuse, match=r"no field 'label'; they have 'picture', 'scale', 'labels'"):
        batch["label"]
    with pytest.raises(Misuse, match="forward_input is 'image', and batches have the fields 'picture', 'scale'"):
        trainer.set_data_loader(DataLoader(dicts()), forward_input="image")  # type: ignore[arg-type]
    lacking = [{"picture": one["picture"], "labels": one["labels"]} for one in dicts()]
    with pytest.raises(Misuse, match=r"forward\(\) of TwoInputs needs 'scale'"):
        trainer.set_data_loader(DataLoader(lacking), forward_input="picture")  # type: ignore[arg-type]


class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter([])


def raise_on_collate(_: Any) -> Any:
    raise ValueError("on purpose")


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        ([1, 2], "needs a torch DataLoader, not list"),
        (DataLoader(Stream()), "map-style"),
        (DataLoader(samples(8), batch_size=None), "batch_size"),
        (DataLoader(samples(8), batch_sampler=[[0, 1], [2]]), "no batch_sampler of its own"),
        (DataLoader(samples(8), sampler=DistributedSampler(samples(8), 2, 0)), "without its DistributedSampler"),
        (DataLoader(samples(8), collate_fn=raise_on_collate), "on purpose"),
        (DataLoader(samples(8)), "name them, as in set_data_loader"),
        (DataLoader(TensorDataset(torch.ones(0, 6))), "is empty"),
    ],
)
def test_a_loader_that_cannot_be_split_is_refused(loader: Any, words: str) -> None:
    model = new_model()
    trainer = Trainer.setup(model, new_optimizer(model), TrainerConfig(device="cpu"))
    with pytest.raises(Misuse, match=words):
        trainer.set_data_loader(loader, forward_input="inputs")
    with pytest.raises(Misuse, match="call set_data_loader"):
        trainer.data_num_batches  # noqa: B018
    with pytest.raises(Misuse, match="names has 1 names"):
        trainer.set_data_loader(DataLoader(samples(8)), forward_input="inputs", names=("inputs",))


def graphs_alive(with_loss_fn: bool) -> int:
    """The most outputs with a graph at once, in one El Che step of three batches."""
    model = new_model()
    trainer = Trainer.setup(model, new_optimizer(model), TrainerConfig(anchor=3, max_anchor=3))
    trainer.set_data_loader(DataLoader(samples(24), batch_size=4), forward_input="inputs", names=NAMES)
    alive: list[Any] = []
    most = 0

    class Token:
        """Lives as long as the graph that it is in."""

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:
            nonlocal most
            ctx.token = Token()
            alive.append(weakref.ref(ctx.token))
            most = max(most, sum(one() is not None for one in alive))
            return output.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            return gradients[0]

    def watch(module: nn.Module, arguments: Any, output: torch.Tensor) -> Any:
        apply: Any = Watched.apply
        return apply(output)

    model.register_forward_hook(watch)
    if with_loss_fn:
        trainer.set_loss_fn(lambda context: cross_entropy(context.output, context.batch["labels"]))
    batch = next(trainer.epoch(0))
    assert len(batch.parts) == 3
    trainer.forward_batch(batch)
    return most


def test_one_graph_is_alive_at_a_time(worlds: Worlds) -> None:
    assert worlds.run(2, graphs_alive, True) == [1, 1]
    assert worlds.run(2, graphs_alive, False) == [3, 3]


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


def accumulate_batches(overlap: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """An optimizer step after every second batch of `epoch`."""
    model = new_model()
    trainer = Trainer.setup(model, new_optimizer(model), TrainerConfig(max_anchor=0, overlap=overlap))
    trainer.set_data_loader(DataLoader(samples(48), batch_size=8), forward_input="inputs", names=NAMES)
    for number, batch in enumerate(trainer.epoch(0)):
        (cross_entropy(trainer.forward_batch(batch), batch["labels"]) / 2).backward()
        if number % 2:
            trainer.step()
    return flat(model), train_alone(samples(48), [16, 16, 16])


@pytest.mark.parametrize("overlap", [True, False])
def test_gradients_of_several_batches_may_be_added_up_before_a_step(worlds: Worlds, overlap: bool) -> None:
    for parameters, alone in worlds.run(2, accumulate_batches, overlap):
        assert close(parameters, alone)


def scale_gradients() -> tuple[torch.Tensor, torch.Tensor]:
    """The averaged gradient is looked at, and the optimizer stepped by hand."""
    model, alone = new_model(), new_model()
    trainer = Trainer.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    inputs, labels = samples(8).tensors
    own = slice(dist.get_rank() * 4, dist.get_rank() * 4 + 4)
    (cross_entropy(model(inputs[own]), labels[own]) * 16).backward()
    trainer.average_gradients()
    with pytest.raises(Misuse, match="averaged already"):
        trainer.average_gradients()
    for one in model.parameters():
        assert one.grad is not None
        one.grad.div_(16)
    trainer.optimizer.step()
    trainer.finish_step()
    assert all(one.grad is None for one in model.parameters())
    cross_entropy(alone(inputs), labels).backward()
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    return flat(model), flat(alone)


def test_a_step_may_be_made_in_parts(worlds: Worlds) -> None:
    for parameters, alone in worlds.run(2, scale_gradients):
        assert close(parameters, alone)


def test_a_closed_trainer_says_so() -> None:
    model = new_model()
    with Trainer.setup(model, new_optimizer(model), TrainerConfig(device="cpu")) as trainer:
        trainer.capture(tags=["0"])
    trainer.close()
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())
    for use in (
        trainer.step,
        lambda: trainer(torch.ones(1, 6)),
        lambda: next(trainer.epoch(0)),
        lambda: next(trainer.epochs(1)),
        trainer.gather,
        lambda: trainer.set_loss_fn(None),
    ):
        with pytest.raises(Misuse, match="closed"):
            use()


def test_a_name_that_the_model_does_not_have_is_refused_with_those_that_it_has() -> None:
    model = Recurrent()
    trainer = Trainer.setup(model, new_optimizer(model), TrainerConfig(device="cpu"))
    trainer.capture(tags=["cell"])
    with pytest.raises(Misuse, match="no module 'encodr'; it has 'encoder'"):
        trainer.capture(tags=["encodr"])
    model(torch.ones(1, 6))
    assert "cell" in trainer.tags
    trainer.set_data_loader(DataLoader(samples(8)), forward_input="inputs", names=NAMES)
    trainer.set_loss_fn(lambda context: context.output)
    batch = next(trainer.epoch(0))
    with pytest.raises(Misuse, match="scalar with a gradient"):
        trainer.forward_batch(batch)


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
        for batch in again.epoch(epoch):
            later_epoch.append(batch.size)
            again.forward_batch(batch)
            again.step()
    assert again.num_steps == trainer.num_steps
    again.close()
    return flat(trainer.model), flat(again.model), later_epoch


@pytest.mark.parametrize("el_che", [True, False])
def test_a_loop_goes_on_in_the_middle_of_an_epoch(worlds: Worlds, tmp_path: Path, el_che: bool) -> None:
    told = worlds.run(2, save_and_go_on, str(tmp_path), el_che)
    for whole, resumed, _ in told:
        assert torch.equal(whole, resumed)
    assert sum(sum(sizes) for _, _, sizes in told) == (64 - 32 if el_che else 64 - 8)


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


# What a first user met


def misuse(kind: str) -> None:
    """Loops that are wrong without a word, if nobody looks."""
    model = new_model()
    optimizer = new_optimizer(model)
    trainer = Trainer.setup(model, optimizer)
    inputs, labels = samples(8).tensors
    for step in range(3):
        cross_entropy(model(inputs), labels).backward()
        match kind:
            case "clipped":
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            case "zeroed":
                optimizer.zero_grad()
            case "optimizer":
                optimizer.step()
            case "samples":
                trainer.step(samples=8) if step < 2 else trainer.step()
            case "negative":
                trainer.step(samples=-1)
            case "one rank":
                trainer.step(samples=8) if dist.get_rank() else trainer.step()
        if kind in ("clipped", "zeroed"):
            trainer.step()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("clipped", "changed after backward, when it had been sent: call trainer.average_gradients() first"),
        ("zeroed", "changed after backward"),
        ("optimizer", "gradients of this rank alone: call trainer.step() in its place"),
        ("samples", "give step(samples=...) at every step, or never"),
        ("negative", "samples is -1"),
        ("one rank", "some ranks say how many samples they have"),
    ],
)
def test_a_loop_that_would_be_wrong_without_a_word_is_told(worlds: Worlds, kind: str, words: str) -> None:
    for raised in worlds.run(2, misuse, kind, may_raise=True):
        assert isinstance(raised, Raised)
        assert raised.kind == "Misuse"
        assert words in raised.message


def clip_averaged() -> tuple[torch.Tensor, torch.Tensor]:
    model, alone = new_model(), new_model()
    trainer = Trainer.setup(model, torch.optim.SGD(model.parameters(), lr=1.0))
    by_hand = torch.optim.SGD(alone.parameters(), lr=1.0)
    own = slice(dist.get_rank() * 4, dist.get_rank() * 4 + 4)
    for step in range(4):
        inputs, labels = samples(8, seed=step).tensors
        cross_entropy(model(inputs[own]), labels[own]).backward()
        trainer.average_gradients()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        trainer.step()
        cross_entropy(alone(inputs), labels).backward()
        nn.utils.clip_grad_norm_(alone.parameters(), 0.05)
        by_hand.step()
        by_hand.zero_grad()
    return flat(model), flat(alone)


def test_averaged_gradients_may_be_clipped_by_hand(worlds: Worlds) -> None:
    for parameters, alone in worlds.run(2, clip_averaged):
        assert close(parameters, alone)


def weigh_by_tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """Shards by samples, and gradients weighted by something else, as language models do."""
    model, alone = new_model(), new_model()
    trainer = Trainer.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    trainer.set_data_loader(DataLoader(samples(32), batch_size=8), forward_input="inputs", names=NAMES)
    by_hand = torch.optim.SGD(alone.parameters(), lr=0.1)
    for number, batch in enumerate(trainer.epoch(0)):
        tokens = 3 if dist.get_rank() else 1
        cross_entropy(trainer.forward_batch(batch), batch["labels"]).backward()
        trainer.step(samples=tokens)
        for rank, weight in ((0, 0.25), (1, 0.75)):
            inputs, labels = samples(32)[number * 8 + rank * 4 : number * 8 + rank * 4 + 4]
            (cross_entropy(alone(inputs), labels) * weight).backward()
        by_hand.step()
        by_hand.zero_grad()
    return flat(model), flat(alone)


def test_gradients_may_be_weighted_by_tokens(worlds: Worlds) -> None:
    for parameters, alone in worlds.run(2, weigh_by_tokens):
        assert close(parameters, alone)


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


class Says(nn.Module):
    """Takes anything."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)

    def forward(self, *arguments: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(*arguments) * named["scale"]
        return result


def test_a_forward_that_does_not_name_its_arguments_is_asked_for_them() -> None:
    model = Says()
    trainer = Trainer.setup(model, new_optimizer(model), TrainerConfig(device="cpu"))
    loader: Any = DataLoader(dicts(), batch_size=4)  # type: ignore[arg-type]
    with pytest.raises(Misuse, match=r"does not name its arguments.*inputs="):
        trainer.set_data_loader(loader, forward_input="picture")
    with pytest.raises(Misuse, match="inputs has 'size'"):
        trainer.set_data_loader(loader, forward_input="picture", inputs=("size",))
    with pytest.raises(Misuse, match="names must be a tuple"):
        trainer.set_data_loader(loader, forward_input="picture", names="abc")
    trainer.set_data_loader(loader, forward_input="picture", inputs=("picture", "scale"))
    assert trainer.forward_batch(next(trainer.epoch(0))).shape == (4, 3)


def test_a_compiled_model_is_known_by_its_own_names() -> None:
    model = TwoInputs()
    compiled: Any = torch.compile(model, backend="eager")
    trainer = Trainer.setup(compiled, new_optimizer(model), TrainerConfig(device="cpu"))
    trainer.set_data_loader(DataLoader(dicts(), batch_size=4), forward_input="picture")  # type: ignore[arg-type]
    trainer.capture(tags=["linear"])
    assert trainer._forward.wiring is not None
    assert trainer._forward.wiring.others == ("scale",)
    assert trainer.forward_batch(next(trainer.epoch(0))).shape == (4, 3)


@pytest.mark.parametrize(
    ("model", "words"),
    [(nn.LazyLinear(3), "has no shape yet"), (nn.Linear(2, 2), "LBFGS needs a closure")],
)
def test_what_cannot_be_trained_is_told_at_once(model: nn.Module, words: str) -> None:
    lazy = isinstance(model, nn.LazyLinear)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1) if lazy else torch.optim.LBFGS(model.parameters())
    with pytest.raises(Misuse, match=words):
        Trainer.setup(model, optimizer, TrainerConfig(device="cpu"))


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


def lose_a_peer() -> None:
    model = new_model()
    trainer = Trainer.setup(model, new_optimizer(model))
    inputs, labels = samples(8).tensors
    for step in range(3):
        if step == 1 and trainer.rank == 1:
            os._exit(3)
        cross_entropy(model(inputs), labels).backward()
        trainer.step()


def test_a_rank_whose_peer_is_gone_says_that_and_not_why(worlds: Worlds) -> None:
    first, second = worlds.run(2, lose_a_peer, may_raise=True)
    assert (second.kind, second.message) == ("Ended", "the process ended with 3")
    assert first.kind == "PeerLost"
    assert "its own error says why" in first.message


# What a review found


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


def random_run(place: str, resume: bool) -> tuple[torch.Tensor, list[list[int]]]:
    """Three epochs with dropout, shuffled, saved in the second; or the rest of them."""
    torch.manual_seed(11)
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 3))
    trainer = Trainer.setup(model, new_optimizer(model), TrainerConfig(device="cpu"))
    if resume:
        trainer.load(place)
    drawn = torch.rand(1)
    dataset = TensorDataset(*samples(24).tensors, torch.arange(24))
    trainer.set_data_loader(
        DataLoader(dataset, batch_size=8, shuffle=True), forward_input="inputs", names=(*NAMES, "number")
    )
    orders = []
    for epoch in trainer.epochs(3):
        for batch in trainer.epoch(epoch):
            orders.append(batch["number"].tolist())
            cross_entropy(trainer.forward_batch(batch), batch["labels"]).backward()
            trainer.step()
            if trainer.num_steps == 4 and not resume:
                trainer.save(place)
    trainer.close()
    orders.append(drawn.tolist())
    return flat(model), orders


def test_one_process_goes_on_with_the_same_random_numbers_and_order(tmp_path: Path) -> None:
    whole, orders = random_run(str(tmp_path), False)
    resumed, rest = random_run(str(tmp_path), True)
    assert rest[:-1] == orders[4:-1]
    assert rest[-1] == orders[-1]  # what the script draws before training is as it was
    assert torch.equal(whole, resumed)


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


def accumulate_to_the_tail() -> tuple[torch.Tensor, torch.Tensor]:
    """Five samples in batches of four, two batches a step: the second rank has none in the tail."""
    model, alone = new_model(), new_model()
    trainer = Trainer.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), TrainerConfig(max_anchor=0))
    trainer.set_data_loader(DataLoader(samples(5), batch_size=4), forward_input="inputs", names=NAMES)
    trainer.set_loss_fn(lambda context: cross_entropy(context.output, context.batch["labels"]))
    for batch in trainer.epoch(0):
        trainer.forward_batch(batch)
    trainer.step()
    inputs, labels = samples(5).tensors
    cross_entropy(alone(inputs), labels).backward()
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    return flat(model), flat(alone)


def test_a_stand_in_counts_nothing_where_gradients_are_added_up(worlds: Worlds) -> None:
    for parameters, alone in worlds.run(2, accumulate_to_the_tail):
        assert close(parameters, alone)


def test_clipping_sees_what_the_optimizer_steps_and_nothing_is_left_of_the_rest() -> None:
    model = new_model()
    head: Any = model[4]  # type: ignore[index]
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    trainer = Trainer.setup(model, optimizer, TrainerConfig(device="cpu", max_grad_norm=0.1))
    steps = []
    for _ in range(3):
        before = head.weight.detach().clone()
        model(torch.ones(4, 6)).sum().backward()
        trainer.step()
        steps.append((head.weight.detach() - before).norm().item())
        assert all(one.grad is None for one in model.parameters())
    assert steps[2] == pytest.approx(steps[0], rel=0.05)
