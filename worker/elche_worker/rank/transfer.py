"""Moves a batch of any nested structure to a device."""

from collections.abc import Mapping
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


def num_bytes(batch: Any) -> int:
    """Bytes of all tensors in the structure."""
    if isinstance(batch, torch.Tensor):
        return batch.numel() * batch.element_size()
    if isinstance(batch, Mapping):
        return sum(map(num_bytes, batch.values()))
    return sum(map(num_bytes, batch)) if isinstance(batch, list | tuple) else 0
