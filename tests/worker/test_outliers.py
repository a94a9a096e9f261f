"""Steps that are far longer than a rank's steps before are found, and what all ranks do is not left out."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, nan
from random import Random

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


def left_out(steps: Iterable[float]) -> list[int]:
    """The rounds of a rank with such steps that would leave it out, if others' steps are usual."""
    rank, out = known(), []
    for at, norm in enumerate(steps):
        is_usual = rank.enters(norm)
        rank.round(norm, is_averaged=is_usual)
        out += [] if is_usual else [at]
    return out


@pytest.mark.parametrize(("times", "num_out"), [(0.9, 0), (1.1, 1), (2.1, 2), (4.1, 3)])
def test_a_lasting_change_is_usual_after_some_rounds(times: float, num_out: int) -> None:
    assert left_out([times * MOST] * 50) == list(range(num_out))


def test_steps_with_a_gradient_now_and_then_are_usual_in_time() -> None:
    """Between the first ones are only short steps, as of a weight decay: a sparse reward that is found late."""
    steps = [1000.0 if at % 5 == 0 else 1.0 for at in range(500)]
    assert 0 < len(left_out(steps)) <= 7


def test_faults_now_and_then_stay_unusual() -> None:
    steps = [1e4 if at % 100 == 0 else 1.0 for at in range(2000)]
    assert left_out(steps) == list(range(0, 2000, 100))


@pytest.mark.parametrize("quiet", [0.0, 1e-9])
@pytest.mark.parametrize("num_rounds", [1, 500, 5000])
def test_the_first_step_after_a_time_without_gradients_is_usual(quiet: float, num_rounds: int) -> None:
    assert left_out([quiet] * num_rounds + [1.0] * 3) == []


def test_what_was_long_once_is_not_the_measure_for_ever() -> None:
    """Steps of a hundredth: 500 rounds later the longest of all is the limit, and no longer twenty times that."""
    assert left_out([0.01] * 500 + [1.01]) == [500]


def test_until_a_step_has_any_length_nothing_is_unusual() -> None:
    rank = Rank()
    assert all(rank.round(0.0) for _ in range(3 * NUM_KNOWN))
    assert rank.round(1.0)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("task", ["hinge", "sparse reward", "unbalanced classes"])
def test_a_normal_training_has_no_unusual_steps(task: str, seed: int) -> None:
    """Norms as such trainings have them: fewer and fewer gradients; hardly any, and more later; seldom far longer."""
    dice = Random(seed)

    def norm(done: float) -> float:
        size = dice.lognormvariate(0, 0.5)
        match task:
            case "hinge":
                return size * (1 - done) if dice.random() > done else 0.0
            case "sparse reward":
                return size * (1 - done) if dice.random() < 0.02 + 0.5 * done else 0.0
            case _:
                return (8 if dice.random() < 0.02 else 1) * size * (1 - done)

    rank = Rank()
    assert all(rank.round(norm(at / 2000), dice.choice([1, 2, 3])) for at in range(2000))


@pytest.mark.parametrize("fault", [inf, 2.0**64, 1e3, 30.0])
def test_a_planted_fault_is_found_at_once(fault: float) -> None:
    """An exponent's bit, a wrong type, parameters of zeros: far longer than a step."""
    dice = Random(1)
    steps = [dice.lognormvariate(0, 0.3) for _ in range(100)]
    assert left_out([*steps, fault * max(steps), *steps]) == [100]


def test_what_all_do_becomes_usual() -> None:
    rank = known()
    assert not rank.round(2 * MOST, is_averaged=True)
    assert all(rank.round(2 * MOST) for _ in range(20))


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
    assert out(UNUSUAL, NEWCOMER) == [], "who brings nothing is not an example"
    assert out(UNUSUAL, NOT_FINITE, nonfinite="skip") == [1]
