"""What cannot be sharded is refused on every rank, and nothing is changed by it."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.testing import assert_close

from elche_worker.sharding import Strategy, shard
from support.sharded import Branching, Uneven, build, refused
from support.worlds import Worlds


def ask_for(case: str) -> str:
    rank = dist.get_rank()
    kind: Callable[[], nn.Module] = lambda: nn.Linear(3, 2)  # noqa: E731
    strategy, model = Strategy.FULL_SHARD, kind()
    units: Any = None
    match case:
        case "size 0":
            strategy = Strategy.HYBRID_SHARD(intra_node_size=0)
        case "size -2":
            strategy = Strategy.HYBRID_SHARD(intra_node_size=-2)
        case "size 3":
            strategy = Strategy.HYBRID_SHARD(intra_node_size=3)
        case "other strategy":
            strategy = Strategy.NO_SHARD if rank == 1 else Strategy.FULL_SHARD
        case "other shape":
            model = nn.Linear(3, 5 if rank == 1 else 2)
        case "more parameters":
            model = nn.Linear(3, 2, bias=rank == 1)
        case "other name":
            model = nn.Sequential()
            model.add_module("odd" if rank == 1 else "even", nn.Linear(3, 2))
        case "other type":
            model = nn.Linear(3, 2).double() if rank == 1 else nn.Linear(3, 2)
        case "untied":
            model = build(Uneven)
            if rank == 1:
                model.output.weight = nn.Parameter(model.embed.weight.detach().clone())
        case "other buffer":
            model.register_buffer("shift", torch.zeros(1 + rank))
        case "other units":
            model = build(Uneven)
            units = [model.blocks[rank]]
        case "only scalars":
            model = nn.Identity()
            model.register_parameter("scale", nn.Parameter(torch.tensor(1.0)))
        case "meta on one rank":
            model = nn.Linear(3, 2, device="meta" if rank == 1 else "cpu")
        case "no parameters":
            model = nn.Tanh()
        case "list":
            model = nn.ModuleList([nn.Linear(3, 2)])
        case "two types":
            model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).double())
        case "twice":
            shard(model)
        case "unit from elsewhere":
            units = [nn.Linear(3, 2)]
        case "tied unit":
            model = build(Uneven)
            units = [model.output]
    before = [parameter.detach().clone() for parameter in model.parameters() if not parameter.is_meta]
    told = refused(lambda: shard(model, strategy, units=units))
    assert case == "twice" or not any(isinstance(part, FSDPModule) for part in model.modules())
    if case != "twice":
        assert_close([parameter.detach() for parameter in model.parameters() if not parameter.is_meta], before)
    return told


REFUSALS = {
    "size 0": ["HYBRID_SHARD(intra_node_size=0)", "multiple of 0", "this one is 2"],
    "size -2": ["HYBRID_SHARD(intra_node_size=-2)"],
    "size 3": ["HYBRID_SHARD(intra_node_size=3)", "multiple of 3", "this one is 2"],
    "other strategy": ["rank 1 shards with Strategy.NO_SHARD", "rank 0 with Strategy.FULL_SHARD"],
    "other shape": ["parameter 'weight'", "(2, 3) float32 on rank 0", "(5, 3) float32 on rank 1"],
    "more parameters": ["rank 0 has 1 tensors", "rank 1 has 2", "'bias' ((2,) float32) is only on rank 1"],
    "other name": ["rank 0 has parameter 'even.weight'", "rank 1 has parameter 'odd.weight'"],
    "other type": ["parameter 'weight'", "float32 on rank 0", "float64 on rank 1"],
    "untied": ["rank 1 has parameter 'output.weight'"],
    "other buffer": ["buffer 'shift'", "(1,) float32 on rank 0", "(2,) float32 on rank 1"],
    "other units": ["rank 1", "'blocks.1'", "'blocks.0'"],
    "only scalars": ["no parameters that can be divided", "'scale'", "(1,)"],
    "meta on one rank": ["rank 1: parameter 'weight' is on the meta device"],
    "no parameters": ["no parameters"],
    "list": ["ModuleList has no forward"],
    "two types": ["the rest has ['torch.float32', 'torch.float64']"],
    "twice": ["sharded already"],
    "unit from elsewhere": ["submodules of the module", "Linear"],
    "tied unit": ["'output'", "'embed.weight'"],
}


def ask_for_all() -> dict[str, str]:
    return {case: ask_for(case) for case in REFUSALS}


def test_what_cannot_be_sharded_is_refused_alike_on_every_rank_and_nothing_is_changed(worlds: Worlds) -> None:
    told, told_too = worlds.run(2, ask_for_all)
    assert told == told_too
    for case, words in REFUSALS.items():
        assert [word for word in words if word not in told[case]] == [], (case, told[case])


def test_without_a_process_group_shard_says_what_to_do() -> None:
    assert "init_process_group()" in refused(shard, nn.Linear(3, 2))


def take_own_way() -> str:
    model = build(Branching)
    sharded = shard(model, units=model.ways)
    return refused(sharded, torch.ones(2, 3), [[0, 1], [1, 0]][dist.get_rank()])


def test_units_that_run_in_another_order_on_another_rank_are_told_and_not_mixed_up(worlds: Worlds) -> None:
    told, told_too = worlds.run(2, take_own_way)
    assert told == told_too
    assert "rank 1 runs 'ways.1' where rank 0 runs 'ways.0'" in told
    assert "units=()" in told
