"""Figures of some samples, by which ranks find out that they have different data under the same positions."""

from collections.abc import Sequence
from hashlib import blake2b

NUM_POSITIONS = 4
"""Samples of a data set that are compared."""
MAX_VALUES = 64
"""Most values of a sample that are compared."""
MAX_FIGURES = 80
"""Most figures of a value."""
TOLERANCE = 0.05
"""By how much figures may differ, as a part of the value's greatest: images are not decoded alike on all hosts."""
Figures = Sequence[float]
"""Of one value, such as a tensor: the tolerance, the number of its dimensions, its shape, its greatest entry, and some
of its entries; where the tolerance is 0, instead of entries bytes of their hash.
"""


def positions_to_compare(size: int, seed: int) -> list[int]:
    """Positions in a data set of this size, one in each of equal parts; equal on every rank with the same seed."""
    num = min(size, NUM_POSITIONS)
    bounds = [size * part // num for part in range(num + 1)]
    return [start + _hash(seed, start) % (bounds[at + 1] - start) for at, start in enumerate(bounds[:-1])]


def _hash(seed: int, start: int) -> int:
    return int.from_bytes(blake2b(f"{seed} {start}".encode(), digest_size=8).digest(), "little")


def are_alike(one: Sequence[Figures], other: Sequence[Figures]) -> bool:
    """True if these are figures of the same sample."""
    return len(one) == len(other) and all(map(_is_near, one, other))


def _is_near(one: Figures, other: Figures) -> bool:
    if len(one) != len(other) or len(one) < 3 or one[:2] != other[:2]:
        return False
    shape_end = 2 + int(one[1])
    if one[2:shape_end] != other[2:shape_end]:
        return False
    greatest = max([*one[shape_end : shape_end + 1], *other[shape_end : shape_end + 1]], default=0.0)
    limit = one[0] * greatest + 1e-12
    return all(abs(a - b) <= limit for a, b in zip(one[shape_end:], other[shape_end:], strict=True))
