"""The end of a job that monitors a metric: the best model is kept, restored unless it says otherwise, and named."""

import pytest

from elche_coordinator.core.messages.commands import SendKeepBest, SendOutcome, SendShutdown
from elche_coordinator.core.messages.events import BestKept, CheckpointFailed, FinalStateSaved, JobCancelled
from elche_coordinator.core.messages.ids import AgentId, JobId, Rank, Version
from elche_coordinator.core.messages.reports import ENDED_EARLY, EvaluationReport, JobResult, Outcome
from elche_coordinator.core.records.ranks import fastest
from elche_coordinator.simulator.collective import Parameters
from elche_coordinator.simulator.simulation import RankModel
from support.watched import WatchedSimulation, ranks

LOSSES = [0.9, 0.2, 0.8, 0.7, 0.6, 0.5]
MONITORED = {"epochs": 6, "dataset_size": 600, "has_evaluation": True, "monitor": "loss"}


def files(simulation: WatchedSimulation) -> dict[str, Parameters]:
    """What the rank that wrote the final state has written, by name."""
    (written,) = [process.files for process in simulation.processes.values() if process.files]
    return written


def num_epochs_in(parameters: Parameters) -> int:
    return len([epoch for epoch, seen in parameters.seen.items() if sum(end - start for start, end in seen) == 600])


def of(losses: list[float]) -> dict[str, object]:
    return {**MONITORED, "evaluate": lambda epoch: {"loss": losses[epoch]}}


def told(result: JobResult) -> tuple[object, ...]:
    return result.model_is, result.best_epoch, result.best_metrics, result.metrics, result.best_problem


def test_an_earlier_best_takes_the_place_of_the_last_which_stays_beside_it(simulate):
    simulation = simulate(ranks(5, 12), **of(LOSSES), keep_checkpoints=1)
    result = simulation.run()
    assert told(result) == ("best of epoch 2", 2, {"loss": 0.2}, {"loss": 0.5}, "")
    assert result.metrics_epoch == 6
    assert {name: num_epochs_in(one) for name, one in files(simulation).items()} == {"model": 2, "best": 2, "last": 6}


def test_the_best_of_an_attempt_before_is_kept_while_it_is_the_best(simulate):
    simulation = simulate(ranks(5, 12), **of(LOSSES), keep_checkpoints=2)
    simulation.run_until(lambda: sum(isinstance(report, EvaluationReport) for report in simulation.reports) == 4)
    for rank in (0, 1):
        simulation.kill(Rank(rank))
    simulation.run_until(lambda: simulation.job.attempt == 2 and simulation.job.run.training is not None)
    assert [one.is_best for one in simulation.training.checkpoints.shown(Version(0))], "what it goes on from is listed"
    result = simulation.run()
    assert told(result) == ("best of epoch 2", 2, {"loss": 0.2}, {"loss": 0.5}, "")
    assert [one.is_best for one in result.checkpoints] == [True, False, False]
    assert {one.name for one in simulation.saved.values()} == {one.name for one in result.checkpoints}


def test_a_job_that_restores_the_last_has_the_best_beside_it(simulate):
    simulation = simulate(ranks(5, 12), **of(LOSSES), restore="last")
    assert told(simulation.run()) == ("last", 2, {"loss": 0.2}, {"loss": 0.5}, "")
    assert {name: num_epochs_in(one) for name, one in files(simulation).items()} == {"model": 6, "best": 2}


def test_where_the_last_is_the_best_it_is_both_and_no_checkpoint_is_read(simulate):
    simulation = simulate(ranks(5, 12), **of(sorted(LOSSES, reverse=True)))
    assert told(simulation.run()) == ("best of epoch 6", 6, {"loss": 0.2}, {"loss": 0.2}, "")
    assert [order.checkpoint for order in simulation.sent(SendKeepBest)] == [""]
    assert {name: num_epochs_in(one) for name, one in files(simulation).items()} == {"model": 6, "best": 6}


def test_a_job_without_a_metric_to_watch_has_the_last_model_and_asks_for_no_other(simulate):
    simulation = simulate(ranks(5, 12), epochs=2, dataset_size=600, has_evaluation=True)
    result = simulation.run()
    assert (result.model_is, result.best_epoch, result.best_metrics) == ("last", None, {})
    assert not simulation.sent(SendKeepBest)


def test_where_no_evaluation_gave_a_number_the_last_model_is_the_jobs(simulate):
    simulation = simulate(ranks(5, 12), **of([float("nan")] * 6))
    assert (simulation.run().model_is, simulation.sent(SendKeepBest)) == ("last", [])


@pytest.mark.parametrize("send_twice", [False, True])
def test_patience_ends_training_and_the_best_is_restored(simulate, send_twice):
    losses = [0.9, 0.3, *[0.8] * 40]
    options = of(losses) | {"epochs": 40, "patience": 3}
    simulation = simulate(ranks(5, 12), **options, keep_checkpoints=1, send_twice=send_twice)
    result = simulation.run()
    assert result.ended_early
    assert told(result) == ("best of epoch 2", 2, {"loss": 0.3}, {"loss": 0.8}, "")
    assert num_epochs_in(files(simulation)["model"]) == 2
    assert len(simulation.sent(SendKeepBest)) == 1
    assert {one.outcome for one in simulation.sent(SendShutdown)} == {ENDED_EARLY}


def test_patience_that_ends_with_the_last_epoch_ends_nothing_early(simulate):
    simulation = simulate(ranks(5, 12), **of(LOSSES), patience=4)
    result = simulation.run()
    assert (result.epochs, simulation.training.evaluations.num_since_best) == (6, 4)
    assert result.ended_early == ""


@pytest.mark.parametrize(("last", "model_is"), [(0.1, "last"), (0.9, "best of epoch 2")])
def test_max_steps_ends_training_within_an_epoch(simulate, last, model_is):
    """What is left of its last epoch is evaluated as well, and may be the best."""
    simulation = simulate(ranks(5, 12), **of([0.9, 0.2, last, 0.0]), max_steps=130)
    result = simulation.run()
    assert result.metrics == {"loss": last}
    assert num_epochs_in(files(simulation)["model"]) == 2
    is_last = files(simulation)["model"].version == simulation.training.version
    assert is_last == (model_is == "last")
    assert result.model_is == f"best of epoch {result.best_epoch}"


def test_the_job_ends_only_when_the_best_checkpoint_is_written_and_restored(simulate):
    simulation = simulate(ranks(5, 12), **of([0.9, 0.8, 0.7, 0.6, 0.1, 0.2]), checkpoint_ms=3000)
    assert simulation.run().model_is == "best of epoch 5"
    assert num_epochs_in(files(simulation)["model"]) == 5


def test_a_best_checkpoint_that_cannot_be_read_leaves_the_last_model_and_the_result_says_why(simulate):
    simulation = simulate(ranks(5, 12), **of(LOSSES))
    simulation.run_until(lambda: len(simulation.epochs) == 5)
    simulation.saved.clear()
    result = simulation.run()
    assert result.outcome is Outcome.SUCCEEDED
    (order,) = simulation.sent(SendKeepBest)
    problem = f"{order.checkpoint} cannot be read"
    assert told(result) == ("last", 2, {"loss": 0.2}, {"loss": 0.5}, problem)
    assert {name: num_epochs_in(one) for name, one in files(simulation).items()} == {"model": 6}


def test_a_best_checkpoint_that_could_not_be_written_is_said(simulate):
    simulation = simulate(ranks(5), **of(LOSSES), checkpoint_ms=1e6)

    def best_is_being_written() -> bool:
        return simulation.job.run.training is not None and simulation.training.evaluations.best_epoch == 2

    simulation.run_until(best_is_being_written)
    for order in simulation.sent(SendOutcome):
        if order.checkpoint is not None:
            failed = {"job_id": JobId("job"), "rank": order.rank, "incarnation": order.incarnation}
            simulation.handle(CheckpointFailed(**failed, version=order.version, reason="no space"))
    simulation.processes[Rank(0)]._checkpoint_s = 0.0
    result = simulation.run(limit_s=1e5)
    assert (result.outcome, result.model_is) == (Outcome.SUCCEEDED, "last")
    assert result.best_problem == "the best model has no checkpoint, which could not be written"


def test_a_resumed_training_that_gets_no_better_restores_the_best_of_the_one_before(simulate):
    first = simulate(ranks(5, 12), **of(LOSSES))
    result = first.run()
    saved = list(first.saved.values())
    again = simulate(ranks(6, 11), **of(LOSSES) | {"epochs": 8}, resumed=saved[-1])
    again.evaluate = lambda epoch: {"loss": 0.5}
    (best,) = [one for one in result.checkpoints if one.is_best]
    again.run_until(lambda: bool(again.sent(SendKeepBest)))
    (order,) = again.sent(SendKeepBest)
    assert order.checkpoint == best.path
    assert again.training.evaluations.best_epoch == 2


def test_a_best_that_is_evaluated_only_after_a_resume_has_a_checkpoint(simulate):
    """A checkpoint is made before its own evaluation, which the training that goes on from it makes."""
    losses = [0.9, 0.8, 0.7, 0.2, 0.6, 0.5]
    first = simulate(ranks(5, 12), **of(losses))
    first.run()
    (best,) = [one for one in first.saved.values() if one.name.startswith("epoch-0004")]
    again = simulate(ranks(5, 12), **of(losses), resumed=best)
    assert told(again.run()) == ("best of epoch 4", 4, {"loss": 0.2}, {"loss": 0.5}, "")


def test_the_final_state_is_written_on_the_host_that_has_the_best_checkpoint(simulate):
    """The rank that was the fastest then is the slowest in the end, and the other one is on another host."""
    slows_down = RankModel(batch_ms=5, changes=((0.7, 40),))
    simulation = simulate([slows_down, RankModel(batch_ms=12)], **of(LOSSES), check_every=10**9)
    simulation.run_until(lambda: len(simulation.epochs) == 1)
    simulation.job.ranks[Rank(1)].agent_id = AgentId("another")
    simulation.run_until(lambda: bool(simulation.sent(SendKeepBest)))
    assert fastest(simulation.training.members) == 1
    assert [order.rank for order in simulation.sent(SendOutcome) if order.save_final] == [0]


@pytest.mark.parametrize("ends", ["before it is asked for the best", "after"])
def test_the_best_is_kept_by_another_rank_when_the_one_that_wrote_the_last_model_dies(simulate, ends):
    simulation = simulate(ranks(5, 12, 15), **of(LOSSES), checkpoint_ms=300.0)
    event = FinalStateSaved if ends.startswith("before") else SendKeepBest
    simulation.run_until(lambda: bool(simulation.events(event) or simulation.sent(event)))
    (saver,) = [order.rank for order in simulation.sent(SendOutcome) if order.save_final]
    assert bool(simulation.sent(SendKeepBest)) == (ends == "after")
    simulation.kill(saver)
    assert told(simulation.run()) == ("best of epoch 2", 2, {"loss": 0.2}, {"loss": 0.5}, "")
    (next_saver,) = [order.rank for order in simulation.sent(SendOutcome) if order.save_final and order.rank != saver]
    assert simulation.sent(SendKeepBest)[-1].rank == next_saver


def test_a_rank_that_is_not_asked_cannot_say_that_the_best_is_kept(simulate):
    simulation = simulate(ranks(5, 12), **of(LOSSES))
    simulation.run_until(lambda: len(simulation.epochs) == 3)
    simulation.says_nothing(BestKept(**simulation.processes[Rank(0)].address))
    simulation.run_until(lambda: bool(simulation.sent(SendKeepBest)))
    (order,) = simulation.sent(SendKeepBest)
    other = simulation.processes[Rank(1 - order.rank)]
    simulation.says_nothing(BestKept(**other.address))
    simulation.run()


def test_a_cancelled_job_says_of_which_epoch_its_metrics_are_and_has_no_model(simulate):
    simulation = simulate(ranks(5, 12), **of(LOSSES))
    simulation.run_until(lambda: len(simulation.evaluations) == 3)
    simulation.handle(JobCancelled(job_id=JobId("job")))
    result = simulation.run()
    assert (result.model, result.model_is) == ("", "")
    assert (result.metrics, result.metrics_epoch) == ({"loss": 0.8}, 3)
    assert (result.best_metrics, result.best_epoch) == ({"loss": 0.2}, 2)
