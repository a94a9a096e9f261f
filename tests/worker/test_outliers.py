"""Steps that are far longer than a rank's steps before are found, and what all ranks do is not left out."""

from dataclasses import dataclass
from math import inf, nan

import pytest

from elche.contributions import discarded
from elche_worker.collectives.outliers import MOST, NUM_KNOWN, StepWatch


@dataclass
class Part:
    """What a rank brings."""

    weight: int = 1
    finite: bool = True
    unusual: bool = False


class Rank:
    """Makes a round of so many batches at a time; says whether its step was usual."""

    def __init__(self) -> None:
        self.watch, self.local_step = StepWatch(), 0

    def enters(self, norm: float, num_batches: int = 2) -> bool:
        return self.watch.is_usual(norm, self.local_step + num_batches)

    def round(self, norm: float, num_batches: int = 2, *, is_averaged: bool = True) -> bool:
        is_usual = self.enters(norm, num_batches)
        self.local_step += num_batches
        self.watch.learn(is_averaged=is_averaged)
        return is_usual


def known(norm: float = 1.0) -> Rank:
    """A rank whose steps are known to be so long."""
    rank = Rank()
    assert all(rank.round(norm) for _ in range(NUM_KNOWN))
    return rank


@pytest.mark.parametrize(("norm", "is_usual"), [(0.0, True), (0.99 * MOST, True), (1.01 * MOST, False), (inf, False)])
def test_a_step_may_be_some_times_longer_than_usual(norm: float, is_usual: bool) -> None:
    assert known().enters(norm) is is_usual


def test_at_first_nothing_is_unusual() -> None:
    rank = Rank()
    assert all(rank.round(10.0**number) for number in range(NUM_KNOWN))


@pytest.mark.parametrize(("num_batches", "most"), [(1, MOST), (2, MOST), (20, 10 * MOST)])
def test_more_batches_may_go_further(num_batches: int, most: float) -> None:
    assert known().enters(0.99 * most, num_batches)
    assert not known().enters(1.01 * most, num_batches)


def test_what_is_left_out_teaches_nothing() -> None:
    rank = known()
    for _ in range(50):
        assert not rank.round(100.0, is_averaged=False)
    assert rank.round(1.0)


def test_what_all_do_becomes_usual() -> None:
    rank = known()
    assert not rank.round(20.0)
    assert not all(rank.round(20.0) for _ in range(2))
    assert all(rank.round(20.0) for _ in range(20))


def test_steps_that_grow_with_a_warm_up_are_usual() -> None:
    rank = Rank()
    assert all(rank.round(0.01 * number) for number in range(1, 500))


def test_a_round_that_failed_is_part_of_the_next() -> None:
    rank = known()
    assert rank.enters(4.0)
    assert rank.enters(8.0, num_batches=4)
    rank.local_step += 4
    rank.watch.learn(is_averaged=True)
    assert rank.watch.is_usual(1.0, rank.local_step + 2)


def test_a_step_whose_length_is_not_known_is_usual() -> None:
    rank = known()
    assert rank.round(nan)
    assert rank.round(1.0)
    assert not rank.enters(1.01 * MOST)


def out(*parts: Part, nonfinite: str = "fail", outliers: str = "skip") -> list[int]:
    """The positions of those that are left out."""
    return [at for at, is_out in enumerate(discarded(parts, nonfinite=nonfinite, outliers=outliers)) if is_out]


USUAL, UNUSUAL, NOT_FINITE, NEWCOMER = Part(), Part(unusual=True), Part(finite=False), Part(weight=0)


def test_who_is_left_out() -> None:
    assert out(USUAL, UNUSUAL, USUAL) == [1]
    assert out(USUAL, UNUSUAL, outliers="keep") == []
    assert out(USUAL, NOT_FINITE, nonfinite="skip") == [1]
    assert out(USUAL, NOT_FINITE) == []
    assert out(NOT_FINITE, UNUSUAL, USUAL, nonfinite="skip") == [0, 1]


def test_unusual_steps_of_all_are_averaged() -> None:
    assert out(UNUSUAL, UNUSUAL) == []
    assert out(UNUSUAL) == []
    assert out(UNUSUAL, NEWCOMER) == [], "who brings nothing is no example"
    assert out(UNUSUAL, NOT_FINITE, nonfinite="skip") == [1]
