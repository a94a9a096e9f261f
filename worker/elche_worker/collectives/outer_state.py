"""State of a rank between rounds, for the parameters of one dtype."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from elche_worker.collectives.gains import Spread


@dataclass(slots=True)
class OuterState:
    """State of the outer step for the parameters of one dtype, and the moving average of the weights of that dtype.

    Bit for bit equal on all ranks that hold the version: each makes the outer step itself, and results must be equal. A
    rank that joins gets it from the source.
    """

    last: torch.Tensor
    """The last result, flat; the outer step is made from it."""
    moments: list[torch.Tensor]
    """The outer optimizer's moments, each of the length of `last`."""
    num_steps: torch.Tensor
    """Number of outer steps; a tensor, so that it can be broadcast."""
    spread: Spread
    """Empty unless the job has `merge="adascale"`."""
    mean: torch.Tensor
    """The moving average of the parameters and buffers that rounds average; empty unless the job has one. Each rank
    computes it, and different processors may round its last bits differently.
    """

    def tensors(self) -> list[torch.Tensor]:
        """All tensors, in the order in which they are broadcast."""
        return [self.last, *self.moments, self.num_steps, *self.spread.tensors(), self.mean]

    def clone(self) -> "OuterState":
        """A copy of all tensors."""
        return self._each(torch.Tensor.clone)

    def to(self, device: torch.device) -> "OuterState":
        """The same on another device."""
        return self._each(lambda tensor: tensor.to(device))

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "OuterState":
        moments = [change(moment) for moment in self.moments]
        return OuterState(
            change(self.last), moments, change(self.num_steps), self.spread.each(change), change(self.mean)
        )
