"""Splits a batch that every rank has: each computes its share, and all get all outputs (row G11)."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from elche.balance import shard_sizes
from elche.errors import Misuse
from elche_worker.collectives.world import World
from elche_worker.user.scalars import described


def scattered(
    world: World,
    call: Callable[..., Any],
    inputs: tuple[Any, ...],
    named: dict[str, Any],
    ratios: Sequence[float],
) -> tuple[torch.Tensor, list[int]]:
    """Returns the output of the whole batch, in its order, and each rank's number of samples, by the ratios.

    Tensors, all with equally many rows, are split by rows; other values are passed as they are. The gradient of this
    rank's rows is multiplied by the number of ranks, so that the mean over ranks is the gradient of the whole batch.
    Raises `Misuse` on every rank when batches differ in length, or the output is not a tensor with a row for each
    sample.
    """
    num_rows = _num_rows(world, [one for one in (*inputs, *named.values()) if isinstance(one, torch.Tensor)])
    sizes = list(shard_sizes(ratios, num_rows))
    size = sizes[world.rank]
    computed = size or next(one for one in sizes if one)  # a rank without a share must still call the collectives
    start = sum(sizes[: world.rank]) if size else 0

    def own(value: Any) -> Any:
        return value[start : start + computed].to(world.device) if isinstance(value, torch.Tensor) else value

    output = call(*map(own, inputs), **{name: own(value) for name, value in named.items()})
    is_whole = isinstance(output, torch.Tensor) and output.dim() > 0 and len(output) == computed
    world.agree("" if is_whole else f"the output must be a tensor with a row for each sample, not {described(output)}")
    rows = output[:size]
    if rows.requires_grad:
        rows.register_hook(lambda gradient: gradient * world.size)
    parts = world.gather_rows(rows.detach(), sizes)
    parts[world.rank] = rows
    return torch.cat(parts), sizes


def _num_rows(world: World, tensors: list[torch.Tensor]) -> int:
    lengths = {len(one) if one.dim() else 0 for one in tensors}
    problem = ""
    if len(lengths) != 1 or 0 in lengths:
        problem = f"forward_scattered needs tensors with a row for each sample, as many in all, not {sorted(lengths)}"
    world.agree(problem)
    (own,) = lengths
    gathered = [int(count) for (count,) in world.gather_numbers([own])]
    if len(set(gathered)) > 1:
        raise Misuse(f"forward_scattered needs the same whole batch on every rank, and they have {gathered} samples")
    return own
