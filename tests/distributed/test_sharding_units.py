"""Which blocks are gathered, and when; and parameters without a part in the loss."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.testing import assert_close

from elche_worker.sharding import Strategy, shard
from elche_worker.sharding.units import choose_units
from support.sharded import ALL_OF_TWO, CLOSE, Branching, Deep, build, has_whole_parameters, refused, sgd, whole
from support.worlds import Worlds


def watch_gathering(strategy: Strategy) -> dict[str, Any]:
    model = build(Deep)
    sharded = shard(model, strategy)
    seen: dict[str, Any] = {"units": [name for name, part in model.named_modules() if isinstance(part, FSDPModule)]}

    def look(moment: str) -> None:
        gathered = [part for part in (model.first, *model.blocks) if has_whole_parameters(part)]
        seen[moment] = [str(name) for name, part in model.named_modules() if part in gathered]

    model.blocks[1].register_forward_pre_hook(lambda *_: look("in the second block"))
    model.blocks[1].register_full_backward_hook(lambda *_: look("in the second block's backward"))
    look("before")
    loss = sharded(torch.ones(2, 4)).sum()
    look("after forward")
    loss.backward()
    look("after backward")
    return seen


def test_blocks_are_gathered_as_they_run_and_all_is_given_back_the_root_too(worlds: Worlds) -> None:
    for seen in worlds.run(2, watch_gathering, Strategy.FULL_SHARD):
        assert seen == {
            "units": ["", "blocks.0", "blocks.1", "blocks.2"],
            "before": [],
            "in the second block": ["first", "blocks.1"],
            "after forward": [],
            "in the second block's backward": ["first", "blocks.1"],
            "after backward": [],
        }
    for seen in worlds.run(2, watch_gathering, Strategy.SHARD_GRAD_OP):
        everything = ["first", "blocks.0", "blocks.1", "blocks.2"]
        assert (seen["in the second block"], seen["after forward"]) == (everything[:3], everything)
        assert seen["after backward"] == []


def test_units_are_the_large_entries_of_the_outer_lists_not_experts_within_nor_entries_of_dicts() -> None:
    def large() -> nn.Module:
        return nn.Linear(512, 512)

    blocks = nn.ModuleList([large(), nn.Linear(2, 2), large()])
    blocks[0].experts = nn.ModuleList([large(), large()])
    model = nn.Module()
    model.parts = nn.ModuleDict({"first": large(), "blocks": blocks, "head": large()})
    model.stages = nn.ModuleList([nn.ModuleList([large()]), nn.ModuleList([large()])])
    assert list(choose_units(model)) == ["parts.blocks.0", "parts.blocks.2", "stages.0.0", "stages.1.0"]


def tie_blocks() -> list[str]:
    model, one = build(Deep), build(Deep)
    for each in (model, one):
        each.blocks[1].bias = each.blocks[0].bias
        each.blocks[2] = nn.Sequential(each.blocks[2], each.blocks[2])
    sharded = shard(model)
    sharded(torch.ones(2, 4)).sum().backward()
    one(torch.ones(2, 4)).sum().backward()
    assert_close(whole(sharded.parameters()), [parameter.grad for parameter in one.parameters()], **CLOSE)
    return [name for name, part in model.named_modules() if isinstance(part, FSDPModule)]


def test_blocks_that_share_parameters_are_gathered_with_the_rest(worlds: Worlds) -> None:
    assert worlds.run(2, tie_blocks) == [["", "blocks.2"]] * 2


# F3: parameters without a part in the loss


def branch(strategy: Strategy, units: str, ways_by_rank: list[list[int]]) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, one = build(Branching), build(Branching)
    sharded = shard(model, strategy, units=model.ways if units == "each way" else ())
    optimizer, one_optimizer = sgd(sharded.parameters()), sgd(one.parameters())
    inputs = [torch.full((2, 3), 1.0 + other) for other in range(world_size)]
    for _ in range(2):
        optimizer.zero_grad()
        one_optimizer.zero_grad(set_to_none=False)
        (sum(one(inputs[other], ways_by_rank[other]).sum() for other in range(world_size)) / world_size).backward()
        sharded(inputs[rank], ways_by_rank[rank]).sum().backward()
        sharded.sync_gradients()
        expected = [torch.zeros_like(p) if p.grad is None else p.grad for p in one.parameters()]
        assert_close(whole(sharded.parameters()), expected, **CLOSE)
        optimizer.step()
        one_optimizer.step()


@pytest.mark.parametrize("strategy", ALL_OF_TWO, ids=str)
def test_what_only_one_rank_uses_or_none_counts_as_zeros(worlds: Worlds, strategy: Strategy) -> None:
    worlds.run(2, branch, strategy, "the whole model", [[0], [1, 0]])
    worlds.run(2, branch, strategy, "each way", [[1], [1]])


def step_in_half(strategy: Strategy) -> list[str]:
    sharded = shard(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)).requires_grad_(True), strategy)
    sharded.module[0].requires_grad_(False)
    told = [refused(sharded.sync_gradients)]
    loss = sharded(torch.ones(2, 3)).sum()
    told.append(refused(sharded.sync_gradients))
    loss.backward()
    told.append(refused(sharded.sync_gradients))
    told.append(refused(sharded.sync_gradients))
    assert [parameter.grad is None for parameter in sharded.parameters()] == [True, True, False, False]
    return told


def test_synchronising_without_forward_and_backward_is_refused_and_frozen_parameters_get_nothing(
    worlds: Worlds,
) -> None:
    for strategy in (Strategy.FULL_SHARD, Strategy.NO_SHARD):
        for told in worlds.run(2, step_in_half, strategy):
            message = "no gradients to synchronise: run the module and loss.backward() before sync_gradients()"
            assert told == [message, message, "not refused", message]


def run_one_block_twice() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, one = build(Branching), build(Branching)
    sharded = shard(model, units=model.ways)
    inputs = [torch.full((2, 3), 1.0 + other) for other in range(world_size)]
    (sum(one(each, [0, 1, 0]).sum() for each in inputs) / world_size).backward()
    sharded(inputs[rank], [0, 1, 0]).sum().backward()
    sharded.sync_gradients()
    expected = [torch.zeros_like(p) if p.grad is None else p.grad for p in one.parameters()]
    assert_close(whole(sharded.parameters()), expected, **CLOSE)


def test_a_block_may_run_twice_in_one_forward(worlds: Worlds) -> None:
    worlds.run(2, run_one_block_twice)
