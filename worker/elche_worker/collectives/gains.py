"""How far a round goes along the mean of its ranks' steps: further where they differ by noise (AdaScale).

Sequential training would make the steps of all ranks, one after the other. Their mean is as far as one of them. Where
the steps agree, as in the first rounds and along steep directions, the mean is right: each rank has come there by
itself. Where they differ by the noise of their batches, it is the sum that goes as far as sequential training would.
AdaScale's gain (Johnson et al., arXiv 2007.05105, there for gradients) tells the two apart: the mean of the steps'
squared norms, relative to the squared norm of their mean. It is 1 for equal steps, and the number of ranks for
independent ones. Each row of a weight, and each value of a vector, has its own, smoothed over rounds.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from math import inf

import torch

SMOOTHING = 0.9
"""Factor on what is known of a row with each round. It begins with the first round, in which ranks agree, and whose
steps are long: so the gain rises late, and not while training has not settled."""
NO_BOUNDS = -inf, inf
ROUNDING = 4.0
"""Units in the last place by which the mean of equal values may differ from them."""
SQUARES = torch.float64
"""Type of squared norms: in float32 they would overflow from steps of 1e19, and vanish below 1e-22."""


@dataclass(slots=True)
class Spread:
    """What is known of the ranks' steps: squared norms of each row. Equal on all ranks, but for `newest_of_mean`."""

    of_steps: torch.Tensor
    """Weighted mean over the ranks, smoothed over rounds."""
    of_mean: torch.Tensor
    """Of the ranks' mean step, smoothed over the same rounds."""
    newest_of_steps: torch.Tensor
    """Of the last round: learned in the next one, in which the source says the norms of its mean."""
    newest_of_mean: torch.Tensor
    """Of the last round's mean, as this rank computed them: other processors may round otherwise, so what is learned is
    what the source says.
    """

    @classmethod
    def empty(cls, num_rows: int, device: torch.device) -> "Spread":
        """Before the first round."""
        return cls(*(torch.zeros(num_rows, dtype=SQUARES, device=device) for _ in fields(cls)))

    def tensors(self) -> list[torch.Tensor]:
        """All of it, for newcomers and checkpoints."""
        return [self.of_steps, self.of_mean, self.newest_of_steps, self.newest_of_mean]

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Spread":
        """What the function makes of all tensors."""
        return Spread(*(change(tensor) for tensor in self.tensors()))

    def learn(self, of_steps: torch.Tensor, last_of_mean: torch.Tensor) -> None:
        """Takes in what the ranks say in a round: of its steps, and of the last round's mean. A row of which something
        is not finite begins anew.
        """
        for known, newest in ((self.of_steps, self.newest_of_steps), (self.of_mean, last_of_mean)):
            smoothed = (known * SMOOTHING).add_(newest * (1 - SMOOTHING))  # `lerp` may round otherwise elsewhere
            known.copy_(torch.where(known > 0, smoothed, newest))
        is_finite = self.of_steps.isfinite() & self.of_mean.isfinite()
        for known in (self.of_steps, self.of_mean):
            known.masked_fill_(~is_finite, 0.0)
        self.newest_of_steps = of_steps

    def gains(self, most: float) -> torch.Tensor:
        """The gain of each row, from 1 to `most`; 1 where it is not known."""
        gains = self.of_steps / self.of_mean
        return torch.where(gains.isfinite(), gains, torch.ones_like(gains)).clamp_(1.0, most)


class Rows:
    """Rows of trained parameters in a flat tensor: their slices along the first dimension, as models are sharded."""

    def __init__(self, shapes: Sequence[torch.Size]) -> None:
        self._shapes = [(shape[0], shape[1:].numel()) if shape else (1, 1) for shape in shapes]
        self.num_rows = sum(num_rows for num_rows, _ in self._shapes)

    def _parts(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        """Views of (rows, values of a row)."""
        sizes = [num_rows * size for num_rows, size in self._shapes]
        for part, shape in zip(torch.split(flat, sizes), self._shapes, strict=True):
            yield part.view(shape)

    def squares(self, flat: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """The squared norm of each row of the step from `last` to `flat`."""
        pairs = zip(self._parts(flat), self._parts(last), strict=True)
        norms = [torch.linalg.vector_norm(now - before, dim=1) for now, before in pairs]
        if not norms:
            return torch.zeros(0, dtype=SQUARES, device=flat.device)
        return torch.cat(norms).to(SQUARES).square_()

    def go_further(self, average: torch.Tensor, last: torch.Tensor, gains: torch.Tensor) -> None:
        """Multiplies the step from `last` to `average` by each row's gain, in place. No value leaves the bounds that
        its tensor has (`bounds`).
        """
        within = bounds(list(self._parts(average)), list(self._parts(last)))
        average.sub_(last)
        parts = zip(self._parts(average), torch.split(gains, [num for num, _ in self._shapes]), strict=True)
        for part, gain in parts:
            part.mul_(gain.to(part.dtype).unsqueeze(1))
        average.add_(last)
        for part, (least, most) in zip(self._parts(average), within, strict=True):
            if (least, most) != NO_BOUNDS:
                part.clamp_(least, most)


def bounds(averages: Sequence[torch.Tensor], lasts: Sequence[torch.Tensor]) -> list[tuple[float, float]]:
    """Of each tensor, the least and greatest value that it may have, where an optimizer seems to see to that: such as
    one that sets negative weights to 0 after its steps. The mean of values within bounds is within, too; what goes
    further is not.

    Seen by at least two values, but not all, that are equal and the least ones, in the last result and in the ranks'
    mean alike. Where that is chance, a step is shortened to the mean's at most.
    """
    found = [NO_BOUNDS] * len(averages)
    filled = [at for at, one in enumerate(averages) if one.numel()]
    if not filled:
        return found
    ends = torch.stack([torch.stack([*averages[at].aminmax(), *lasts[at].aminmax()]) for at in filled]).tolist()
    for at, (low, high, last_low, last_high) in zip(filled, ends, strict=True):
        pair = averages[at], lasts[at]
        least = min(low, last_low) if _lie_at(pair, low, last_low) else -inf
        most = max(high, last_high) if _lie_at(pair, high, last_high) else inf
        found[at] = least, most
    return found


def _lie_at(tensors: Sequence[torch.Tensor], one: float, other: float) -> bool:
    """Whether some values of both tensors lie at their ends `one` and `other`, which are the same."""
    within = ROUNDING * torch.finfo(tensors[0].dtype).eps * abs(one)
    if not abs(one - other) <= within:  # also where one is no number
        return False
    return all(2 <= int(((tensor - one).abs_() <= within).sum()) < tensor.numel() for tensor in tensors)


def most_gain(weights: Sequence[float]) -> float:
    """The gain of independent steps: the number of ranks when all weigh the same, less when they do not."""
    total = sum(weights)
    return total * total / sum(weight * weight for weight in weights)
