"""Sharded models train as one whole model does, under every strategy and in a part of the world."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_
from torch.testing import assert_close

from elche_worker.sharding import Strategy, shard
from support.sharded import (
    CLOSE,
    MAX_NORM,
    NUM_STEPS,
    STRATEGIES,
    Uneven,
    adamw,
    build,
    loss_of,
    many_at_once,
    refused,
    sgd,
    tokens,
    whole,
)
from support.worlds import Worlds

# F1 to F3, F6: training


def train(strategy: Strategy, build_optimizer: Callable[..., torch.optim.Optimizer], by_the_book: bool) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = build(Uneven, seed=rank)
    sharded = shard(model, strategy, units=model.blocks)
    one = build(Uneven)
    optimizer, one_optimizer = build_optimizer(sharded.parameters()), build_optimizer(one.parameters())
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        one_optimizer.zero_grad()
        losses = [loss_of(one(tokens(other, step)), tokens(other, step)) for other in range(world_size)]
        torch.stack(losses).mean().backward()
        output = sharded(tokens(rank, step))
        assert_close(output, one(tokens(rank, step)), **CLOSE)
        loss_of(output, tokens(rank, step)).backward()
        if by_the_book:
            sharded.sync_gradients()
        if step in (0, NUM_STEPS - 1):
            assert_close(whole(sharded.parameters()), [parameter.grad for parameter in one.parameters()], **CLOSE)
        if by_the_book:
            norm, one_norm = (clip_grad_norm_(each.parameters(), MAX_NORM) for each in (sharded, one))
            assert one_norm > MAX_NORM, "or nothing is clipped"
            assert_close(norm.full_tensor(), one_norm, **CLOSE)
        optimizer.step()
        one_optimizer.step()
        if by_the_book:
            sharded.broadcast_updated_params()
    assert_close(sharded.full_state_dict(), dict(one.state_dict()), **CLOSE)


LONG = pytest.mark.long(reason="beside those on two ranks")
OF_FOUR = Strategy.HYBRID_SHARD(intra_node_size=2)
HERE = [(2, Strategy.FULL_SHARD), (2, Strategy.SHARD_GRAD_OP), (2, Strategy.NO_SHARD), (4, OF_FOUR)]
"""On two ranks it is none: each of its groups would be one process."""
FEW = [one if one in HERE else pytest.param(*one, marks=LONG) for one in STRATEGIES]


@pytest.mark.parametrize(("world_size", "strategy"), FEW, ids=str)
def test_every_strategy_trains_as_one_model_on_all_data(worlds: Worlds, world_size: int, strategy: Strategy) -> None:
    worlds.run(world_size, train, strategy, sgd, True)
    worlds.run(world_size, train, strategy, adamw, False)


def accumulate(strategy: Strategy) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sharded, one = shard(build(Uneven), strategy), build(Uneven)
    for step in range(3):
        loss_of(sharded(tokens(rank, step)), tokens(rank, step)).backward()
        for other in range(world_size):
            (loss_of(one(tokens(other, step)), tokens(other, step)) / world_size).backward()
    sharded.sync_gradients()
    assert_close(whole(sharded.parameters()), [parameter.grad for parameter in one.parameters()], **CLOSE)


def test_gradients_of_several_batches_add_up(worlds: Worlds) -> None:
    worlds.run(2, accumulate, Strategy.FULL_SHARD)
    worlds.run(2, accumulate, Strategy.NO_SHARD)


class Scaled(nn.Module):
    """Has parameters of shape (): one within a block, one that only rank 0 uses, one that nobody does, one frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(()))
        self.embed = nn.Embedding(7, 3)
        self.blocks = nn.ModuleList([nn.Linear(3, 3) for _ in range(2)])
        self.blocks[0].register_parameter("gain", nn.Parameter(torch.rand(())))
        self.rare = nn.Parameter(torch.rand((), dtype=torch.float64))
        self.never = nn.Parameter(torch.rand(()))
        self.frozen = nn.Parameter(torch.rand(()), requires_grad=False)
        self.output = nn.Linear(3, 7)

    def forward(self, tokens: Tensor, rank: int) -> dict[str, Any]:
        hidden = self.embed(tokens) * self.scale
        for block in self.blocks:
            hidden = hidden + block(hidden) * getattr(block, "gain", 1.0)
        logits = self.output(hidden * self.frozen)
        return {"logits": [logits * self.rare.float() if rank == 0 else logits]}


def train_scalars(strategy: Strategy, build_optimizer: Callable[..., torch.optim.Optimizer], accumulate: int) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = build(Scaled, seed=rank)
    sharded, one = shard(model, strategy, units=model.blocks), build(Scaled)
    optimizer, one_optimizer = build_optimizer(sharded.parameters()), build_optimizer(one.parameters())
    for step in range(NUM_STEPS):
        for part in range(accumulate):
            number = step * accumulate + part
            for other in range(world_size):
                (output,) = one(tokens(other, number), other)["logits"]
                (loss_of(output, tokens(other, number)) / world_size).backward()
            (output,) = sharded(tokens(rank, number), rank)["logits"]
            loss_of(output, tokens(rank, number)).backward()
        assert_close(model.scale.grad, one.scale.grad, **CLOSE)  # before anything is called
        sharded.sync_gradients()
        assert model.never.grad == 0.0
        norm, one_norm = (clip_grad_norm_(each.parameters(), MAX_NORM) for each in (sharded, one))
        assert_close(norm.full_tensor(), one_norm, **CLOSE)
        optimizer.step()
        one.never.grad = torch.zeros(())  # as with unused parameters of any shape
        one_optimizer.step()
        optimizer.zero_grad()
        one_optimizer.zero_grad()
    state = sharded.full_state_dict()
    assert_close(state, dict(one.state_dict()), **CLOSE)
    sharded.load_full_state_dict({name: 2 * value for name, value in state.items()})
    assert model.scale.item() == 2 * state["scale"].item()
    values = sum(each.to_local().numel() if isinstance(each, DTensor) else 1 for each in sharded.parameters())
    sharded.update_shards(torch.full((values,), 0.5))
    assert {value.unique().item() for value in sharded.full_state_dict().values()} == {0.5}


@pytest.mark.parametrize(
    ("world_size", "strategy"),
    [one if one in (HERE[0], HERE[2]) else pytest.param(*one, marks=LONG) for one in STRATEGIES],
    ids=str,
)
def test_parameters_of_shape_nothing_are_whole_on_every_rank_and_learn_the_mean(
    worlds: Worlds, world_size: int, strategy: Strategy
) -> None:
    worlds.run(world_size, train_scalars, strategy, sgd, 1)
    worlds.run(world_size, train_scalars, strategy, many_at_once, 2)


def share_out(strategy: Strategy) -> tuple[list[float], list[int]]:
    model = nn.Linear(1, 6, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.arange(6.0).view(6, 1))
    sharded = shard(model, strategy)
    groups = sharded.parameters()[0].device_mesh.get_all_groups()
    return sharded.parameters()[0].to_local().flatten().tolist(), [dist.get_process_group_ranks(g) for g in groups]


def test_neighbours_hold_a_copy_together_and_ranks_of_one_place_the_same_part(worlds: Worlds) -> None:
    halves = worlds.run(4, share_out, Strategy.HYBRID_SHARD(intra_node_size=2))
    assert [rows for rows, _ in halves] == [[0, 1, 2], [3, 4, 5], [0, 1, 2], [3, 4, 5]]
    assert [groups for _, groups in halves] == [
        [[0, 2], [0, 1]],
        [[1, 3], [0, 1]],
        [[0, 2], [2, 3]],
        [[1, 3], [2, 3]],
    ]
    assert [rows for rows, _ in worlds.run(4, share_out, Strategy.FULL_SHARD)] == [[0, 1], [2, 3], [4, 5], []]
    assert [rows for rows, _ in worlds.run(2, share_out, Strategy.NO_SHARD)] == [[0, 1, 2, 3, 4, 5]] * 2


def train_in_a_part(strategy: Strategy) -> tuple[int, int, list[float]] | str:
    rank = dist.get_rank()
    part = dist.new_group([1, 2])
    model = nn.Linear(1, 3, bias=False)
    if rank == 0:
        told = refused(lambda: shard(model, strategy, process_group=part))
        dist.barrier(dist.new_group([0, 1, 2]))
        return told
    sharded = shard(model, strategy, process_group=part)
    dist.barrier(dist.new_group([0, 1, 2]))  # groups of a part do not disturb those of all
    sharded(torch.tensor([[float(rank)]])).sum().backward()
    (gradient,) = whole(sharded.parameters())
    return sharded.world_size, sharded.rank, gradient.flatten().tolist()


@pytest.mark.parametrize("strategy", [Strategy.FULL_SHARD, Strategy.NO_SHARD], ids=str)
def test_a_part_of_the_world_shards_by_itself(worlds: Worlds, strategy: Strategy) -> None:
    outside, *inside = worlds.run(3, train_in_a_part, strategy, limit_s=400)
    assert inside == [(2, 0, [1.5] * 3), (2, 1, [1.5] * 3)]
    assert "not a member" in outside
