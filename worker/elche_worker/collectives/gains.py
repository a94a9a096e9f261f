"""Gains: factors on the mean of the ranks' steps, larger where ranks differ only by batch noise (AdaScale).

Sequential training would make the steps of all ranks, one after the other; their mean is as long as one of them. Where
the steps agree, as in the first rounds and along steep directions, the mean is right: each rank arrived there by
itself. Where they differ by the noise of their batches, their sum is as long as sequential training's steps.
AdaScale's gain (Johnson et al., arXiv 2007.05105, there for gradients) tells the two apart: the mean of the steps'
squared norms, relative to the squared norm of their mean. It is 1 for equal steps, and the number of ranks for
independent ones. Each row of a weight, and each value of a vector, has its own, smoothed over rounds.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields

import torch

from elche_worker.collectives.operations import ValueCollectives
from elche_worker.model.bounds import UNBOUNDED, Bounds, keep_within

SMOOTHING = 0.9
"""Factor per round of the exponential smoothing of a row's norms. It begins with the first round, in which ranks agree
and steps are long, so that the gain rises only after training has settled."""
OVERLAPPED = 2.0
"""Where rounds overlap, a gain adds at most this many mean steps to the mean. A rank trains a batch there that does not
know the last result, so what a result brings beyond the rank's own step is answered a round late, and overshoots if it
is long (docs/defaults.md).
"""
UNMOVED = 1e-6
"""A rank has not moved a row if the square of its step is at most this part of the largest, since corrections round."""
MANY_ROWS = 16
"""A rank that has moved none of this many rows has made no step yet, as where a job adds up gradients over batches, or
where a batch has none. Of fewer rows, all may be rarely used ones of an embedding.
"""
SQUARES = torch.float64
"""Type of squared norms: in float32 they would overflow from steps of 1e19, and vanish below 1e-22."""
SENT = torch.bfloat16
"""Type in which norms are sent: 2 bytes, in error by at most 0.4 %, where steps of equal ranks differ by far more."""
DIGITS = 4096.0
"""A row's largest value is scaled to this before its values are rounded, in `squares_alike`."""
PORTION = 1 << 22
"""Values that are added up together, in a copy of 8 bytes each."""


@dataclass(slots=True)
class Spread:
    """Squared norms of the ranks' steps, per row. Bit for bit equal on all ranks."""

    of_steps: torch.Tensor
    """Weighted mean over the ranks, smoothed over rounds; nearer to `of_mean` where not all of a gain is taken."""
    of_mean: torch.Tensor
    """Of the ranks' mean step, smoothed over the same rounds."""
    newest_of_steps: torch.Tensor
    """Of the last round; smoothed in the next round."""
    newest_of_mean: torch.Tensor
    """Of the last round's mean; smoothed in the next round, too."""

    @classmethod
    def empty(cls, num_rows: int, device: torch.device) -> "Spread":
        """Before the first round."""
        return cls(*(torch.zeros(num_rows, dtype=SQUARES, device=device) for _ in fields(cls)))

    def tensors(self) -> list[torch.Tensor]:
        """All tensors, for newcomers and checkpoints."""
        return [self.of_steps, self.of_mean, self.newest_of_steps, self.newest_of_mean]

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Spread":
        """Applies a function to each tensor."""
        return Spread(*(change(tensor) for tensor in self.tensors()))

    def learn(self) -> None:
        """Smooths in the norms of the last round. A row with a value that is not finite starts over."""
        for known, newest in ((self.of_steps, self.newest_of_steps), (self.of_mean, self.newest_of_mean)):
            smoothed = (known * SMOOTHING).add_(newest * (1 - SMOOTHING))  # `lerp` may round differently elsewhere
            known.copy_(torch.where(known > 0, smoothed, newest))
        is_finite = self.of_steps.isfinite() & self.of_mean.isfinite()
        for known in (self.of_steps, self.of_mean):
            known.masked_fill_(~is_finite, 0.0)

    def add_round(self, of_steps: torch.Tensor, of_mean: torch.Tensor, by_all: torch.Tensor, part: float) -> None:
        """Takes in the norms of a round, from which the next one learns. `by_all` is True for rows that all ranks have
        moved: of the part of their gains that is above 1, the fraction `part` is learned.
        """
        self.newest_of_steps = torch.where(by_all, of_steps * part + of_mean * (1 - part), of_steps)
        self.newest_of_mean = of_mean

    def gains(self, most: float) -> torch.Tensor:
        """The gain of each row, from 1 to `most`; 1 where it is not known."""
        gains = self.of_steps / self.of_mean
        return torch.where(gains.isfinite(), gains, torch.ones_like(gains)).clamp_(1.0, most)


class Rows:
    """Rows of trained parameters in a flat tensor: their slices along the first dimension, as models are sharded."""

    def __init__(self, shapes: Sequence[torch.Size]) -> None:
        self._shapes = [(shape[0], shape[1:].numel()) if shape else (1, 1) for shape in shapes]
        self.num_rows = sum(num_rows for num_rows, _ in self._shapes)

    def parts(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        """Views of (rows, values of a row)."""
        sizes = [num_rows * size for num_rows, size in self._shapes]
        for part, shape in zip(torch.split(flat, sizes), self._shapes, strict=True):
            yield part.view(shape)

    def squares(self, flat: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """The squared norm of each row of the step from `last` to `flat`."""
        pairs = zip(self.parts(flat), self.parts(last), strict=True)
        norms = [torch.linalg.vector_norm(now - before, dim=1) for now, before in pairs]
        if not norms:
            return torch.zeros(0, dtype=SQUARES, device=flat.device)
        return torch.cat(norms).to(SQUARES).square_()

    def squares_alike(self, flat: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """As `squares`, as accurate as what is sent, and the same on all processors, however they order their sums:
        of values rounded to whole numbers, whose squares add up exactly.
        """
        pairs = zip(self.parts(flat), self.parts(last), strict=True)
        squares = [whole_squares(now - before) for now, before in pairs]
        if not squares:
            return torch.zeros(0, dtype=SQUARES, device=flat.device)
        return _unpacked(_packed(torch.cat(squares).sqrt()))

    def go_further(self, average: torch.Tensor, last: torch.Tensor, gains: torch.Tensor, bounds: Bounds) -> None:
        """Multiplies the step from `last` to `average` by each row's gain, in place. Where the average is within the
        bounds of its tensor, so is the result.
        """
        per_tensor = torch.split(gains, [num for num, _ in self._shapes])
        parts = zip(self.parts(average), self.parts(last), per_tensor, bounds, strict=True)
        for part, before, gain, ends in parts:
            mean = part.clone() if ends != UNBOUNDED else None
            part.sub_(before).mul_(gain.to(part.dtype).unsqueeze(1)).add_(before)
            if mean is not None:
                keep_within(part, ends, mean)


def whole_squares(step: torch.Tensor) -> torch.Tensor:
    """The squared norms of a step's rows, rounded alike on all processors. Overwrites the step."""
    if not step.numel():
        return torch.zeros(len(step), dtype=SQUARES, device=step.device)
    least, greatest = step.aminmax(dim=1, keepdim=True)
    # A row of zeros has no largest value, and 0 / 0 would make its norm NaN.
    largest = torch.maximum(-least, greatest).clamp_(min=torch.finfo(step.dtype).tiny)
    # Of 2**24 at most, the square is exact in float32; float64 adds 2**29 of them exactly, in any order.
    whole = step.div_(largest).mul_(DIGITS).round_().square_()
    portions = torch.split(whole, max(1, PORTION // step.shape[1]))
    sums = torch.cat([portion.sum(dim=1, dtype=SQUARES) for portion in portions])
    return sums * (largest.squeeze(1).to(SQUARES) / DIGITS).square_()


def mean_squares(
    squares: torch.Tensor, fractions: Sequence[float], group: ValueCollectives
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ranks' squared norms, each times its rank's fraction, added up; and True for rows that all ranks with a
    fraction have moved. Each rank adds up a part and sends it to all, so that each value is sent twice, in two bytes;
    the result is bit for bit equal on all ranks.
    """
    if not squares.numel():
        return squares, squares > 0
    length = -(-len(squares) // group.size)
    norms = squares.new_zeros(group.size * length)
    torch.sqrt(squares, out=norms[: len(squares)])
    total = squares.new_zeros(length)
    received = _unpacked(group.all_to_all(_packed(norms).view(group.size, -1)))
    counted = [(fraction, part) for fraction, part in zip(fractions, received, strict=True) if fraction > 0]
    for fraction, part in counted:  # without those of ranks without weight, which may have sent anything
        total += part * fraction
    by_all = moved_by_all([part for _, part in counted])
    total.sqrt_()
    # norms have no sign: a negative one says that not all have moved the row
    total = torch.where(by_all, total, -total)
    raw = torch.cat(group.all_gather(_packed(total))).view(SENT)[: len(squares)]
    # The sign bit, not `< 0`: the norm of a row that nobody has moved is -0.
    return _unpacked(raw.view(torch.uint8)), ~raw.signbit()


def gain_part(merge: str, most: float, *, overlaps: bool) -> float:
    """Part of a gain above 1 that is taken, of rows that all ranks have moved; `most` is the largest gain. A row that
    only some ranks have moved needs its whole gain, which makes the mean over these ranks of it. `merge` is
    "adascale", or "rows", which takes none.
    """
    if merge == "rows":
        return 0.0
    return min(1.0, OVERLAPPED / most) if overlaps else 1.0


def moved_by_all(squares: Sequence[torch.Tensor]) -> torch.Tensor:
    """True for rows that all ranks have moved, by the squared norms of each rank's step: further than rounding
    moves them. A rank that has moved none of `MANY_ROWS` or more rows has made no step, and does not count.
    """
    each = torch.stack(list(squares))
    has_moved = each > UNMOVED * each.amax(0)
    if each.shape[1] >= MANY_ROWS:
        has_moved |= ~has_moved.any(1, keepdim=True)
    return has_moved.all(0)


def _packed(norms: torch.Tensor) -> torch.Tensor:
    """Norms as the bytes that are sent."""
    return norms.to(SENT).view(torch.uint8)


def _unpacked(raw: torch.Tensor) -> torch.Tensor:
    """The squared norms of `_packed` norms."""
    return raw.view(SENT).to(SQUARES).square_()


def most_gain(weights: Sequence[float]) -> float:
    """The gain of independent steps, the largest there is: the number of ranks if all have equal weight, else less."""
    total = sum(weights)
    return total * total / sum(weight * weight for weight in weights)
