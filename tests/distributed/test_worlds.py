"""The worlds that other tests stand on: results come by rank, who raises is told, and later worlds are whole."""

import torch
import torch.distributed as dist

from support.worlds import Raised, Worlds


def add_up(more: float) -> float:
    total = torch.tensor(float(dist.get_rank()) + more)
    dist.all_reduce(total)
    return float(total)


def raise_on_one() -> int:
    if dist.get_rank() == 1:
        raise ValueError("on purpose")
    return 7


def test_results_come_from_every_rank(worlds: Worlds) -> None:
    assert worlds.run(3, add_up, 1.0) == [6.0] * 3
    assert worlds.run(2, add_up, 0.0) == [1.0] * 2


def test_a_rank_that_raises_is_told_and_the_next_world_is_whole(worlds: Worlds) -> None:
    first, second = worlds.run(2, raise_on_one, may_raise=True)
    assert first == 7
    assert isinstance(second, Raised)
    assert (second.kind, second.message) == ("ValueError", "on purpose")
    assert worlds.run(2, add_up, 0.0) == [1.0] * 2
