"""Bounds in which optimizers keep the values of tensors, which neither averaging nor correcting is to leave."""

from collections.abc import Sequence
from math import inf, nan

import torch

Bounds = list[list[float]]
"""The least and the greatest value that each tensor may have; infinite without a bound."""
UNBOUNDED = [-inf, inf]
BOUND_DTYPE = torch.float64
"""Type in which ranks say bounds: it has every value of a parameter."""


def keep_within(values: torch.Tensor, ends: Sequence[float], *others: torch.Tensor) -> None:
    """Keeps a tensor's values, in place, between two ends. Where a value of one of the others is beyond an end, the
    tensor's may be as far beyond it.
    """
    least, most = ends
    for end, further, nearer in ((least, torch.minimum, torch.maximum), (most, torch.maximum, torch.minimum)):
        limit = torch.full_like(values, end)
        for other in others:
            limit = further(limit, other)
        values.copy_(nearer(values, limit))


class BoundsWatch:
    """Detects bounds in which an optimizer keeps the values of tensors, such as one that sets negative weights to 0
    after each step. The mean of values within bounds is within them; a step multiplied by a gain need not be, nor newer
    steps to which a result's correction is added.

    A tensor has a bound if two or more of its values, but not all, are equal and its least (or greatest), in this round
    and the last. A bound found by chance only keeps some values from going beyond the mean.
    """

    def __init__(self) -> None:
        self._before: dict[str, list[list[float]]] = {}
        """By dtype: of each tensor, its least and its greatest value a round ago."""

    def say(self, dtype: str, tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
        """Looks at the tensors after a round's steps. Returns this rank's input to `bounds_of`, of 4 numbers for each
        tensor: 1 and the value of its lower bound, the same of its upper one; 0 and 0 where there is none.
        """
        ends = [torch.stack(one.aminmax()) if one.numel() else one.new_full((2,), nan) for one in tensors]
        now: list[list[float]] = torch.stack(ends).tolist() if ends else []
        # NaN equals nothing: an empty tensor, and each tensor in the first round, has no bound.
        before, self._before[dtype] = self._before.get(dtype, [[nan, nan]] * len(now)), now
        reports = [
            (1.0, end) if end == known and 2 <= int((tensor == end).sum()) < tensor.numel() else (0.0, 0.0)
            for tensor, *pair in zip(tensors, now, before, strict=True)
            for end, known in zip(*pair, strict=True)
        ]
        return torch.tensor(reports, dtype=BOUND_DTYPE).view(-1).to(device)


def bounds_of(reports: torch.Tensor) -> Bounds:
    """The bounds of each tensor, from the sum of all `BoundsWatch.say`; infinite where none has any."""
    num_ranks, ends = reports.view(len(reports) // 4, 2, 2).unbind(-1)
    unbounded = torch.tensor([-inf, inf], dtype=reports.dtype).to(reports.device)
    found: Bounds = torch.where(num_ranks > 0, ends / num_ranks, unbounded).tolist()
    return found
