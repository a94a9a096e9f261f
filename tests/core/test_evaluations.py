"""Evaluations on their own: what they come to, which is the best, and when patience ends."""

import json
import struct
from math import inf, nan
from typing import Any

import pytest

from elche.evaluation import MAX_SUM_BYTES
from elche.settings import AgreedSettings
from elche_coordinator.core.messages.events import EvaluationDone
from elche_coordinator.core.messages.ids import Epoch, Incarnation, JobId, Rank, Version
from elche_coordinator.core.messages.spec import TensorSum
from elche_coordinator.core.records.failure import Failure
from elche_coordinator.core.results.evaluations import MAX_METRICS_BYTES, MAX_VERSIONS, Evaluation, Evaluations


def evaluations(**changes: object) -> Evaluations:
    options = {"dataset_size": 9, "batch_size": 1, "epochs": 9, "policy": "cadence", "has_evaluation": True}
    return Evaluations(AgreedSettings(**(options | {"monitor": "loss"} | changes)))


def part(rank: int, epoch: int, sums: dict[str, tuple[float, int]], **more: Any) -> EvaluationDone:
    address = {"job_id": JobId("job"), "rank": Rank(rank), "incarnation": Incarnation(1)}
    return EvaluationDone(**address, epoch=epoch, sums=sums, **({"duration_ms": 1.0} | more))


def whole(*values: int) -> TensorSum:
    return TensorSum(shape=(len(values),), is_integer=True, data=struct.pack(f"<{len(values)}q", *values))


def real(*values: float) -> TensorSum:
    return TensorSum(shape=(len(values),), is_integer=False, data=struct.pack(f"<{len(values)}d", *values))


def judge(some: Evaluations, *values: float, first: int = 1) -> list[bool]:
    """One evaluation by one rank for each value; whether patience has ended after it."""
    ended = []
    for version, value in enumerate(values, first):
        some.begin([Epoch(version)], Version(version), [Rank(0)], version + 1)
        (done,) = some.take_part(part(0, version, {"loss": (value, 1)}))
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
    assert some.take_part(part(1, 0, {"loss": (30.0, 10), "only": (4.0, 2)}, duration_ms=5.0)) == []
    assert some.has(Rank(0))
    assert not some.has(Rank(1))
    (done,) = some.take_part(part(0, 0, {"loss": (60.0, 30), "none": (0.0, 0)}, duration_ms=9.0))
    assert done.metrics == {"loss": 90 / 40, "only": 2.0}
    assert (done.version, done.duration_ms) == (7, 9.0)
    assert some.is_idle


def test_a_part_that_is_told_twice_counts_once():
    some = evaluations()
    some.begin([Epoch(0)], Version(7), [Rank(0), Rank(1)], 1)
    for _ in range(2):
        assert some.take_part(part(0, 0, {"loss": (1.0, 1)})) == []
    some.take_part(part(1, 5, {"loss": (1.0, 1)}))  # an epoch that nobody evaluates
    (done,) = some.take_part(part(1, 0, {"loss": (3.0, 1)}))
    assert done.metrics == {"loss": 2.0}
    assert some.take_part(part(1, 0, {"loss": (3.0, 1)})) == []


def test_evaluations_are_complete_in_the_order_of_their_versions():
    some = evaluations()
    some.begin([Epoch(0)], Version(3), [Rank(0), Rank(1)], 1)
    some.begin([Epoch(1), Epoch(2)], Version(5), [Rank(0), Rank(1)], 1)
    assert some.owed_epochs == [0, 1, 2]
    some.take_part(part(0, 0, {}))
    some.take_part(part(0, 2, {}))
    assert some.take_part(part(1, 2, {})) == [], "the first one still lacks a part"
    assert [one.version for one in some.take_part(part(1, 0, {}))] == [3, 5]


# Tensors that are summed


@pytest.mark.parametrize(
    ("first", "second", "total"),
    [
        (whole(1, 2**53), whole(2, 1), whole(3, 2**53 + 1)),
        (whole(1, 2), real(0.5, 0.25), real(1.5, 2.25)),
        (real(0.5), real(0.25), real(0.75)),
        (whole(2**63 - 1), whole(1), whole(-(2**63))),
        (whole(), whole(), whole()),
    ],
    ids=["whole", "mixed", "real", "overflow", "empty"],
)
def test_tensors_are_summed_exactly(first: TensorSum, second: TensorSum, total: TensorSum):
    assert first.plus(second) == total
    assert second.plus(first) == total


def both(first: dict[str, TensorSum], second: dict[str, TensorSum]) -> tuple[Evaluations, list[Evaluation]]:
    """Two ranks' parts of one evaluation, and what is complete then."""
    some = evaluations(monitor=None)
    some.begin([Epoch(0)], Version(7), [Rank(0), Rank(1)], 1)
    assert some.take_part(part(0, 0, {"loss": (1.0, 1)}, tensors=first)) == []
    assert some.ask(Rank(0)) == [], "a part is missing"
    return some, some.take_part(part(1, 0, {"loss": (3.0, 1)}, tensors=second))


def test_metrics_of_sums_are_made_by_one_rank_when_all_parts_are_there():
    some, complete = both({"confusion": whole(1, 2), "rare": whole(1)}, {"confusion": whole(3, 4)})
    assert complete == []
    (asked,) = some.ask(Rank(1))
    assert asked.tensors == {"confusion": whole(4, 6), "rare": whole(1)}
    assert some.ask(Rank(1)) == [], "it is asked once"
    assert some.take_part(part(1, 0, {"loss": (3.0, 1)})) == [], "its own part again is not an answer"
    (done,) = some.take_part(part(1, 0, {"f1": (0.5, 1)}, is_made=True, duration_ms=2.0))
    assert (done.metrics, done.duration_ms) == ({"loss": 2.0, "f1": 0.5}, 3.0)


def test_when_the_rank_that_makes_metrics_is_gone_another_makes_them_of_the_same_sums():
    some, _ = both({"confusion": whole(1, 2)}, {"confusion": whole(3, 4)})
    some.ask(Rank(1))
    assert some.lose(Rank(1)) == [], "no sample is evaluated again"
    assert some.take_complete() == []
    (asked,) = some.ask(Rank(0))
    assert asked.tensors == {"confusion": whole(4, 6)}
    assert [one.version for one in some.take_part(part(0, 0, {"f1": (0.5, 1)}, is_made=True))] == [7]


def test_an_evaluation_whose_sums_await_metrics_is_judged_before_the_next_one():
    some, _ = both({"confusion": whole(1)}, {"confusion": whole(2)})
    some.begin([Epoch(1)], Version(9), [Rank(0)], 2)
    assert some.take_part(part(0, 1, {"loss": (1.0, 1)})) == []
    some.ask(Rank(1))
    done = some.take_part(part(1, 0, {"f1": (0.5, 1)}, is_made=True))
    assert [one.version for one in done] == [7, 9]


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (whole(1), whole(1, 2), "'x' of shape (2,) on rank 1, and of shape (1,) on another"),
        (whole(1), TensorSum(shape=(2,), is_integer=True, data=b"1"), "rank 1 sent 1 bytes for 'x'"),
        (whole(*[0] * (MAX_SUM_BYTES // 8)), whole(1), f"at most {MAX_SUM_BYTES} are possible"),
    ],
    ids=["shapes", "cut", "large"],
)
def test_parts_that_cannot_be_summed_fail_the_job(first: TensorSum, second: TensorSum, said: str):
    other = "y" if "at most" in said else "x"
    some, (done,) = both({"x": first}, {other: second})
    failure = some.judge(done)
    assert failure is not None
    assert said in failure.error
    assert failure.invalid == ("sent" not in said)


# Metrics that are spoilt


def test_a_metric_that_was_a_number_and_is_none_any_more_has_spoilt_the_training():
    some = evaluations()
    judge(some, 0.5, 0.4, nan)
    assert some.spoilt.startswith("loss is nan in the final evaluation, and was last a finite number after epoch 3: ")
    assert some.best_version == 2
    judge(some, 0.3, first=4)
    assert some.spoilt == ""


def test_a_metric_that_was_never_a_number_has_not_spoilt_it():
    some = evaluations()
    judge(some, nan, inf, nan)
    assert some.spoilt == ""


def test_a_job_that_goes_on_knows_which_metrics_were_numbers():
    first, again = evaluations(), evaluations()
    judge(first, 0.5)
    again.restore(json.loads(json.dumps(first.to_json())))
    judge(again, inf, first=2)
    assert "loss is inf" in again.spoilt
    assert "after epoch 2" in again.spoilt


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


def test_many_metrics_of_many_versions_are_forgotten_before_a_checkpoint_is_too_large_to_be_ordered():
    """With 900 metrics of long names the order of the 23rd checkpoint was over 4 MiB, and the training stood still."""
    some = evaluations()
    sums = {f"{number:03}" + "é" * 50: (float(number), 1) for number in range(900)} | {"loss": (1.0, 1)}
    for version in range(1, 12):
        some.begin([Epoch(version)], Version(version), [Rank(0)], version + 1)
        (done,) = some.take_part(part(0, version, sums))
        assert some.judge(done) is None
        kept = some.to_json()["by_version"]
        assert len(json.dumps(kept)) < 2 * MAX_METRICS_BYTES
        assert next(iter(kept)) == "1", "the best"
        assert list(kept)[-1] == str(version)
    assert 3 < len(kept) < 11


def test_a_metric_that_is_not_there_is_named_with_those_that_are():
    some = evaluations(monitor="accuracy")
    done = Evaluation(epochs=[Epoch(0)], version=Version(1), num_epochs=1, waiting={})
    done.add(part(0, 0, {"loss": (1.0, 1)}))
    assert some.judge(done) == Failure(
        "the evaluation gives no metric 'accuracy', which monitor names; it gives loss: "
        "name one of these, or let the evaluation return it"
    )
