"""Sums on which ranks and coordinators agree, whatever their versions of Python."""

from fractions import Fraction

import pytest

from elche.sums import added


@pytest.mark.parametrize(
    ("values", "total"), [([1e16, 1.0, -1e16], 0.0), ([0.1] * 10, 0.9999999999999999), ([], 0), ([1, 2.5], 3.5)]
)
def test_a_sum_is_rounded_after_each_addition(values: list[float], total: float) -> None:
    """Python 3.12 and newer add these to 1.0 and 1.0."""
    assert added(values) == added(iter(values)) == total


def test_it_adds_fractions_exactly() -> None:
    assert added([Fraction(1, 3)] * 3) == 1
