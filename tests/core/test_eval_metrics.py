"""Metrics of what an evaluation has summed, and trainings whose final evaluation is not a number, in virtual time."""

import struct
from math import inf, nan

import pytest

from elche_coordinator.core.messages.commands import SendMakeMetrics, SendOutcome
from elche_coordinator.core.messages.ids import Rank
from elche_coordinator.core.messages.reports import Outcome
from elche_coordinator.core.messages.spec import TensorSum
from support.watched import WatchedSimulation, ranks

SHARED = {"has_evaluation": True, "eval_size": 90, "epochs": 3}


def counted(epoch: int) -> dict[str, float | TensorSum]:
    """Each rank's part: a mean, and a sum whose first number is one more than the epoch."""
    return {"loss": 0.5, "hits": TensorSum(shape=(1, 1), is_integer=True, data=struct.pack("<q", epoch + 1))}


def test_sums_of_all_ranks_become_metrics_of_the_evaluation(simulate):
    simulation = simulate(ranks(5, 8, 11), **SHARED, evaluate=counted)
    assert simulation.run().metrics == {"loss": 0.5, "sum of hits": 9.0}
    assert [one.metrics["sum of hits"] for one in simulation.evaluations] == [3.0, 6.0, 9.0]
    assert [(one.epoch, one.names) for one in simulation.sent(SendMakeMetrics)] == [
        (epoch, ("loss",)) for epoch in range(3)
    ]


def test_a_metric_of_sums_may_be_the_monitored_one(simulate):
    simulation = simulate(ranks(5, 8), **SHARED, evaluate=counted, monitor="sum of hits", send_twice=True)
    result = simulation.run()
    assert (result.best_epoch, result.best_metrics) == (1, {"loss": 0.5, "sum of hits": 2.0})


@pytest.mark.parametrize("epochs", [1, 3], ids=["at the end", "before it"])
def test_another_rank_makes_the_metrics_when_the_one_that_was_to_has_died(simulate, epochs):
    simulation = simulate(ranks(5, 8, 11), **SHARED | {"epochs": epochs}, evaluate=counted, evaluation_ms=200.0)
    simulation.run_until(lambda: bool(simulation.sent(SendMakeMetrics)))
    (asked,) = simulation.sent(SendMakeMetrics)
    simulation.kill(asked.rank)
    result = simulation.run()
    first, second, *_ = simulation.sent(SendMakeMetrics)
    assert first.rank != second.rank
    assert (first.epoch, first.tensors) == (second.epoch, second.tensors), "nothing is evaluated again for it"
    assert result.outcome is Outcome.SUCCEEDED
    assert [one.epoch for one in simulation.evaluations] == list(range(epochs))
    assert sum(c.evaluate is not None and c.evaluate.epoch == 0 for c in simulation.sent(SendOutcome)) == 3


def test_a_rank_that_is_dismissed_is_not_asked_again(simulate):
    """It is still there when what it owed is asked of others, and what it says afterwards does not count."""
    simulation = simulate(ranks(5, 8), **SHARED, evaluate=counted, evaluation_ms=200.0)
    simulation.run_until(lambda: bool(simulation.sent(SendMakeMetrics)))
    (asked,) = simulation.sent(SendMakeMetrics)
    simulation.training.lose(simulation.job.ranks[asked.rank])
    assert [one.rank for one in simulation.job.outbox.take()] == [1 - asked.rank]


def test_the_coordinator_dies_while_metrics_are_made(simulate):
    simulation = simulate(ranks(5, 8), **SHARED, evaluate=counted, evaluation_ms=200.0)
    simulation.run_until(lambda: bool(simulation.sent(SendMakeMetrics)))
    simulation.crash(0.1)
    assert simulation.run().metrics == {"loss": 0.5, "sum of hits": 6.0}
    assert [one.epoch for one in simulation.evaluations] == [0, 1, 2]


def test_a_part_of_another_shape_fails_the_job_as_one_that_cannot_be(simulate):
    shapes = iter([(2,), (1, 2)] * 3)

    def evaluate(epoch: int) -> dict[str, float | TensorSum]:
        return {"hits": TensorSum(shape=next(shapes), is_integer=True, data=bytes(16))}

    result = ended(simulate(ranks(5, 8), **SHARED, evaluate=evaluate))
    assert (result.outcome, result.invalid) == (Outcome.FAILED, True)
    assert result.error.startswith("eval_step returns 'hits' of shape (1, 2) on rank ")
    assert len(result.error.splitlines()) == 1


# Metrics that are not numbers


def ended(simulation: WatchedSimulation):
    simulation.run_until(lambda: simulation.job.result is not None)
    return simulation.job.result


def values(*losses: float, **others: float):
    return {"has_evaluation": True, "epochs": len(losses), "evaluate": lambda epoch: {"loss": losses[epoch], **others}}


@pytest.mark.parametrize(("last", "monitor"), [(nan, "loss"), (inf, "loss"), (nan, None)])
def test_a_training_whose_final_evaluation_is_no_number_any_more_has_failed(simulate, last, monitor):
    simulation = simulate(ranks(5, 12), **values(0.5, 0.4, nan, last, accuracy=0.9), monitor=monitor)
    result = ended(simulation)
    assert (result.outcome, result.invalid) == (Outcome.FAILED, False)
    assert result.error == (
        f"loss is {last} in the final evaluation, and was last a finite number after epoch 2: lower the learning rate "
        "or set max_grad_norm, and resume from a checkpoint of that epoch or of one before it"
        + ("; model.safetensors is the best of epoch 2" if monitor else "")
    )
    assert simulation.job.reason == result.error
    if monitor:
        assert (result.best_epoch, result.model_is) == (2, "best of epoch 2"), "what was good is kept"


def test_patience_does_not_hide_that_a_training_is_spoilt(simulate):
    result = ended(simulate(ranks(5, 12), **values(0.5, *[nan] * 19), monitor="loss", patience=3))
    assert result.ended_early == "loss was not better than 0.5 in 3 evaluations"
    assert (result.outcome, result.best_epoch) == (Outcome.FAILED, 1)


def test_a_training_that_is_well_again_has_succeeded(simulate):
    assert simulate(ranks(5, 12), **values(0.5, nan, 0.4)).run().outcome is Outcome.SUCCEEDED


def test_a_metric_that_was_never_a_number_is_told_at_the_end_of_a_success(simulate):
    simulation = simulate(ranks(5, 12), **values(nan, inf, nan, accuracy=0.9))
    assert ended(simulation).outcome is Outcome.SUCCEEDED
    assert simulation.job.reason == "all samples are committed; never a finite number: loss"


def test_a_metric_that_was_a_number_before_the_job_went_back_is_spoilt_all_the_same(simulate):
    losses = [0.5, *[nan] * 5]
    simulation = simulate(ranks(5, 12), **values(*losses), dataset_size=600, checkpoint_every_epochs=1)
    simulation.run_until(lambda: len(simulation.evaluations) == 5)
    for rank in (0, 1):
        simulation.kill(Rank(rank))
    result = ended(simulation)
    assert simulation.job.attempt == 2
    assert next(one.epoch for one in simulation.evaluations if one.attempt == 2) > 1
    assert "was last a finite number after epoch 1" in result.error
