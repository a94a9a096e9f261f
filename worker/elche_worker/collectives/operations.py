"""What a round needs of a group of ranks: four collective operations, and one end that all members see alike."""

from typing import Protocol

import torch


class CollectiveFailed(Exception):
    """A collective did not finish: a peer is gone, or cannot be reached."""


class RoundAborted(Exception):
    """The round was given up on every member, before any had all of it; the group can go on with the next."""


class Collectives(Protocol):
    """Ranks that average together.

    Every member calls the same operations in the same order, between `begin` and `finish`.
    All raise `CollectiveFailed`, or `RoundAborted` when only this round is lost.
    """

    position: int
    """This rank's place among the members, from 0."""
    size: int
    attempt: int
    generation: int
    device: torch.device
    """Where the tensors must be that are given to the operations."""
    sent_bytes: int
    """Payload that this rank has sent so far."""

    def begin(self, round_id: int) -> None:
        """A round begins."""
        ...

    def all_gather(self, row: torch.Tensor) -> list[torch.Tensor]:
        """Every member's row, in order of position."""
        ...

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sums the tensor (flat, float32 or float64) over all members, in place."""
        ...

    def all_to_all(self, rows: torch.Tensor) -> torch.Tensor:
        """Sends row i to position i; returns the rows that came, in order of position."""
        ...

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Copies the tensor from the source's position to all, in place."""
        ...

    def finish(self) -> None:
        """This rank has everything; returns when it is certain that the round is not given up."""
        ...

    def abort(self) -> bool:
        """From another thread: an operation that waits for others fails now, and the group is of no use afterwards.
        False: only the process's end ends it.
        """
        ...


class SoloCollectives:
    """A group of one rank."""

    position, size, sent_bytes = 0, 1, 0

    def __init__(self, *, attempt: int, generation: int, device: torch.device) -> None:
        self.attempt = attempt
        self.generation = generation
        self.device = device

    def begin(self, round_id: int) -> None:
        return

    def all_gather(self, row: torch.Tensor) -> list[torch.Tensor]:
        return [row]

    def all_reduce(self, tensor: torch.Tensor) -> None:
        return

    def all_to_all(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        return

    def finish(self) -> None:
        return

    def abort(self) -> bool:
        return False
