"""The collective operations that a round needs, and the errors by which they fail."""

from typing import Protocol

import torch

from elche.errors import ElcheError


class CollectiveFailed(Exception):
    """A collective failed: a peer has gone or cannot be reached."""


class OperationStuck(CollectiveFailed):
    """An operation was aborted and has not returned: its buffers must not be used again."""


class RanksDiffer(ElcheError):
    """Ranks have entered different rounds, or a round with different models: the job fails."""


class RoundAborted(Exception):
    """The round was abandoned on every rank before any had its whole result; the next one can follow."""


class ValueCollectives(Protocol):
    """The collectives by which values are averaged."""

    position: int
    """This rank's position, from 0."""
    size: int
    generation: int
    device: torch.device
    """Device that tensors given to the operations must be on."""

    def all_gather(self, row: torch.Tensor) -> list[torch.Tensor]:
        """Every member's row, in order of position."""

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sums the tensor (flat, float32 or float64) over all members, in place."""

    def all_to_all(self, rows: torch.Tensor) -> torch.Tensor:
        """Sends row i to position i; returns the rows that came, in order of position."""

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Copies the tensor from the source's position to all, in place."""


class Collectives(ValueCollectives, Protocol):
    """The collectives of the ranks of one generation.

    Every rank calls the same operations in the same order, between `begin` and `finish`. All raise `CollectiveFailed`,
    or `RoundAborted` when only this round is lost. A round's header, in host memory, is gathered as well.
    """

    attempt: int
    sent_bytes: int = 0
    """Payload bytes that this rank has sent so far, assuming ring algorithms."""

    def begin(self, round_id: int) -> None:
        """Begins a round."""
        return

    def finish(self) -> None:
        """Says that this rank has its whole result; returns when the round can no longer be abandoned."""
        return

    def abort(self) -> None:
        """Called on another thread: makes the operation that waits for other ranks, and all later ones, fail."""
        return


class SoloCollectives(Collectives):
    """The collectives of a single rank."""

    position, size = 0, 1

    def __init__(self, *, attempt: int, generation: int, device: torch.device) -> None:
        self.attempt = attempt
        self.generation = generation
        self.device = device

    def all_gather(self, row: torch.Tensor) -> list[torch.Tensor]:
        return [row]

    def all_reduce(self, tensor: torch.Tensor) -> None:
        return

    def all_to_all(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        return
