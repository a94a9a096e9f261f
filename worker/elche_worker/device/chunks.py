"""Splits tensors into chunks of bounded size, so that copies and transfers need memory for only one chunk."""

from collections.abc import Iterator, Sequence

import torch

CHUNK_BYTES = 32 << 20
"""Size of a chunk, large enough for a link's whole bandwidth."""


def chunks(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Flat views, in order, of a contiguous tensor. The sizes are equal on all ranks, as collectives need."""
    return torch.split(tensor.view(-1), max(1, CHUNK_BYTES // tensor.itemsize))


def alike(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Views of the same parts of tensors of one shape. Splits along the first dimension where that is enough, so that
    parts of a contiguous tensor are contiguous: others need a second copy on the way to or from a device.
    """
    first = tensors[0]
    size_bytes = max(one.numel() * one.itemsize for one in tensors)
    if size_bytes <= CHUNK_BYTES or not first.dim():
        yield tensors
    elif first.shape[0] == 1:
        yield from alike(*(one[0] for one in tensors))
    else:
        num_rows = max(1, first.shape[0] * CHUNK_BYTES // size_bytes)
        for part in zip(*(torch.split(one, num_rows) for one in tensors), strict=True):
            yield from alike(*part)
