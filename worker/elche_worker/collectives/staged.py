"""Collectives of a device on values in host memory."""

from collections.abc import Callable

import torch

from elche_worker.collectives.operations import ValueCollectives
from elche_worker.device.chunks import chunks
from elche_worker.model.layout import CPU


class Staged:
    """Copies values through a buffer on the group's device, one chunk at a time. Other ranks may have their values on
    the device: the group cuts those into the same chunks, since calls of all ranks must have equal sizes.
    """

    device = CPU

    def __init__(self, group: ValueCollectives) -> None:
        self._group = group
        self.position = group.position
        self.size = group.size
        self.generation = group.generation

    def all_gather(self, row: torch.Tensor) -> list[torch.Tensor]:
        return [one.to(CPU) for one in self._group.all_gather(row.to(self._group.device))]

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self._by_parts(tensor, self._group.all_reduce)

    def all_to_all(self, rows: torch.Tensor) -> torch.Tensor:
        return self._group.all_to_all(rows.to(self._group.device)).to(CPU)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        self._by_parts(tensor, lambda part: self._group.broadcast(part, source))

    def _by_parts(self, tensor: torch.Tensor, run: Callable[[torch.Tensor], None]) -> None:
        for part in chunks(tensor):
            there = part.to(self._group.device)
            run(there)
            part.copy_(there)


def where(group: ValueCollectives, device: torch.device) -> ValueCollectives:
    """The group's collectives for tensors on `device`: the group itself if that is its device, else staged."""
    return group if group.device == device else Staged(group)
