"""Moves a batch, of any nested structure, to a device, and keeps its types."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from itertools import pairwise
from typing import Any

import torch


class InParts(list[tuple[Any, int]]):
    """A batch split into parts that go through the model one after the other: (data, number of samples) of each."""


def bounds_of(size: int, num_parts: int) -> list[tuple[int, int]]:
    """Start and end of nearly equal parts of `size` samples; none is empty."""
    bounds = [size * index // num_parts for index in range(num_parts + 1)]
    return [(start, end) for start, end in pairwise(bounds) if end > start]


def to_device(batch: Any, device: torch.device) -> Any:
    """The same structure with its tensors on the device. Objects with a method `to` are moved by that."""

    def moved(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(device, non_blocking=True)
        there = value.to(device) if moves_itself(value) else None
        return value if there is None else there

    return of_each_value(batch, moved)


def of_each_value(batch: Any, change: Callable[[Any], Any]) -> Any:
    """The same structure, of the same types, with what `change` makes of each tensor, of each object with a method
    `to`, and of each other object that is no container.
    """
    if isinstance(batch, torch.Tensor) or moves_itself(batch):
        return change(batch)
    if isinstance(batch, Mapping):
        return like_mapping(batch, {key: of_each_value(value, change) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(of_each_value(value, change) for value in batch))
    if isinstance(batch, list | tuple):
        return like_sequence(batch, [of_each_value(value, change) for value in batch])
    if _is_dataclass(batch):
        changed = copy.copy(batch)
        for one in dataclasses.fields(batch):
            object.__setattr__(changed, one.name, of_each_value(getattr(batch, one.name), change))
        return changed
    return change(batch)


def moves_itself(batch: Any) -> bool:
    """True of an object with a method `to`, which moves it to a device."""
    return callable(getattr(type(batch), "to", None))  # on the type: a mapping may have a key `to` as an attribute


def _is_dataclass(batch: Any) -> bool:
    return dataclasses.is_dataclass(batch) and not isinstance(batch, type)


def like_mapping(batch: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """A mapping of the batch's type, with its attributes."""
    if type(batch) is dict:
        return values
    if isinstance(batch, MutableMapping):
        moved = copy.copy(batch)
        moved.update(values)
        return moved
    try:
        return type(batch)(values)  # type: ignore[call-arg]
    except TypeError:
        return values


def like_sequence(batch: list[Any] | tuple[Any, ...], values: list[Any]) -> Any:
    """A list or tuple of the batch's type, a list with its attributes."""
    if type(batch) is list:
        return values
    if isinstance(batch, list):
        moved = copy.copy(batch)
        moved[:] = values
        return moved
    try:
        return type(batch)(values)
    except TypeError:
        return tuple(values)


def tensors_in(batch: Any) -> Iterator[torch.Tensor]:
    """All tensors of the structure, including those in attributes of objects with a method `to`."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_in(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from tensors_in(value)
    elif _is_dataclass(batch) or (moves_itself(batch) and not isinstance(batch, torch.nn.Module)):
        for value in list(getattr(batch, "__dict__", {}).values()):
            if isinstance(value, torch.Tensor | Mapping | list | tuple) or _is_dataclass(value):
                yield from tensors_in(value)


def num_bytes(batch: Any) -> int:
    """Bytes of all tensors in the structure."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(batch))
