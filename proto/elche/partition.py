"""Divides the samples of an epoch among ranks, as whole numbers that add up exactly."""

import math
from collections.abc import Sequence
from fractions import Fraction


def equal_sizes(world_size: int, total: int) -> list[int]:
    """Samples per rank when all ranks get the same; the first ranks take one more when it does not divide.

    Raises ValueError for a world below one rank or a negative total. Source: row C4.
    """
    if world_size < 1:
        raise ValueError(f"world_size is {world_size!r}; a partition needs at least one rank")
    _check_total(total)
    each, remainder = divmod(total, world_size)
    return [each + (rank < remainder) for rank in range(world_size)]


def throughput_sizes(ms_per_batch: Sequence[float], total: int) -> list[int]:
    """Samples per rank in proportion to speed, the inverse of the measured milliseconds per batch.

    0 ms means not measured: such a rank counts as the slowest measured one, as in El Che (row E5), and
    when none is measured all get the same. Raises ValueError for an empty list, for a negative or not
    finite time, and for a negative total. Source: row C4.
    """
    check_shares("ms_per_batch", ms_per_batch)
    slowest_ms = max(ms_per_batch)
    if slowest_ms == 0:
        return equal_sizes(len(ms_per_batch), total)
    return _proportional_sizes([1 / Fraction(ms or slowest_ms) for ms in ms_per_batch], total)


def ratio_sizes(ratios: Sequence[float], total: int) -> list[int]:
    """Samples per rank in proportion to `ratios`, which need not add up to 1.

    Raises ValueError for an empty list, for a negative or not finite ratio, when all are 0, and for a
    negative total. Source: row C4.
    """
    check_shares("ratios", ratios)
    if not any(ratios):
        raise ValueError(f"ratios are all 0 ({list(ratios)!r}); at least one rank must get a share")
    return _proportional_sizes([Fraction(ratio) for ratio in ratios], total)


def ranks_by_share(shares: Sequence[float] | Sequence[Fraction]) -> list[int]:
    """Ranks in the order in which a remainder is distributed: largest share first, equal shares by rank."""
    return sorted(range(len(shares)), key=lambda rank: -shares[rank])


def round_half_away(value: float) -> int:
    """The nearest whole number of a value that is not negative; halves round up (the built-in `round` rounds to even).

    Not `floor(value + 0.5)`: that sum rounds, and makes 1 of the largest float below a half.
    """
    whole = math.floor(value)
    return whole + (value - whole >= 0.5)


def check_shares(name: str, values: Sequence[float]) -> None:
    """Raise ValueError, naming the rank, unless there is one finite value of at least 0 for each rank."""
    if not values:
        raise ValueError(f"{name} is empty; there must be at least one rank")
    for rank, value in enumerate(values):
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} of rank {rank} is {value!r}; it must be finite and at least 0")


def _proportional_sizes(weights: Sequence[Fraction], total: int) -> list[int]:
    """Floors of the exact shares, then one more each for the largest shares until `total` is reached.

    Fractions, because floats lose samples: 0.29 * 100 is below 29, and totals go beyond 2**53.
    """
    _check_total(total)
    whole = sum(weights)
    sizes = [math.floor(weight * total / whole) for weight in weights]
    for rank in ranks_by_share(weights)[: total - sum(sizes)]:
        sizes[rank] += 1
    return sizes


def _check_total(total: int) -> None:
    if total < 0:
        raise ValueError(f"total is {total!r}; there cannot be fewer than 0 samples to divide")
