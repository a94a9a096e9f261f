"""Batches of a `collate_fn` that share no memory with later ones."""

import copy
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from elche.errors import InvalidJob
from elche_worker.device.transfer import moves_itself, of_each_value, tensors_in

NUM_WATCHED = 2
"""Batches after the first during which that one is watched: as many buffers in turn are noticed."""


class Unshared:
    """A `collate_fn` whose batches keep their values. One that fills the same memory again, or gives views of what the
    data set fills again, is right where each batch is trained before the next is made; elche makes them ahead.

    The first batch is kept for a while. If its values change, every batch is copied from then on. Until that is known
    they are copied in any case, as far as they can be; where values cannot be read, that is always.
    """

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self._collate_fn = collate_fn
        self._first: Any = None
        self._first_values = 0
        """Checksum of the first batch."""
        self._num_made = 0
        """Batches made while the first one is watched."""
        self._is_shared: bool | None = None
        """None until it is known."""

    def __call__(self, samples: Any) -> Any:
        batch = self._collate_fn(samples)
        if self._is_shared is None and batch is not None:  # None skips a batch
            self._watch(batch)
        return batch if self._is_shared is False else of_each_value(batch, self._copied)

    def _watch(self, batch: Any) -> None:
        if self._num_made == 0:
            self._first = batch
        try:
            values = _checksum(self._first)
        except Exception:  # of a type with values of its own, such as a nested tensor
            self._first, self._num_made = None, 0
            return
        if self._num_made == 0:
            self._first_values = values
        elif values != self._first_values:
            self._is_shared, self._first = True, None
        elif self._num_made == NUM_WATCHED:
            self._is_shared, self._first = False, None
        self._num_made += 1

    def _copied(self, value: Any) -> Any:
        try:
            return _copy_of(value)
        except Exception as error:  # an object with a lock, say: most batches share nothing
            if not self._is_shared:
                return value
            raise InvalidJob(
                "collate_fn fills the memory of a batch again for the next one, while the batch waits to be trained, "
                f"and its {type(value).__name__} cannot be copied ({type(error).__name__}: {error}): let each batch "
                "have its own memory"
            ) from None


def _copy_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.grad_fn is not None:
            return value.clone()
        # As the clone of a leaf it would be none.
        copied = value.detach().clone().requires_grad_(value.requires_grad)
        if type(value) is torch.Tensor:  # attributes that the job has set
            copied.__dict__.update(value.__dict__)
        return copied
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
