"""The worlds that other tests stand on: results come by rank, who raises is told, and later worlds are whole."""

import time
from pathlib import Path

import torch
import torch.distributed as dist
from worlds import Raised, Worlds


def add_up(more: float) -> float:
    total = torch.tensor(float(dist.get_rank()) + more)
    dist.all_reduce(total)
    return float(total)


def raise_on_one(folder: Path) -> int:
    """Rank 1 raises once rank 0 has met it: who leaves while another still connects is missed by that one."""
    is_met = folder / "met"
    if dist.get_rank() == 0:
        is_met.touch()
        return 7
    while not is_met.exists():
        time.sleep(0.01)
    raise ValueError("on purpose")


def test_results_come_from_every_rank(worlds: Worlds) -> None:
    assert worlds.run(3, add_up, 1.0) == [6.0] * 3
    assert worlds.run(2, add_up, 0.0) == [1.0] * 2


def test_a_rank_that_raises_is_told_and_the_next_world_is_whole(worlds: Worlds, tmp_path: Path) -> None:
    first, second = worlds.run(2, raise_on_one, tmp_path, may_raise=True)
    assert first == 7
    assert isinstance(second, Raised)
    assert (second.kind, second.message) == ("ValueError", "on purpose")
    assert worlds.run(2, add_up, 0.0) == [1.0] * 2
