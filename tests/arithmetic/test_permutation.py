"""The epoch's order: a permutation in every slice, flat in every statistic, equal on every machine."""

import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elche.permutation import MAX_LENGTH, _hash_of_words, _mixed, permutation_slice
from support.effort import lines_run

Samples = npt.NDArray[np.int64]
WORDS = st.integers(0, 2**64 - 1)


def whole_order(length: int, *, seed: int = 1, epoch: int = 0) -> Samples:
    return permutation_slice(seed=seed, epoch=epoch, length=length, offset=0, size=length)


def assert_flat(observed: npt.ArrayLike) -> None:
    """Pearson's chi-square against equal counts, five standard deviations either way: neither uneven nor
    too even."""
    counts = np.asarray(observed, dtype=float)
    expected = counts.mean()
    assert expected >= 5, "too few draws for the test"
    freedom = len(counts) - 1
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi_square - freedom) < 5 * math.sqrt(2 * freedom), (chi_square, freedom)


# A permutation


@pytest.mark.parametrize("lengths", [range(n, n + 100) for n in range(1, 3000, 100)], ids=str)
def test_every_length_is_permuted(lengths: range) -> None:
    for length in lengths:
        samples = whole_order(length)
        assert samples.dtype == np.int64
        assert np.array_equal(np.sort(samples), np.arange(length))


@pytest.mark.parametrize("length", [10_007, 65_536, 65_537, 999_999, 1_000_000, 1_002_001])
def test_long_ranges_are_permuted(length: int) -> None:
    assert np.array_equal(np.sort(whole_order(length)), np.arange(length))


@settings(deadline=None)
@given(WORDS, WORDS, st.integers(1, MAX_LENGTH), st.data())
def test_slices_of_huge_ranges_are_distinct_and_inside(seed: int, epoch: int, length: int, data: st.DataObject) -> None:
    size = data.draw(st.integers(0, min(length, 2000)))
    offset = data.draw(st.integers(0, length - size))
    samples = permutation_slice(seed=seed, epoch=epoch, length=length, offset=offset, size=size)
    assert len(np.unique(samples)) == size
    assert size == 0 or (samples.min() >= 0 and samples.max() < length)


@settings(deadline=None)
@given(WORDS, st.integers(1, 50_000), st.lists(st.integers(0, 50_000), max_size=5))
def test_any_split_gives_the_same_samples(seed: int, length: int, cuts: list[int]) -> None:
    edges = sorted([0, length, *(cut for cut in cuts if cut < length)])
    parts = [
        permutation_slice(seed=seed, epoch=2, length=length, offset=start, size=stop - start)
        for start, stop in itertools.pairwise(edges)
    ]
    assert np.array_equal(np.concatenate(parts), whole_order(length, seed=seed, epoch=2))


def test_longest_range_is_reached_at_both_ends() -> None:
    for offset in (0, MAX_LENGTH - 1000):
        samples = permutation_slice(seed=0, epoch=0, length=MAX_LENGTH, offset=offset, size=1000)
        assert samples.min() >= 0
        assert samples.max() < MAX_LENGTH
        assert samples.max() > MAX_LENGTH // 2


def test_result_can_be_written_to_without_changing_the_next() -> None:
    whole_order(10)[:] = 0
    assert sorted(whole_order(10)) == list(range(10))


# Equal everywhere, different where it should be


def test_hash_is_split_mix_64() -> None:
    """The first outputs of the published generator for seed 0."""
    gamma = np.uint64(0x9E3779B97F4A7C15)
    outputs = _mixed(np.arange(1, 4, dtype=np.uint64) * gamma)
    assert [hex(word) for word in outputs] == [
        "0xe220a8397b1dcdaf",
        "0x6e789e6aa1b965f4",
        "0x6c45d188009454f",
    ]


@pytest.mark.parametrize(
    ("length", "offset", "samples"),
    [
        (10, 0, [3, 6, 7, 0]),
        (10**6, 500_000, [654484, 808924, 661401, 995170]),
        (10**12, 10**11, [226355383812, 359404460853, 358558845292, 710643347090]),
        (2**62, 2**61, [32286983336126596, 1583006669469333121, 1222530226701213735, 1377935569437065366]),
    ],
)
def test_order_never_changes_between_versions(length: int, offset: int, samples: list[int]) -> None:
    """Ranks on different machines share this order, and a resumed job continues it: it is a format."""
    assert permutation_slice(seed=42, epoch=7, length=length, offset=offset, size=4).tolist() == samples


@pytest.mark.parametrize("length", [100, 5000, 10**12])
def test_epochs_seeds_and_lengths_give_unrelated_orders(length: int) -> None:
    keys = [(1, 0), (1, 1), (2, 0), (0, 1), (0, 2), (2**64 - 1, 0), (0, 2**64 - 1)]
    heads = [
        permutation_slice(seed=s, epoch=e, length=n, offset=0, size=100) for s, e in keys for n in (length, length + 1)
    ]
    for one, other in itertools.combinations(heads, 2):
        assert (one == other).sum() <= 8


def test_seed_and_epoch_are_not_interchangeable() -> None:
    keys = {int(_hash_of_words(seed, epoch, 9)[0]) for seed in range(64) for epoch in range(64)}
    assert len(keys) == 64 * 64


# Flat


@pytest.mark.parametrize("vary", ["seed", "epoch"])
@pytest.mark.parametrize("length", [2, 3, 5, 10, 100])
def test_first_position_is_flat(length: int, vary: str) -> None:
    fixed = {"seed": 3, "epoch": 3}
    firsts = [
        int(permutation_slice(**{**fixed, vary: value}, length=length, offset=0, size=1)[0]) for value in range(4000)
    ]
    assert_flat(np.bincount(firsts, minlength=length))


@pytest.mark.parametrize("length", [1025, 5000, 10**12])
def test_first_position_and_first_step_are_flat_on_the_grid(length: int) -> None:
    heads = np.array([permutation_slice(seed=s, epoch=0, length=length, offset=0, size=2) for s in range(3000)])
    assert_flat(np.bincount(heads[:, 0] * 50 // length, minlength=50))
    steps = (heads[:, 1] - heads[:, 0]) % length
    assert_flat(np.bincount(steps * 50 // length, minlength=50))


@pytest.mark.parametrize("length", [3, 4, 5])
def test_every_order_of_a_tiny_range_is_equally_likely(length: int) -> None:
    orders = Counter(tuple(whole_order(length, seed=seed).tolist()) for seed in range(6000))
    assert_flat([orders[order] for order in itertools.permutations(range(length))])


@pytest.mark.parametrize("length", [16, 1024, 1025, 4096])
def test_odd_permutations_are_as_likely_as_even_ones(length: int) -> None:
    num_odd = sum(is_odd(whole_order(length, seed=seed)) for seed in range(200))
    assert_flat([num_odd, 200 - num_odd])


def is_odd(permutation: Samples) -> bool:
    """A permutation is odd when length minus number of cycles is."""
    targets = permutation.tolist()
    seen = [False] * len(targets)
    num_cycles = 0
    for start in range(len(targets)):
        num_cycles += not seen[start]
        while not seen[start]:
            seen[start] = True
            start = targets[start]
    return (len(targets) - num_cycles) % 2 == 1


@pytest.mark.parametrize("length", [1000, 1025, 65_536, 200_000])
def test_samples_move_a_third_of_the_range_on_average(length: int) -> None:
    displacement = np.abs(whole_order(length) - np.arange(length)).mean() / length
    assert displacement == pytest.approx(1 / 3, abs=5 * math.sqrt(1 / 18 / length))


@pytest.mark.parametrize("length", [1000, 1025, 65_536, 200_000])
@pytest.mark.parametrize("lag", [1, 2, 7, 32, 447])
def test_neighbours_are_not_correlated(length: int, lag: int) -> None:
    samples = whole_order(length).astype(float)
    correlation = np.corrcoef(samples[:-lag], samples[lag:])[0, 1]
    assert abs(correlation) < 5 / math.sqrt(length - lag)


@pytest.mark.parametrize("length", [10**6, 10**12, 3 * 10**18])
def test_a_slice_covers_the_whole_range_evenly(length: int) -> None:
    samples = permutation_slice(seed=5, epoch=1, length=length, offset=length // 3, size=100_000)
    assert_flat(np.bincount((samples / length * 100).astype(int), minlength=100))
    if length > 10**6:  # a tenth of the range, drawn without repetition, is more even than chance
        assert_flat(np.bincount(samples % 97, minlength=97))


def test_fixed_points_are_as_rare_as_in_a_random_permutation() -> None:
    fixed = [int((whole_order(2000, seed=seed) == np.arange(2000)).sum()) for seed in range(400)]
    assert np.mean(fixed) == pytest.approx(1, abs=0.25)
    assert np.var(fixed) == pytest.approx(1, abs=0.4)


# Fast


@pytest.mark.parametrize("length", [10**12, 2**62, 2**40 + 1])
def test_a_million_samples_take_well_under_a_second(length: int) -> None:
    """Which is so while arrays are permuted and not numbers: about one line of Python for a hundred samples."""

    def permute() -> None:
        permutation_slice(seed=0, epoch=0, length=length, offset=12345, size=1_000_000)

    assert lines_run(permute) < 20_000


# Refusals


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**64}, "seed is"),
        ({"epoch": -1}, "epoch is -1"),
        ({"epoch": 1.5}, "epoch is 1.5"),
        ({"length": 0}, "length is 0"),
        ({"length": MAX_LENGTH + 1}, "length is"),
        ({"offset": -1}, "offset is -1"),
        ({"offset": 11}, "offset is 11"),
        ({"size": -1}, "size is -1"),
        ({"offset": 8, "size": 3}, "size is 3"),
    ],
)
def test_bad_arguments_are_refused_by_name(changed: dict[str, Any], named: str) -> None:
    arguments: dict[str, Any] = {"seed": 0, "epoch": 0, "length": 10, "offset": 0, "size": 1}
    with pytest.raises(ValueError, match=named):
        permutation_slice(**{**arguments, **changed})


def test_empty_slice_is_empty() -> None:
    for length in (10, 10**12):
        empty = permutation_slice(seed=0, epoch=0, length=length, offset=length, size=0)
        assert empty.shape == (0,)
        assert empty.dtype == np.int64
