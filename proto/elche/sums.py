"""Sums of floats that are the same in every version of Python.

`sum` corrects rounding errors from Python 3.12 on. Ranks plan a step each on its own, from the same figures, and a
coordinator goes on from another one's events: a last bit that differs between versions would give other batches.
"""

import operator
from collections.abc import Iterable
from functools import reduce


def added(values: Iterable[float]) -> float:
    """The sum from left to right, rounded after each addition; 0 of nothing."""
    return reduce(operator.add, values, 0)
