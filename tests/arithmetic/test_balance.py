"""The auto-balancer's shares and shards, and what happens to a batch that is too small to share."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elche.balance import MIN_SHARE_FRACTION, hinted_ratios, rebalanced_ratios, shard_sizes

VECTORS = json.loads((Path(__file__).parent / "vectors" / "balance.json").read_text())
THROUGHPUT = st.lists(st.floats(0, 1e9), min_size=1, max_size=12)


def equal_ratios(world_size: int) -> list[float]:
    return [1 / world_size] * world_size


@pytest.mark.parametrize("case", VECTORS, ids=lambda case: f"seed {case['seed']}")
def test_recorded_ratios_and_shards(case: dict[str, Any]) -> None:
    world_size = len(case["ema_throughput"])
    ratios = rebalanced_ratios(case["ema_throughput"], equal_ratios(world_size))
    assert ratios == pytest.approx(case["chunk_ratios"], rel=1e-9, abs=0)
    assert shard_sizes(ratios, case["batch_size"]) == case["shard_sizes"]
    hinted = hinted_ratios(world_size, *case["speed_hint"])
    assert hinted == pytest.approx(case["hinted_chunk_ratios"], rel=1e-9, abs=0)


def test_shares_follow_throughput() -> None:
    assert rebalanced_ratios([1.0, 3.0], [0.5, 0.5]) == pytest.approx([0.25, 0.75])


def test_shares_stay_while_nothing_is_measured() -> None:
    assert rebalanced_ratios([0.0, 0.0], [0.3, 0.7]) == [0.3, 0.7]


def test_slow_rank_keeps_a_minimum_that_the_others_pay() -> None:
    assert rebalanced_ratios([0.01, 1.0, 3.0], equal_ratios(3)) == pytest.approx([0.05, 0.2375, 0.7125])


def test_shards_round_halves_up_and_the_last_takes_the_rest() -> None:
    assert shard_sizes([0.25, 0.25, 0.5], 10) == [3, 3, 4]


def test_every_rank_gets_a_sample_when_there_are_enough() -> None:
    assert shard_sizes([0.98, 0.01, 0.01], 3) == [1, 1, 1]
    assert shard_sizes([0.0, 0.0, 1.0], 5) == [1, 1, 3]


def test_no_rank_gets_less_than_the_least_where_there_are_enough() -> None:
    assert shard_sizes([0.98, 0.01, 0.01], 8, least=2) == [4, 2, 2]
    assert shard_sizes([0.01, 0.01, 0.98], 8, least=2) == [2, 2, 4]


def test_a_batch_that_is_too_small_for_the_least_of_all_goes_to_the_fastest() -> None:
    """BatchNorm failed on the one sample that the slow ranks got of the last batch of an epoch."""
    assert shard_sizes([0.01, 0.01, 0.98], 5, least=2) == [2, 0, 3]
    assert shard_sizes([0.01, 0.98, 0.01], 3, least=2) == [0, 3, 0]
    assert shard_sizes([0.01, 0.98, 0.01], 1, least=2) == [0, 1, 0]
    assert shard_sizes([0.5, 0.5], 0, least=2) == [0, 0]


def test_batch_smaller_than_the_world_gives_zeros_never_negatives() -> None:
    assert shard_sizes([0.1, 0.5, 0.2, 0.2], 2) == [0, 1, 1, 0]
    assert shard_sizes(equal_ratios(4), 3) == [1, 1, 1, 0]
    assert shard_sizes(equal_ratios(4), 0) == [0, 0, 0, 0]


def test_hint_makes_one_rank_slower_than_all_others() -> None:
    assert hinted_ratios(3, 1, 2.0) == pytest.approx([0.4, 0.2, 0.4])
    assert hinted_ratios(2, 0, 0.5) == [0.5, 0.5]
    assert hinted_ratios(2, 0, 1e308) == pytest.approx([0, 1])


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: rebalanced_ratios([], []), "throughput is empty"),
        (lambda: rebalanced_ratios([1.0], [0.5, 0.5]), "throughput has 1 ranks"),
        (lambda: rebalanced_ratios([1.0, math.nan], [0.5, 0.5]), "throughput of rank 1 is nan"),
        (lambda: rebalanced_ratios([1.0, -1.0], [0.5, 0.5]), "throughput of rank 1 is -1.0"),
        (lambda: rebalanced_ratios([1.0, 1.0], [0.5, math.nan]), "ratios of rank 1 is nan"),
        (lambda: shard_sizes([], 3), "ratios is empty"),
        (lambda: shard_sizes([0.5, 0.5], -1), "batch_size is -1"),
        (lambda: shard_sizes([0.5, 0.6], 8), "add up to 1.1"),
        (lambda: shard_sizes([math.nan, 0.5], 8), "ratios of rank 0 is nan"),
        (lambda: hinted_ratios(2, 2, 2.0), "slow_rank is 2"),
        (lambda: hinted_ratios(2, -1, 2.0), "slow_rank is -1"),
        (lambda: hinted_ratios(2, 0, math.nan), "ratio is nan"),
    ],
)
def test_bad_arguments_are_refused_by_name(call: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        call()


@given(THROUGHPUT)
def test_shares_add_up_and_none_starves(throughput: list[float]) -> None:
    ratios = rebalanced_ratios(throughput, equal_ratios(len(throughput)))
    assert sum(ratios) == pytest.approx(1)
    assert min(ratios) > 0.9 * MIN_SHARE_FRACTION


@given(THROUGHPUT, st.integers(0, 10**9))
def test_shards_add_up(throughput: list[float], batch_size: int) -> None:
    sizes = shard_sizes(rebalanced_ratios(throughput, equal_ratios(len(throughput))), batch_size)
    assert sum(sizes) == batch_size
    assert min(sizes) >= (1 if batch_size >= len(sizes) else 0)
