"""Which ranks' parts of a round are left out of its average. Ranks and coordinator must agree on it."""

from collections.abc import Sequence
from typing import Protocol


class Contribution(Protocol):
    """What decides on a rank's part, of a row of a round's header."""

    @property
    def weight(self) -> int:
        """Samples since the last average."""
        ...

    @property
    def finite(self) -> int:
        """Whether its values are finite."""
        ...

    @property
    def unusual(self) -> int:
        """Whether its step is far longer than its steps before."""
        ...


def discarded(rows: Sequence[Contribution], *, nonfinite: str, outliers: str) -> list[bool]:
    """Of each row, whether its rank's values are left out, by the job's settings `nonfinite` and `outliers`.

    Unusual steps are not left out when all ranks make them that have any samples: then it is the training that has
    changed, and no device that is wrong.
    """
    out = [nonfinite == "skip" and not row.finite for row in rows]
    have_usual = any(row.weight and not row.unusual and not is_out for row, is_out in zip(rows, out, strict=True))
    if outliers == "skip" and have_usual:
        return [is_out or bool(row.unusual) for row, is_out in zip(rows, out, strict=True)]
    return out
