"""Tensors in parts of bounded size, so that what is copied or sent needs no memory of its own beyond one of them."""

from collections.abc import Iterator, Sequence

import torch

CHUNK_BYTES = 32 << 20
"""Of a part. Large enough for a link's whole bandwidth."""


def chunks(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Flat views, in order, of a contiguous tensor. Ranks that call collectives on them cut alike."""
    return torch.split(tensor.view(-1), max(1, CHUNK_BYTES // tensor.itemsize))


def alike(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Views of the same parts of tensors of one shape. They are cut along the first dimension, where that is enough, so
    that parts of a contiguous tensor are contiguous: others are copied to and from a device by way of a second copy.
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
