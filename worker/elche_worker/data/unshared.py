"""Batches of a `collate_fn` that share no memory with later ones."""

import copy
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from elche_worker.device.transfer import moves_itself, of_each_value, tensors_in

NUM_WATCHED = 2
"""Batches after the first during which that one is watched: as many buffers in turn are noticed."""


class Unshared:
    """A `collate_fn` whose batches keep their values. One that fills the same memory again, or gives views of what the
    data set fills again, is right where each batch is trained before the next is made; elche makes them ahead.

    The first batch is kept for a while. If its values change, every batch is copied from then on. Until that is known
    they are copied in any case.
    """

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self._collate_fn = collate_fn
        self._first: Any = None
        self._first_values = 0
        """Checksum of the first batch."""
        self._num_made = 0
        self._copies = True

    def __call__(self, samples: Any) -> Any:
        batch = self._collate_fn(samples)
        if self._num_made <= NUM_WATCHED:
            self._watch(batch)
        return of_each_value(batch, _copied) if self._copies else batch

    def _watch(self, batch: Any) -> None:
        if self._num_made == 0:
            self._first, self._first_values = batch, _checksum(batch)
        elif _checksum(self._first) != self._first_values:
            self._num_made, self._first = NUM_WATCHED, None
        elif self._num_made == NUM_WATCHED:
            self._copies, self._first = False, None
        self._num_made += 1


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        is_leaf = value.grad_fn is None  # the clone of one would be none
        return value.detach().clone().requires_grad_(value.requires_grad) if is_leaf else value.clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, nn.Module) or not moves_itself(value):
        return value
    return value.clone() if callable(getattr(value, "clone", None)) else copy.deepcopy(value)


def _checksum(batch: Any) -> int:
    checksum = 0
    for values in _arrays_in(batch):
        checksum = zlib.crc32(values, checksum)
    return checksum


def _arrays_in(batch: Any) -> Iterator[Any]:
    """The bytes of the batch's arrays, and of its tensors in host memory, as far as these have some."""
    leaves: list[Any] = []
    of_each_value(batch, leaves.append)
    for leaf in leaves:
        if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
            yield np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
        for tensor in tensors_in(leaf):
            if tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized:
                plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
                yield plain.view(torch.uint8).numpy()
