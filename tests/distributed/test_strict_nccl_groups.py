"""The stand-in for NCCL within PyTorch's own process groups: two processes, each with a simulated GPU of its own."""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from support.nccl.forked import ends
from support.simulated_cuda import CUDA
from support.worlds import Worlds

BOTH = "cpu:gloo,cuda:nccl"


def joined(store: Path, rank: int, device_id: torch.device | None = None) -> None:
    made = dist.FileStore(str(store), 2)
    dist.init_process_group(BOTH, store=made, rank=rank, world_size=2, device_id=device_id)


def is_connected() -> bool:
    assert dist.group.WORLD is not None
    return dist.group.WORLD._get_backend(torch.device("cuda"))._is_initialized()  # type: ignore[attr-defined, no-any-return]


def each_device_has_its_backend(store: Path, rank: int) -> None:
    joined(store, rank)
    assert dist.is_nccl_available()
    on_host, on_device = torch.full((3,), float(rank)), torch.full((3,), float(rank), device=CUDA)
    dist.all_reduce(on_host)
    assert on_host.tolist() == [1.0] * 3
    assert not is_connected()
    dist.all_reduce(on_device)
    assert is_connected()
    assert on_device.tolist() == [1.0] * 3
    dist.destroy_process_group()


def a_device_in_init_connects_at_once(store: Path, rank: int) -> None:
    torch.accelerator.current_accelerator = lambda check_available=False: CUDA
    joined(store, rank, CUDA)
    assert is_connected()
    dist.all_reduce(torch.zeros(1))  # nobody leaves while the other connects
    dist.destroy_process_group()


def collectives_are_those_of_torch(store: Path, rank: int) -> None:
    joined(store, rank)
    own = torch.full((2,), float(rank + 1), device=CUDA)
    rows = [torch.empty_like(own) for _ in range(2)]
    work = dist.all_gather(rows, own, async_op=True)
    assert work is not None
    work.wait()
    assert [row.tolist() for row in rows] == [[1.0, 1.0], [2.0, 2.0]]
    together = torch.empty(4, device=CUDA)
    dist.all_gather_single(together, own)
    assert together.tolist() == [1.0, 1.0, 2.0, 2.0]
    part = torch.empty(2, device=CUDA)
    dist.reduce_scatter_single(part, together, op=dist.ReduceOp.AVG)
    assert part.tolist() == [rank + 1.0] * 2
    received = torch.empty(2, device=CUDA)
    dist.all_to_all_single(received, own)
    assert received.tolist() == [1.0, 2.0]
    dist.broadcast(own, src=1)
    assert own.tolist() == [2.0, 2.0]
    another = dist.new_group([0, 1])
    dist.all_reduce(own, group=another)
    assert own.tolist() == [4.0, 4.0]
    dist.destroy_process_group()


STORIES: dict[str, Callable[[Path, int], None]] = {
    one.__name__: one
    for one in (each_device_has_its_backend, a_device_in_init_connects_at_once, collectives_are_those_of_torch)
}


def in_processes(folder: Path) -> list[int]:
    stories = [
        (lambda story=story, name=name, rank=rank: story(folder / name, rank))  # type: ignore[misc]
        for name, story in STORIES.items()
        for rank in range(2)
    ]
    return ends(stories, [{}] * len(stories))


def test_process_groups_take_the_stand_in_for_tensors_of_the_device(worlds: Worlds, tmp_path: Path) -> None:
    assert worlds.run(1, in_processes, tmp_path) == [[0] * 2 * len(STORIES)]
