"""The handle of a sharded model: its whole state, what it says of itself, and the memory that a rank holds."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

from elche_worker.sharding import Strategy, shard
from support.sharded import ALL_OF_TWO, CLOSE, Deep, Uneven, adamw, build, loss_of, refused, tokens, whole
from support.worlds import Worlds


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
        (4, Strategy.FULL_SHARD, 1 / 4),
        (2, Strategy.SHARD_GRAD_OP, 1 / 2),
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
