"""Parameters that are gathered ahead, after a step, and shards that are set from one flat tensor."""

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from elche_worker.sharding import Strategy, shard
from support.sharded import ALL_OF_TWO, CLOSE, Uneven, adamw, build, has_whole_parameters, loss_of, refused, sgd, tokens
from support.worlds import Worlds


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
    worlds.run(2, run_after_each_other, "prefetch_forward_params", limit_s=400)
    worlds.run(2, run_after_each_other, "broadcast_updated_params", limit_s=400)


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
