"""Sharded models train as one whole model does, hold their part of the memory, and refuse what would hang."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_
from torch.testing import assert_close

from elche.errors import Misuse
from elche_worker.sharding import Strategy, shard
from elche_worker.sharding.units import choose_units
from support.worlds import Worlds

CLOSE = {"rtol": 1e-5, "atol": 1e-6}
NUM_STEPS = 10
MAX_NORM = 0.02
STRATEGIES = [
    *((world_size, strategy) for world_size in (2, 4) for strategy in (Strategy.FULL_SHARD, Strategy.SHARD_GRAD_OP)),
    *((world_size, Strategy.NO_SHARD) for world_size in (2, 4)),
    *((world_size, Strategy.HYBRID_SHARD(intra_node_size=size)) for world_size, size in ((2, 1), (4, 2))),
]
ALL_OF_TWO = [strategy for world_size, strategy in STRATEGIES if world_size == 2]


class Uneven(nn.Module):
    """No size divides by 2 or 4; one parameter has one value, one is transposed in memory, one is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 3)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)) for _ in range(2)])
        self.blocks[0][0].weight = nn.Parameter(torch.rand(3, 5).t())
        self.scale = nn.Parameter(torch.rand(1))
        self.register_buffer("shift", torch.rand(3))
        self.register_buffer("mask", torch.rand(7) > 0.5)
        self.output = nn.Linear(3, 7)
        self.output.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens) + self.shift
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.output(hidden * self.scale)


class Branching(nn.Module):
    """Takes the ways that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)])
        self.last = nn.Linear(3, 2)

    def forward(self, inputs: Tensor, ways: list[int]) -> Tensor:
        for way in ways:
            inputs = torch.tanh(self.ways[way](inputs))
        return self.last(inputs)


def build(kind: type[nn.Module], seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return kind()


def tokens(rank: int, step: int) -> Tensor:
    return torch.randint(7, (6,), generator=torch.Generator().manual_seed(1000 * rank + step))


def loss_of(output: Tensor, inputs: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, inputs.roll(1))


def whole(parameters: Any) -> list[Tensor]:
    """Gradients, gathered."""
    return [parameter.grad.full_tensor() for parameter in parameters]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def many_at_once(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, foreach=True)


def has_whole_parameters(module: nn.Module) -> bool:
    return not any(isinstance(parameter, DTensor) for parameter in module.parameters())


def refused(function: Callable[..., Any], *arguments: Any) -> str:
    """What the `Misuse` says that the call raises."""
    try:
        function(*arguments)
    except Misuse as error:
        return str(error)
    return "not refused"


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


@pytest.mark.parametrize(("world_size", "strategy"), STRATEGIES, ids=str)
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


@pytest.mark.parametrize(("world_size", "strategy"), STRATEGIES, ids=str)
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
    outside, *inside = worlds.run(3, train_in_a_part, strategy, limit_s=20)
    assert inside == [(2, 0, [1.5] * 3), (2, 1, [1.5] * 3)]
    assert "not a member" in outside


# F2: what is gathered, and when


class Deep(nn.Module):
    """Blocks a little over the size of a unit, between layers under it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 512)
        self.blocks = nn.ModuleList([nn.Linear(512, 512) for _ in range(3)])
        self.last = nn.Sequential(nn.Linear(512, 1), nn.Tanh())

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return self.last(hidden)


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


# F1: what is refused, on every rank


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


# F4 and F5: prefetch, updated parameters, shards as one flat tensor


def prefetch() -> None:
    rank = dist.get_rank()
    model, one = build(Uneven), build(Uneven)
    sharded = shard(model, units=model.blocks)
    optimizer, one_optimizer = adamw(sharded.parameters()), adamw(one.parameters())
    for step in range(3):
        sharded.prefetch_forward_params()
        assert sharded.has_pending_prefetch
        assert "twice" in refused(sharded.prefetch_forward_params)
        output = sharded(tokens(rank, step))
        assert not sharded.has_pending_prefetch
        assert not has_whole_parameters(model)
        assert_close(output, one(tokens(rank, step)), **CLOSE)
        optimizer.zero_grad()
        one_optimizer.zero_grad()
        loss_of(output, tokens(rank, step)).backward()
        sum(loss_of(one(tokens(other, step)), tokens(other, step)) / 2 for other in range(2)).backward()
        optimizer.step()
        one_optimizer.step()


def run_after_each_other(gather_first: str) -> None:
    """Ranks run forward one after the other, which they can only if it gathers nothing."""
    model = build(Uneven)
    sharded = shard(model, Strategy.FULL_SHARD if gather_first == "prefetch_forward_params" else Strategy.SHARD_GRAD_OP)
    loss_of(sharded(tokens(0, 0)), tokens(0, 0)).backward()
    getattr(sharded, gather_first)()
    for rank in range(2):
        if rank == dist.get_rank():
            with torch.no_grad():
                assert_close(sharded(tokens(0, 0)), build(Uneven)(tokens(0, 0)), **CLOSE)
        dist.barrier()


def test_a_prefetch_serves_one_forward(worlds: Worlds) -> None:
    worlds.run(2, prefetch)


def test_a_forward_gathers_nothing_that_was_gathered_for_it(worlds: Worlds) -> None:
    worlds.run(2, run_after_each_other, "prefetch_forward_params", limit_s=10)
    worlds.run(2, run_after_each_other, "broadcast_updated_params", limit_s=10)


def step_after(gathering: str, fused: bool) -> None:
    strategy = Strategy.FULL_SHARD if gathering == "prefetch_forward_params" else Strategy.SHARD_GRAD_OP
    sharded, one = shard(build(Uneven), strategy), build(Uneven)
    optimizer = torch.optim.Adam(sharded.parameters(), lr=0.1, fused=fused)
    for _ in range(2):
        loss_of(sharded(tokens(0, 0)), tokens(0, 0)).backward()
        if gathering == "evaluation":
            with torch.no_grad():
                sharded(tokens(0, 0))
        else:
            getattr(sharded, gathering)()
        sgd(one.parameters()).step()  # of another model, it voids nothing
        assert sharded.has_pending_prefetch == (strategy == Strategy.FULL_SHARD)
        optimizer.step()
        assert not sharded.has_pending_prefetch
    output = sharded(tokens(0, 1))
    one.load_state_dict(sharded.full_state_dict())
    assert_close(output, one(tokens(0, 1)), **CLOSE)


@pytest.mark.parametrize("gathering", ["prefetch_forward_params", "broadcast_updated_params", "evaluation"])
def test_a_step_behind_gathered_parameters_is_seen_by_the_next_forward(worlds: Worlds, gathering: str) -> None:
    worlds.run(2, step_after, gathering, False)
    worlds.run(2, step_after, gathering, True)


def broadcast_twice() -> None:
    sharded = shard(build(Uneven), Strategy.SHARD_GRAD_OP)
    optimizer = sgd(sharded.parameters())
    loss_of(sharded(tokens(0, 0)), tokens(0, 0)).backward()
    for _ in range(2):
        optimizer.step()
        sharded.broadcast_updated_params()
        gathered = {name: parameter.detach().clone() for name, parameter in sharded.module.named_parameters()}
    expected = sharded.full_state_dict()
    assert_close(gathered, {name: expected[name] for name in gathered})


def test_updated_parameters_are_gathered_after_every_step(worlds: Worlds) -> None:
    worlds.run(2, broadcast_twice)


def broadcast_nothing(strategy: Strategy) -> bool:
    sharded = shard(build(Uneven), strategy)
    sharded.broadcast_updated_params()
    if strategy != Strategy.FULL_SHARD:
        told = refused(sharded.prefetch_forward_params)
        assert "Strategy.FULL_SHARD" in told
        assert str(strategy) in told
    return has_whole_parameters(sharded.module)


def test_updated_parameters_are_gathered_for_grad_op_alone_and_prefetched_for_full_shard_alone(worlds: Worlds) -> None:
    for strategy in ALL_OF_TWO:
        assert worlds.run(2, broadcast_nothing, strategy) == [strategy == Strategy.SHARD_GRAD_OP] * 2


def set_shards(strategy: Strategy) -> None:
    sharded = shard(build(Uneven), strategy)
    locals_before = torch.cat([p.to_local().detach().flatten() for p in sharded.parameters()])
    for wrong in (torch.zeros(locals_before.numel() + 1), torch.zeros(1, locals_before.numel())):
        told = refused(sharded.update_shards, wrong)
        assert str(tuple(wrong.shape)) in told
        assert f"({locals_before.numel()},)" in told
    assert_close(torch.cat([p.to_local().detach().flatten() for p in sharded.parameters()]), locals_before)
    before = sharded.full_state_dict()
    sharded.broadcast_updated_params()
    sharded.update_shards(3 * locals_before)
    one = build(Uneven)
    one.load_state_dict(
        {k: 3 * v if k in dict(one.named_parameters(remove_duplicate=False)) else v for k, v in before.items()}
    )
    assert_close(sharded(tokens(0, 0)), one(tokens(0, 0)), **CLOSE)


@pytest.mark.parametrize("strategy", [Strategy.FULL_SHARD, Strategy.SHARD_GRAD_OP, Strategy.NO_SHARD], ids=str)
def test_shards_are_set_from_one_flat_tensor_or_not_at_all(worlds: Worlds, strategy: Strategy) -> None:
    worlds.run(2, set_shards, strategy)


# The handle


def save_and_load(strategy: Strategy) -> None:
    rank = dist.get_rank()
    sharded, one = shard(build(Uneven, seed=rank), strategy), build(Uneven, seed=7)
    first = sharded.full_state_dict()
    assert_close(first, dict(build(Uneven, seed=0).state_dict()), rtol=0, atol=0)  # rank 0's, the buffers too
    sharded(tokens(rank, 0))
    if strategy == Strategy.FULL_SHARD:
        sharded.prefetch_forward_params()
    sharded.load_full_state_dict(one.state_dict())
    assert_close(sharded(tokens(rank, 0)), one(tokens(rank, 0)), **CLOSE)
    first["scale"].zero_()
    loaded = sharded.full_state_dict()
    assert_close(loaded, dict(one.state_dict()), rtol=0, atol=0)
    assert not any(isinstance(value, DTensor) for value in loaded.values())
    assert "lacks 'scale'" in refused(sharded.load_full_state_dict, {k: v for k, v in first.items() if k != "scale"})
    assert "unknown 'more'" in refused(sharded.load_full_state_dict, {**first, "more": first["scale"]})
    told = refused(sharded.load_full_state_dict, {**first, "scale": torch.zeros(2)})
    assert told == "'scale' has shape (2,) in the state and (1,) in the module"
    assert_close(sharded.full_state_dict(), dict(one.state_dict()), rtol=0, atol=0)


def test_the_whole_state_is_read_and_written_by_all_strategies(worlds: Worlds) -> None:
    for strategy in ALL_OF_TWO:
        worlds.run(2, save_and_load, strategy)


def use_handle() -> tuple[Any, ...]:
    model = build(Uneven)
    sharded = shard(model, Strategy.FULL_SHARD)
    said = (sharded.strategy, sharded.backend, sharded.world_size, sharded.rank, sharded.module is model)
    sharded.prefetch_forward_params()
    inner = sharded.into_inner()
    assert inner is model
    loss_of(inner(tokens(0, 0)), tokens(0, 0)).backward()
    assert whole(inner.parameters())
    for use in (
        lambda: sharded(tokens(0, 0)),
        lambda: sharded.module,
        sharded.parameters,
        sharded.sync_gradients,
        sharded.prefetch_forward_params,
        sharded.broadcast_updated_params,
        lambda: sharded.update_shards(torch.zeros(1)),
        sharded.full_state_dict,
        lambda: sharded.load_full_state_dict({}),
        sharded.into_inner,
    ):
        assert "into_inner()" in refused(use)
    return said


def test_the_handle_says_what_it_is_and_ends_with_into_inner(worlds: Worlds) -> None:
    assert worlds.run(2, use_handle) == [(Strategy.FULL_SHARD, "gloo", 2, rank, True) for rank in range(2)]


def test_a_strategy_is_a_value() -> None:
    assert Strategy.HYBRID_SHARD(intra_node_size=2) == Strategy.HYBRID_SHARD(2) != Strategy.HYBRID_SHARD(3)
    assert repr(Strategy.HYBRID_SHARD(2)) == "Strategy.HYBRID_SHARD(intra_node_size=2)"
    assert repr(Strategy.NO_SHARD) == "Strategy.NO_SHARD"
    assert len({Strategy.FULL_SHARD, Strategy.HYBRID_SHARD(2), Strategy.HYBRID_SHARD(2)}) == 2


# Memory


def held_bytes(strategy: Strategy) -> dict[str, int]:
    """Bytes of this rank's own tensors between steps, each storage counted once."""
    sharded = shard(build(Deep), strategy)
    optimizer = adamw(sharded.parameters())
    sharded(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    parameters = sharded.parameters()
    kinds = {
        "parameters": parameters,
        "gradients": [parameter.grad for parameter in parameters],
        "moments": [each for parameter in parameters for each in optimizer.state[parameter].values() if each.dim()],
    }
    storages = {kind: [each.to_local().untyped_storage() for each in held] for kind, held in kinds.items()}
    return {kind: sum({each.data_ptr(): each.nbytes() for each in held}.values()) for kind, held in storages.items()}


@pytest.mark.parametrize(
    ("world_size", "strategy", "part"),
    [
        (2, Strategy.FULL_SHARD, 1 / 2),
        (4, Strategy.FULL_SHARD, 1 / 4),
        (4, Strategy.SHARD_GRAD_OP, 1 / 4),
        (4, Strategy.HYBRID_SHARD(intra_node_size=2), 1 / 2),
        (2, Strategy.NO_SHARD, 1),
    ],
    ids=str,
)
def test_a_rank_holds_its_part_of_parameters_gradients_and_moments(
    worlds: Worlds, world_size: int, strategy: Strategy, part: float
) -> None:
    total = sum(parameter.nbytes for parameter in Deep().parameters())
    for held in worlds.run(world_size, held_bytes, strategy):
        assert held["parameters"] == pytest.approx(part * total, rel=0.01)
        assert held["gradients"] == pytest.approx(part * total, rel=0.01)
        assert held["moments"] == pytest.approx(2 * part * total, rel=0.01)
