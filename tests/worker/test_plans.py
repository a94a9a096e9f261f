"""How a loop of one's own splits its samples, as arithmetic: what is measured, when it is told, what it changes."""

from collections.abc import Sequence
from itertools import islice

import pytest
import torch

from elche_worker.trainer.config import TrainerConfig
from elche_worker.trainer.plans import Balance, CadencePlan, Decisions, Planner, Step
from elche_worker.trainer.requests import RequestConsensus


def steps(planner: Planner, count: int, *, batch_size: int = 100, start: int = 0) -> list[Step]:
    """The next steps of a long epoch."""
    return list(islice(planner.steps(10**6, batch_size, start), count))


def train(planner: Planner, speeds: Sequence[float], count: int, *, own: int = 0) -> list[int]:
    """As many steps, on ranks that make so many samples per ms; returns after which ones ranks told each other."""
    told_after = []
    for step in steps(planner, count):
        told = planner.measure(step, [(step.samples[own], step.samples[own] / speeds[own])], 1.0)
        if told is not None:
            told_after.append(step.index + 1)
            planner.learn(step, [[speed] for speed in speeds])
    return told_after


# Shares of every batch


def test_shares_are_balanced_after_ten_steps_and_then_after_every_fifty() -> None:
    planner = Balance(0, 2, TrainerConfig(max_anchor=0))
    assert planner.ratios == [0.5, 0.5]
    assert train(planner, [3.0, 1.0], 9) == []
    assert train(planner, [3.0, 1.0], 1) == [10]
    assert planner.ratios == [0.75, 0.25]
    assert train(planner, [1.0, 1.0], 150) == [60, 110, 160], "a device that has become slower is noticed again"
    assert planner.ratios == [0.5, 0.5]
    assert [step.samples for step in steps(planner, 1)] == [[50, 50]]


def test_a_rank_tells_the_mean_of_what_it_has_measured_and_not_its_last_batch() -> None:
    planner = Balance(0, 2, TrainerConfig(max_anchor=0))
    told = None
    for index, step in enumerate(steps(planner, 10)):
        throughput = 2.0 if index < 9 else 12.0  # one odd batch
        told = planner.measure(step, [(50, 50 / throughput)], 1.0)
    assert told == [pytest.approx(2.0 + 0.3 * 10.0)]


def test_batches_that_a_loop_takes_before_it_trains_them_are_measured_together() -> None:
    """Loops that accumulate gradients take a step's batches first, to count their tokens. The whole step's time is then
    the last batch's, and the others seem to take none: the slower rank got the larger share.
    """
    planner = Balance(0, 2, TrainerConfig(max_anchor=0))
    (step,) = steps(planner, 1)
    planner.measure(step, [(20, 0.01), (20, 0.01), (10, 24.98)], 1.0)
    assert planner._own_throughput == pytest.approx(2.0)


def test_the_first_measurement_is_taken_as_it_is() -> None:
    planner = Balance(0, 2, TrainerConfig(max_anchor=0))
    (step,) = steps(planner, 1)
    planner.measure(step, [(50, 25.0)], 1.0)
    assert planner._own_throughput == 2.0
    planner.measure(step, [(0, 25.0), (50, 0.0)], 1.0)
    assert planner._own_throughput == 2.0, "a batch without samples or time says nothing"


def test_a_hint_gives_the_first_shares() -> None:
    planner = Balance(0, 3, TrainerConfig(max_anchor=0, speed_hint=(1, 3.0)))
    assert planner.ratios == pytest.approx([3 / 7, 1 / 7, 3 / 7])
    assert [step.samples for step in steps(planner, 2, batch_size=70)] == [[30, 10, 30]] * 2


def test_a_hint_gives_the_first_counts() -> None:
    planner = CadencePlan(3, TrainerConfig(anchor=4, speed_hint=(1, 3.0)))
    assert [step.batches for step in steps(planner, 2, batch_size=10)] == [[12, 4, 12]] * 2
    assert planner.ratios == pytest.approx([3 / 7, 1 / 7, 3 / 7])


def test_shares_are_given_out_one_after_the_other() -> None:
    planner = Balance(0, 2, TrainerConfig(max_anchor=0, speed_hint=(1, 3.0)))
    first, second = steps(planner, 2)
    assert first.parts == (((0, 75),), ((75, 25),))
    assert second.parts == (((100, 75),), ((175, 25),))


def test_an_epoch_may_begin_in_its_middle_and_ends_with_what_is_left() -> None:
    planner = Balance(0, 2, TrainerConfig(max_anchor=0))
    assert [step.parts for step in planner.steps(250, 100, 180)] == [(((180, 35),), ((215, 35),))]


# What is learnt holds later where loaders fetch ahead


def test_what_is_learnt_holds_on_all_ranks_from_the_step_that_no_loader_has_begun() -> None:
    planner = Balance(0, 2, TrainerConfig(max_anchor=0))
    planner.delay = 3
    train(planner, [3.0, 1.0], 10)
    assert [step.samples for step in steps(planner, 5)] == [[50, 50]] * 3 + [[75, 25]] * 2


def test_a_decision_holds_until_the_next_one_takes_its_place() -> None:
    decided = Decisions("a")
    decided.decide(3, "b", 1)
    assert [decided.at(step) for step in (1, 2, 3, 4)] == ["a", "a", "b", "b"], "an epoch that is left is planned again"
    decided.decide(6, "c", 4)
    assert [decided.at(step) for step in (4, 5, 6, 7)] == ["b", "b", "c", "c"]


# El Che


def learnt(
    config: TrainerConfig, *, compute_ms: tuple[float, float] = (100.0, 200.0), sync_ms: float = 40.0
) -> CadencePlan:
    """After one step, in which averaging took 20 % of the slowest rank's time."""
    planner = CadencePlan(2, config)
    planner.fit(10_000)
    (step,) = steps(planner, 1, batch_size=10)
    planner.measure(step, [], sync_ms)
    planner.learn(step, [[compute_ms[0], sync_ms / 2], [compute_ms[1], sync_ms]])
    return planner


def test_an_averaging_above_the_target_makes_steps_longer_and_one_below_does_not() -> None:
    assert learnt(TrainerConfig(anchor=10, overhead_target=0.10)).el_che.anchor == 20
    assert learnt(TrainerConfig(anchor=10, overhead_target=0.25)).el_che.anchor == 10


def test_no_step_is_longer_than_the_config_allows() -> None:
    assert learnt(TrainerConfig(anchor=10, max_anchor=12)).el_che.anchor == 12
    assert learnt(TrainerConfig(max_anchor=4)).el_che.anchor == 4


def test_counts_follow_the_speeds_of_the_ranks() -> None:
    planner = learnt(TrainerConfig(anchor=10, max_anchor=10))
    assert planner.el_che.batch_counts == [20, 10]
    assert [step.batches for step in steps(planner, 1, batch_size=10)] == [[20, 10]]
    assert planner.throughput == [1.0, 0.5]


def test_a_rank_measures_the_batches_that_count() -> None:
    planner = CadencePlan(2, TrainerConfig(anchor=2))
    (step,) = steps(planner, 1, batch_size=10)
    assert planner.measure(step, [(10, 5.0), (0, 7.0), (10, 6.0)], 3.0) == [11.0, 3.0]


@pytest.mark.parametrize(("num_ranks", "ratio"), [(2, 1.0), (2, 2.3), (2, 12.0), (4, 3.0)])
def test_an_epoch_keeps_twenty_steps_however_much_faster_other_ranks_are(num_ranks: int, ratio: float) -> None:
    """With a rank twelve times as fast an epoch of 157 batches was five steps, and the loop learnt little."""
    planner = CadencePlan(num_ranks, TrainerConfig(speed_hint=(1, ratio)))
    planner.fit(157)
    made = list(planner.steps(1570, 10, 0))
    assert len(made) >= 20
    assert all(min(step.batches) >= 1 for step in made[:-1])
    assert sum(sum(step.samples) for step in made) == 1570


@pytest.mark.parametrize(("num_ranks", "ratio", "num_batches"), [(3, 10, 100), (7, 12, 157), (8, 4, 160)])
def test_an_epoch_keeps_twenty_steps_where_one_of_many_ranks_is_fast(
    num_ranks: int, ratio: int, num_batches: int
) -> None:
    """Each other rank's obligatory batch came on top: 17 steps of 100 batches."""
    planner = CadencePlan(num_ranks, TrainerConfig())
    planner.fit(num_batches)
    (step,) = steps(planner, 1)
    planner.measure(step, [(10, 10.0)], 50.0)
    times = [10.0 * count for count in step.batches]
    times[-1] /= ratio
    planner.learn(step, [(one, 50.0) for one in times])
    assert planner.el_che.batch_counts == [1] * (num_ranks - 1) + [ratio]
    assert len(list(planner.steps(10 * num_batches, 10, 0))) >= 20


def test_an_epoch_keeps_twenty_steps_where_nobody_has_said_how_long_they_may_be() -> None:
    planner = CadencePlan(2, TrainerConfig(anchor=10))
    planner.fit(120)
    assert planner.el_che.anchor == 3
    planner.fit(10_000)
    assert planner.el_che.anchor == 10
    given = CadencePlan(2, TrainerConfig(anchor=10, max_anchor=50))
    given.fit(120)
    assert given.el_che.anchor == 10


# Going on


def test_a_loop_goes_on_with_what_it_has_learnt() -> None:
    first, again = (Balance(1, 2, TrainerConfig(max_anchor=0)) for _ in range(2))
    train(first, [3.0, 1.0], 12, own=1)
    again.restore(first.to_json())
    assert again.ratios == [0.75, 0.25]
    assert [step.samples for step in steps(again, 2)] == [[75, 25]] * 2
    assert train(again, [1.0, 1.0], 50, own=1) == [60], "it is calibrated already"


def test_what_other_ranks_had_learnt_is_left_aside() -> None:
    first, again = Balance(0, 2, TrainerConfig(max_anchor=0)), Balance(0, 3, TrainerConfig(max_anchor=0))
    train(first, [3.0, 1.0], 12)
    again.restore(first.to_json())
    assert again.ratios == pytest.approx([1 / 3] * 3)
    cadence, other = CadencePlan(2, TrainerConfig(anchor=4)), CadencePlan(3, TrainerConfig(anchor=4))
    other.restore(cadence.to_json())
    assert len(other.el_che.batch_counts) == 3


def test_el_che_goes_on_with_what_it_has_learnt() -> None:
    first = learnt(TrainerConfig(anchor=10, max_anchor=50))
    again = CadencePlan(2, TrainerConfig(anchor=10, max_anchor=50))
    again.restore(first.to_json())
    assert again.el_che.to_json() == first.el_che.to_json()
    assert [step.batches for step in steps(again, 1, batch_size=10)] == [first.el_che.batch_counts]


# Requests


def test_a_request_is_acted_upon_two_steps_later() -> None:
    """By then it has come from every rank, and from the device, without anybody waiting."""
    consensus = RequestConsensus(torch.device("cpu"))
    seen = []
    for step in range(6):
        consensus.put(torch.tensor([0.0, float(step == 1), 0.0, float(step == 2)]))
        seen.append(consensus.take())
    assert [one.checkpoint for one in seen] == [False, False, False, True, False, False]
    assert [one.compare for one in seen] == [False, False, False, False, True, False]
    assert not any(one.cancel or one.pause for one in seen)
