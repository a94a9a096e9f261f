"""Moves a batch, of any nested structure, to a device."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch


def to_device(batch: Any, device: torch.device) -> Any:
    """The same structure with its tensors on the device; what is no tensor stays as it is."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch


def tensors_in(batch: Any) -> Iterator[torch.Tensor]:
    """All tensors of the structure."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_in(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from tensors_in(value)


def num_bytes(batch: Any) -> int:
    """Bytes of all tensors in the structure."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(batch))
