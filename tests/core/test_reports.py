"""What a job tells while it trains: each epoch once and in order, losses, steps."""

import pytest

from elche.policies import POLICIES
from elche_coordinator.core.describe import describe_training
from elche_coordinator.core.messages.commands import SendOutcome
from elche_coordinator.core.messages.events import ResultReceived
from support.watched import ranks


@pytest.mark.parametrize("policy", POLICIES)
def test_every_epoch_is_reported_and_evaluated_once_and_in_order(simulate, policy):
    simulation = simulate(ranks(5, 11.5), dataset_size=1_003, epochs=5, has_evaluation=True, policy=policy)
    simulation.run()
    assert [report.epoch for report in simulation.epochs] == [0, 1, 2, 3, 4]
    assert [report.epoch for report in simulation.evaluations] == [0, 1, 2, 3, 4]
    assert sum(c.evaluate is not None for c in simulation.sent(SendOutcome)) == 5
    assert sum(c.save_final for c in simulation.sent(SendOutcome)) == 1
    kinds = [type(report).__name__ for report in simulation.reports]
    assert kinds[-1] == "JobResult"
    assert kinds.count("JobResult") == 1


def test_every_epoch_of_tiny_data_is_evaluated(simulate):
    simulation = simulate(ranks(5), dataset_size=1, epochs=3, has_evaluation=True, latency_ms=80, persist_ms=30)
    simulation.run()
    assert [report.epoch for report in simulation.evaluations] == [0, 1, 2]


def test_the_loss_of_an_epoch_is_the_mean_over_batches(simulate):
    simulation = simulate(ranks(5, 11.5), dataset_size=1_003, epochs=3)
    simulation.run()
    loss, batches = [0.0] * 3, [0] * 3
    for event in simulation.events(ResultReceived):
        for work in event.work:
            loss[work.epoch] += work.loss_sum
            batches[work.epoch] += work.num_batches
    assert [report.loss for report in simulation.epochs] == pytest.approx(
        [a / b for a, b in zip(loss, batches, strict=True)]
    )
    assert [sum(report.rank_batches) for report in simulation.epochs] == batches


def test_the_global_step_counts_committed_batches(simulate):
    simulation = simulate(ranks(5, 11.5), dataset_size=1_003, epochs=2)
    simulation.run()
    total, steps = 0, {}
    for report in simulation.rounds:
        total += sum(report.rank_batches)
        steps[report.round] = total
    assert all(command.global_step == steps[command.round] for command in simulation.sent(SendOutcome))
    assert total == sum(process.local_step for process in simulation.processes.values())


def test_the_overhead_is_the_part_of_the_time_in_which_rounds_kept_ranks_from_training(simulate):
    """A quarter: an averaging of 10 ms after each batch of 30 ms."""
    simulation = simulate(ranks(30.0, 30.0), policy="sync", averaging="blocking", sync_ms=10.0, dataset_size=2_000)
    simulation.run_until(lambda: len(simulation.rounds) == 50)
    view = describe_training(simulation.job, simulation.clock.now_s)
    assert view.overhead_fraction == pytest.approx(0.25, abs=0.05)
    simulation.run()
    assert describe_training(simulation.job, simulation.clock.now_s + 1_000).overhead_fraction == pytest.approx(
        0.25, abs=0.05
    )
