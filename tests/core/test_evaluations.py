"""Evaluations on their own: what they come to, which is the best, and when patience ends."""

import json
from math import inf, nan

import pytest

from elche.settings import AgreedSettings
from elche_coordinator.core.messages.ids import Epoch, Rank, Version
from elche_coordinator.core.records.failure import Failure
from elche_coordinator.core.results.evaluations import MAX_VERSIONS, Evaluation, Evaluations


def evaluations(**changes: object) -> Evaluations:
    options = {"dataset_size": 9, "batch_size": 1, "epochs": 9, "policy": "cadence", "has_evaluation": True}
    return Evaluations(AgreedSettings(**(options | {"monitor": "loss"} | changes)))


def judge(some: Evaluations, *values: float, first: int = 1) -> list[bool]:
    """One evaluation by one rank for each value; whether patience has ended after it."""
    ended = []
    for version, value in enumerate(values, first):
        some.begin([Epoch(version)], Version(version), [Rank(0)], version + 1)
        (done,) = some.take_part(Rank(0), version, {"loss": (value, 1)}, 1.0)
        assert some.judge(done) is None
        ended.append(some.lost_patience is not None)
    return ended


# Which is the best, and patience


def test_training_ends_after_as_many_evaluations_without_a_better_one_as_patience_says():
    assert judge(evaluations(patience=2), 0.5, 0.6, 0.7) == [False, False, True]
    assert judge(evaluations(patience=1), 0.5, 0.4, 0.6) == [False, False, True]
    assert judge(evaluations(patience=3), 0.5, 0.6, 0.7, 0.4, 0.5, 0.5, 0.5) == [False] * 6 + [True]
    assert judge(evaluations(patience=None), 0.5, *[0.6] * 9) == [False] * 10


def test_a_metric_that_stays_as_it_is_is_not_better():
    some = evaluations(patience=2)
    assert judge(some, 0.5, 0.5, 0.5) == [False, False, True]
    assert some.best_version == 1


@pytest.mark.parametrize(("mode", "best"), [("min", 2), ("max", 3)])
def test_the_mode_says_what_is_better(mode, best):
    some = evaluations(mode=mode)
    judge(some, 0.5, 0.2, 0.9, 0.4)
    assert (some.best_version, some.num_since_best) == (best, 4 - best)


@pytest.mark.parametrize("odd", [nan, -inf])
def test_what_is_no_finite_number_is_never_the_best(odd):
    some = evaluations(patience=3)
    judge(some, odd, 0.5, odd, 0.4)
    assert some.best_version == 4


# Parts of several ranks


def test_metrics_are_means_over_all_samples():
    some = evaluations()
    some.begin([Epoch(0)], Version(7), [Rank(0), Rank(1)], 1)
    assert some.take_part(Rank(1), 0, {"loss": (30.0, 10), "only": (4.0, 2)}, 5.0) == []
    assert some.has(Rank(0))
    assert not some.has(Rank(1))
    (done,) = some.take_part(Rank(0), 0, {"loss": (60.0, 30), "none": (0.0, 0)}, 9.0)
    assert done.metrics == {"loss": 90 / 40, "only": 2.0}
    assert (done.version, done.duration_ms) == (7, 9.0)
    assert some.is_idle


def test_a_part_that_is_told_twice_counts_once():
    some = evaluations()
    some.begin([Epoch(0)], Version(7), [Rank(0), Rank(1)], 1)
    for _ in range(2):
        assert some.take_part(Rank(0), 0, {"loss": (1.0, 1)}, 1.0) == []
    some.take_part(Rank(1), 5, {"loss": (1.0, 1)}, 1.0)  # an epoch that nobody evaluates
    (done,) = some.take_part(Rank(1), 0, {"loss": (3.0, 1)}, 1.0)
    assert done.metrics == {"loss": 2.0}
    assert some.take_part(Rank(1), 0, {"loss": (3.0, 1)}, 1.0) == []


def test_evaluations_are_complete_in_the_order_of_their_versions():
    some = evaluations()
    some.begin([Epoch(0)], Version(3), [Rank(0), Rank(1)], 1)
    some.begin([Epoch(1), Epoch(2)], Version(5), [Rank(0), Rank(1)], 1)
    assert some.owed_epochs == [0, 1, 2]
    some.take_part(Rank(0), 0, {}, 1.0)
    some.take_part(Rank(0), 2, {}, 1.0)
    assert some.take_part(Rank(1), 2, {}, 1.0) == [], "the first one still lacks a part"
    assert [one.version for one in some.take_part(Rank(1), 0, {}, 1.0)] == [3, 5]


# Going on


def test_a_job_that_goes_on_knows_its_best_and_its_patience():
    first, again = evaluations(patience=3), evaluations(patience=3)
    judge(first, 0.5, 0.6, 0.7)
    again.restore(json.loads(json.dumps(first.to_json())))
    assert (again.best_version, again.metrics) == (1, {"loss": 0.7})
    assert judge(again, 0.55, first=4) == [True]
    assert again.lost_patience == "loss was not better than 0.5 in 3 evaluations"


def test_metrics_of_old_versions_are_forgotten_but_for_the_best():
    some = evaluations()
    judge(some, 0.1, *[0.5] * (MAX_VERSIONS + 5))
    kept = some.to_json()["by_version"]
    assert len(kept) == MAX_VERSIONS + 1
    assert kept["1"] == {"loss": 0.1}
    assert "2" not in kept


def test_a_metric_that_is_not_there_is_named_with_those_that_are():
    some = evaluations(monitor="accuracy")
    done = Evaluation(epochs=[Epoch(0)], version=Version(1), num_epochs=1, waiting={})
    done.add({"loss": (1.0, 1)}, 1.0)
    assert some.judge(done) == Failure(
        "the evaluation gives no metric 'accuracy', which monitor names; it gives loss: "
        "name one of these, or let evaluate return it"
    )
