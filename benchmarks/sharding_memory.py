"""What a rank holds of a sharded model between steps, and the most that it takes within one, by strategy and world.

A stack of transformer blocks is trained for three steps of AdamW on CPU processes with gloo between them. Held bytes
are counted from the storages of the rank's own tensors; the peak is the process's resident memory above what it had
before the model was built, so activations and gloo's buffers are in it. The largest rank is shown. "At once" is
FULL_SHARD with `units=()`: the whole model is gathered at once, not block by block.

    python benchmarks/sharding_memory.py [--worlds 1,2,4] [--blocks 8] [--width 512]
"""

import argparse
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.tensor import DTensor

from elche_worker.sharding import Strategy, shard

MIB = 1 << 20
NUM_STEPS = 3


def build_model(num_blocks: int, width: int) -> nn.Module:
    blocks = [nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True) for _ in range(num_blocks)]
    return nn.Sequential(*blocks, nn.Linear(width, 1), nn.Tanh())


def held_mib(tensors: Iterable[Any]) -> float:
    """Storage of the rank's own tensors, each counted once."""
    own = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in own}
    return sum(storages.values()) / MIB


def resident_mib(field: str) -> float:
    """`VmRSS`, resident memory now, or `VmHWM`, the most since it was last reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    raise ValueError(field)


def measure(rank: int, world_size: int, store: str, case: "Case", results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    warm = shard(nn.Linear(2, 2), case.strategy)
    warm(torch.ones(1, 2)).sum().backward()
    torch.optim.AdamW(warm.parameters()).step()
    before = resident_mib("VmRSS")

    sharded = shard(build_model(case.num_blocks, case.width), case.strategy, units=() if case.is_at_once else None)
    optimizer = torch.optim.AdamW(sharded.parameters())
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        sharded(torch.ones(1, 8, case.width)).sum().backward()
        sharded.sync_gradients()
        optimizer.step()
    parameters = sharded.parameters()
    moments = [value for parameter in parameters for value in optimizer.state[parameter].values()]
    gradients = [parameter.grad for parameter in parameters]
    peak = resident_mib("VmHWM") - before
    results.put((held_mib(parameters), held_mib(gradients), held_mib(moments), resident_mib("VmRSS") - before, peak))
    dist.destroy_process_group()


@dataclass(frozen=True, slots=True)
class Case:
    """What is trained, and how it is sharded."""

    num_blocks: int
    width: int
    strategy: Strategy
    is_at_once: bool = False

    def largest(self, world_size: int) -> list[float]:
        """Each figure's maximum over the ranks."""
        results = mp.get_context("spawn").SimpleQueue()
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(measure, (world_size, f"{folder}/store", self, results), world_size)
        return [max(column) for column in zip(*(results.get() for _ in range(world_size)), strict=True)]

    def __str__(self) -> str:
        name = repr(self.strategy).removeprefix("Strategy.").replace("intra_node_size=", "")
        return f"{name}, at once" if self.is_at_once else name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", default="1,2,4")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    options = parser.parse_args()
    # Else glibc keeps what is freed, and a peak says nothing. Workers inherit it.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(64 << 10)

    total = sum(parameter.nbytes for parameter in build_model(options.blocks, options.width).parameters()) / MIB
    print(f"MiB per rank; the model has {total:.1f} MiB of parameters\n")
    print("| strategy | ranks | parameters | gradients | AdamW state | held | resident | peak in a step |")
    print("|---|---|---|---|---|---|---|---|")
    for world_size in (int(size) for size in options.worlds.split(",")):
        hybrids = [Strategy.HYBRID_SHARD(intra_node_size=world_size // 2)] if world_size > 2 else []
        for strategy in (Strategy.FULL_SHARD, Strategy.SHARD_GRAD_OP, *hybrids, Strategy.NO_SHARD):
            for is_at_once in (False, True) if strategy == Strategy.FULL_SHARD and world_size > 1 else (False,):
                case = Case(options.blocks, options.width, strategy, is_at_once)
                *held, resident, peak = case.largest(world_size)
                figures = " | ".join(f"{figure:.1f}" for figure in (*held, sum(held)))
                print(f"| {case} | {world_size} | {figures} | {resident:.0f} | {peak:.0f} |", flush=True)


if __name__ == "__main__":
    main()
