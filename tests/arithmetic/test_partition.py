"""How an epoch's samples are divided: nothing lost, nothing invented, in proportion."""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elche.partition import equal_sizes, ratio_sizes, round_half_away, throughput_sizes

VECTORS = json.loads((Path(__file__).parent / "vectors" / "balance.json").read_text())
WEIGHTS = st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=12)


@pytest.mark.parametrize("case", VECTORS, ids=lambda case: f"seed {case['seed']}")
def test_recorded_sizes(case: dict[str, Any]) -> None:
    total = case["total_samples"]
    assert equal_sizes(len(case["equal_sizes"]), total) == case["equal_sizes"]
    assert throughput_sizes(case["ms_per_batch"], total) == case["throughput_sizes"]
    assert ratio_sizes(case["ratios"], total) == case["ratio_sizes"]


def test_equal_sizes_give_the_remainder_to_the_first_ranks() -> None:
    assert equal_sizes(4, 10) == [3, 3, 2, 2]
    assert equal_sizes(4, 2) == [1, 1, 0, 0]
    assert equal_sizes(4, 0) == [0, 0, 0, 0]


def test_twice_as_fast_gets_twice_as_much() -> None:
    assert throughput_sizes([20.0, 10.0, 5.0], 700) == [100, 200, 400]


def test_remainder_goes_to_the_largest_share_not_to_the_largest_fraction() -> None:
    assert ratio_sizes([1.0, 2.0, 4.0], 9) == [1, 2, 6]
    assert ratio_sizes([1.0, 4.0, 2.0], 8) == [1, 5, 2]


def test_equal_shares_take_the_remainder_by_rank() -> None:
    assert ratio_sizes([2.0, 2.0, 2.0], 8) == [3, 3, 2]
    assert throughput_sizes([7.0, 7.0, 7.0], 8) == [3, 3, 2]


def test_unmeasured_rank_counts_as_the_slowest() -> None:
    assert throughput_sizes([0.0, 20.0, 10.0], 400) == [100, 100, 200]


def test_nothing_measured_means_equal() -> None:
    assert throughput_sizes([0.0, 0.0, 0.0], 7) == equal_sizes(3, 7)


def test_rank_with_ratio_zero_gets_nothing() -> None:
    assert ratio_sizes([0.0, 1.0, 1.0], 10) == [0, 5, 5]


def test_exact_shares_are_not_lost_to_float_rounding() -> None:
    assert math.floor(29 / 100 * 100) == 28
    assert ratio_sizes([29, 71], 100) == [29, 71]


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: equal_sizes(0, 5), "world_size is 0"),
        (lambda: equal_sizes(2, -1), "total is -1"),
        (lambda: throughput_sizes([], 5), "ms_per_batch is empty"),
        (lambda: throughput_sizes([1.0, -1.0], 5), "ms_per_batch of rank 1 is -1.0"),
        (lambda: throughput_sizes([math.nan, 1.0], 5), "ms_per_batch of rank 0 is nan"),
        (lambda: throughput_sizes([1.0, 1.0], -5), "total is -5"),
        (lambda: ratio_sizes([], 5), "ratios is empty"),
        (lambda: ratio_sizes([0.0, 0.0], 5), "all 0"),
        (lambda: ratio_sizes([1.0, math.inf], 5), "ratios of rank 1 is inf"),
        (lambda: ratio_sizes([1.0, 1.0], -5), "total is -5"),
    ],
)
def test_bad_arguments_are_refused_by_name(call: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        call()


@given(WEIGHTS, st.integers(0, 2**62))
def test_sizes_add_up_and_keep_the_order_of_the_shares(weights: list[float], total: int) -> None:
    sizes = ratio_sizes(weights, total)
    assert sum(sizes) == total
    assert all(size >= 0 for size in sizes)
    by_weight = sorted(zip(weights, sizes, strict=True))
    assert all(a[1] <= b[1] for a, b in pairwise(by_weight) if a[0] < b[0])


@given(WEIGHTS, st.integers(0, 10**6))
def test_each_size_is_within_one_of_its_share(weights: list[float], total: int) -> None:
    speeds = [1 / ms for ms in weights]
    for size, speed in zip(throughput_sizes(weights, total), speeds, strict=True):
        assert abs(size - total * speed / sum(speeds)) <= 1 + 1e-6


def test_rounding_takes_halves_up_and_nothing_else() -> None:
    assert [round_half_away(value) for value in (0.0, 0.5, 1.5, 2.5, 2.4999999999999996)] == [0, 1, 2, 3, 2]
    assert round_half_away(math.nextafter(0.5, 0)) == 0
    assert round_half_away(2.0**53 - 1) == 2**53 - 1
