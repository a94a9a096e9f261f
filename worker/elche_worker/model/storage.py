"""Finds tensors of a model that share memory, so that each value is averaged and saved once."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

import torch
from torch import nn

from elche.errors import InvalidJob
from elche_worker.model.tensors import assign, is_divided, local_of

Named = tuple[str, torch.Tensor]


def storage_of(tensor: torch.Tensor) -> int:
    """Identity of a tensor's storage. Parts of sharded tensors may be empty, without an address: each is its own."""
    return id(tensor) if is_divided(tensor) else tensor.untyped_storage().data_ptr()


def place_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Identity of a tensor's values: equal for tied ones, under whatever names."""
    local = local_of(tensor)
    return local.data_ptr(), local.shape, local.stride(), local.dtype


def without_copies(named: Iterable[Named]) -> list[Named]:
    """The tensors that together contain every value once, in their order: of tied ones the first, and no views of
    others (slices, transposes). Empty ones are left out.

    If one contains the other, the trained one is taken, else the larger. Raises `InvalidJob` if two overlap and neither
    contains the other.
    """
    tensors = [(name, one) for name, one in named if one.numel()]
    chosen: set[str] = set()
    for _, group in groupby(sorted(tensors, key=lambda one: storage_of(one[1])), lambda one: storage_of(one[1])):
        sharing = list(group)
        # Reversed twice, so that of tied tensors the first one's name stays.
        distinct = {place_of(one): (name, one) for name, one in reversed(sharing)}
        chosen |= set(_covering(list(distinct.values())[::-1])) if len(distinct) > 1 else {sharing[0][0]}
    return [(name, one) for name, one in tensors if name in chosen]


def _covering(tensors: Sequence[Named]) -> list[str]:
    """The names of those tensors of one storage that together cover all of them, none overlapping another."""
    grain = min(one.element_size() for _, one in tensors)
    taken = torch.zeros(tensors[0][1].untyped_storage().nbytes() // grain, dtype=torch.bool)
    chosen: list[Named] = []
    for name, one in sorted(tensors, key=_precedence):
        region = _region(taken, one, grain)
        if region.all():
            continue
        if region.any():
            other = next(name for name, kept in chosen if _overlap(taken, kept, one, grain))
            raise InvalidJob(
                f"the model's {name} and {other} share a part of their memory, and neither contains the other, so that "
                "they cannot be averaged: let one tensor hold it all, and take slices of it in forward()"
            )
        region.fill_(True)
        chosen.append((name, one))
    return [name for name, _ in chosen]


def _precedence(named: Named) -> tuple[bool, bool, int]:
    tensor = named[1]
    return not tensor.requires_grad, not isinstance(tensor, nn.Parameter), -tensor.numel()


def _region(taken: torch.Tensor, tensor: torch.Tensor, grain: int) -> torch.Tensor:
    """View of a tensor's elements in a mask that has one element per `grain` bytes of the storage."""
    each = tensor.element_size() // grain
    stride = (*(each * one for one in tensor.stride()), 1)
    return taken.as_strided((*tensor.shape, each), stride, each * tensor.storage_offset())


def _overlap(taken: torch.Tensor, one: torch.Tensor, other: torch.Tensor, grain: int) -> bool:
    mask = torch.zeros_like(taken)
    _region(mask, one, grain).fill_(True)
    return bool(_region(mask, other, grain).any())


@torch.no_grad()
def results_of_views(live: Mapping[str, torch.Tensor], results: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Results, by name, of tensors that have none of their own because they are views of others."""
    owners: dict[int, list[str]] = {}
    for name in results:
        if name in live and not is_divided(live[name]):
            owners.setdefault(storage_of(live[name]), []).append(name)
    copies: dict[int, torch.UntypedStorage] = {}
    views = {}
    for name, tensor in live.items():
        if name in results or is_divided(tensor) or storage_of(tensor) not in owners:
            continue
        storage = storage_of(tensor)
        if storage not in copies:
            copies[storage] = tensor.untyped_storage().clone()  # type: ignore[no-untyped-call]
            for owner in owners[storage]:
                assign(_view(copies[storage], live[owner]), results[owner])
        views[name] = _view(copies[storage], tensor)
    return views


def _view(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    empty = torch.empty(0, dtype=like.dtype, device=like.device)
    return empty.set_(storage, like.storage_offset(), like.shape, like.stride())
