"""Decides which ranks' values are left out of a round's average. Ranks and coordinator must agree on it."""

from collections.abc import Sequence
from typing import Protocol


class Contribution(Protocol):
    """The fields of a header's row by which a rank's values may be left out."""

    @property
    def weight(self) -> int:
        """Samples since the last average."""
        ...

    @property
    def finite(self) -> int:
        """1 if its values are finite, else 0."""
        ...

    @property
    def unusual(self) -> int:
        """1 if its step is far longer than its earlier ones, else 0."""
        ...


def discarded(rows: Sequence[Contribution], *, nonfinite: str, outliers: str) -> list[bool]:
    """For each row, True if its rank's values are left out, by the job's settings `nonfinite` and `outliers`.

    If the steps of all ranks with samples are unusual, none is left out for it: no device is broken, the training has
    changed.
    """
    out = [nonfinite == "skip" and not row.finite for row in rows]
    have_usual = any(row.weight and not row.unusual and not is_out for row, is_out in zip(rows, out, strict=True))
    if outliers == "skip" and have_usual:
        return [is_out or bool(row.unusual) for row, is_out in zip(rows, out, strict=True)]
    return out
