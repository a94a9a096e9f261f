"""Ranks that make no batch for longer than their own history explains."""

from dataclasses import replace

import pytest

from elche.policies import POLICIES
from elche_coordinator.core.describe import describe_training
from elche_coordinator.core.life.hangs import Duty
from elche_coordinator.core.life.silence import SilenceWatch
from elche_coordinator.core.messages.commands import AskStacks
from elche_coordinator.core.messages.events import BatchesTrained, ResultReceived, RoundEntered, StacksReported
from elche_coordinator.core.messages.ids import AgentId, Rank
from elche_coordinator.core.messages.reports import Outcome, StallReport
from elche_coordinator.core.records.outbox import Outbox
from elche_coordinator.simulator.simulation import JOB, RankModel
from support.watched import from_another_time, ranks

FOREVER_MS = 1e6


def stalls(simulation) -> list[StallReport]:
    return [report for report in simulation.reports if isinstance(report, StallReport)]


def hanging(simulate, *, usual_ms: float = 25.0, at_s: float = 2.0, for_ms: float = FOREVER_MS, **options):
    """Two ranks, of which the second takes its time over a batch at some time, and is not left out for that."""
    other = RankModel(batch_ms=usual_ms, changes=((at_s, for_ms), (at_s + 0.5, usual_ms)))
    return simulate([RankModel(batch_ms=usual_ms), other], dataset_size=100_000, on_rank_loss="fail", **options)


def test_a_rank_that_hangs_is_shown_within_thirty_seconds(simulate):
    """A train_step that never returned was shown as "training" for 12 minutes, its speed as it was."""
    simulation = hanging(simulate)
    simulation.run_until(lambda: stalls(simulation))
    assert simulation.clock.now_s < 2.0 + 30.0
    (report,) = stalls(simulation)
    assert (report.rank, report.is_over) == (1, False)
    assert report.silent_s >= 1.0
    (ask,) = simulation.sent(AskStacks)
    assert (ask.rank, ask.agent_id) == (1, "host")
    view = describe_training(simulation.job, simulation.clock.now_s)
    assert [rank.state for rank in view.ranks][1] == "stalled"
    assert view.ranks[0].stalled_s == 0
    assert (view.samples_per_s, view.eta_s, view.ranks[1].samples_per_s) == (0.0, None, 0.0)
    assert view.reason.startswith("rank 1 on host (cpu) has made no batch for ")


def test_what_its_threads_do_is_told(simulate):
    simulation = hanging(simulate)
    simulation.run_until(lambda: stalls(simulation))
    address = simulation.processes[1].address
    told = StacksReported(**address, agent_id=AgentId("host"), text="line 7 in train_step")
    simulation.handle(StacksReported(**address, agent_id=AgentId("another"), text="said by another host"))
    simulation.handle(told)
    assert [report.stacks for report in stalls(simulation)] == ["", "line 7 in train_step"]


def test_a_rank_that_goes_on_is_shown_to_go_on(simulate):
    simulation = hanging(simulate, for_ms=20_000)
    simulation.run_until(lambda: len(stalls(simulation)) == 2)
    assert [report.is_over for report in stalls(simulation)] == [False, True]
    assert stalls(simulation)[1].silent_s > 15
    assert describe_training(simulation.job, simulation.clock.now_s).ranks[1].state != "stalled"


def test_waiting_is_no_stall(simulate):
    """Ranks that wait for a slow one, for an evaluation, or in a pause are as they should be."""
    for policy in POLICIES:
        simulation = simulate(
            ranks(5, 60), policy=policy, epochs=3, dataset_size=2000, has_evaluation=True, evaluation_ms=30_000
        )
        simulation.run()
        assert stalls(simulation) == [], policy
    simulation = simulate(ranks(5, 20_000), averaging="overlapped", dataset_size=800)
    simulation.run()
    assert stalls(simulation) == []


def test_what_the_coordinator_was_away_is_no_silence(simulate):
    """One that had been away for 11 s said of each rank that it had made no batch for so long."""
    simulation = simulate(ranks(25.0), dataset_size=1_000)
    simulation.run_until(lambda: len(simulation.events(BatchesTrained)) > 3)
    outbox, duties = Outbox(JOB), {Rank(0): Duty(is_busy=True, stall_s=10.7)}
    watch = SilenceWatch(simulation.job.ranks, outbox, set_check=lambda _: None)
    watch.stalls.on_progress(Rank(0), 0.0)
    watch.watch(0.0)
    watch.check(duties, 1.0)
    watch.check(duties, 12.0)  # it was due after 6 s
    assert not watch.stalls.stalled
    for now_s in (16.7, 17.7):
        watch.check(duties, now_s)
    assert watch.stalls.stalled


def test_a_first_batch_that_compiles_is_no_stall(simulate):
    both = [RankModel(batch_ms=90_000, changes=((1.0, 10.0),)), RankModel(batch_ms=100_000, changes=((1.0, 10.0),))]
    simulation = simulate(both, dataset_size=3000)
    simulation.run()
    assert stalls(simulation) == []


def test_a_first_batch_that_takes_much_longer_than_the_others_is_one(simulate):
    simulation = simulate([RankModel(batch_ms=100), RankModel(batch_ms=FOREVER_MS)], on_rank_loss="fail")
    simulation.run_until(lambda: stalls(simulation), limit_s=100.0)
    assert [report.rank for report in stalls(simulation)] == [1]
    assert simulation.clock.now_s > 60.0


def test_first_batches_of_all_ranks_that_never_end_are_stalls(simulate):
    """Data workers that waited for a lock: the job was shown as training, without a word, for ever."""
    simulation = simulate([RankModel(batch_ms=FOREVER_MS)] * 2)
    simulation.run_until(lambda: len(stalls(simulation)) == 2, limit_s=1000.0)
    assert simulation.clock.now_s > 900.0
    assert not any(report.usual_ms for report in stalls(simulation))


def test_slow_batches_are_no_stall(simulate):
    """14 minutes a batch is slow, not stalled."""
    simulation = simulate(ranks(840_000, 840_000), dataset_size=100)
    simulation.run()
    assert stalls(simulation) == []


def test_a_rank_that_stops_before_it_enters_a_round(simulate):
    """It had told of its last batch, had no more work, and was in no round, so that nothing was due from it."""
    simulation = simulate(ranks(25, 25), on_rank_loss="fail")
    simulation.run_until(lambda: len(simulation.rounds) == 3)
    process = simulation.processes[1]
    say = process._send

    def stops(event):
        if isinstance(event, RoundEntered) and not process._leases:
            simulation.freeze(1)
        else:
            say(event)

    process._send = stops
    simulation.run_until(lambda: stalls(simulation), limit_s=60.0)
    assert 1 in [report.rank for report in stalls(simulation)]


@pytest.mark.parametrize("tells_times", [True, False])
def test_a_rank_whose_batches_only_its_rounds_have_told_of(simulate, tells_times):
    """The first rounds can end before the first report of a batch's time, and before a round has one: a rank that was
    stopped then was not shown, as if it had no history.
    """

    def shortened(event):
        if isinstance(event, ResultReceived) and not tells_times:
            return from_another_time(event, header=tuple(replace(row, compute_us=0) for row in event.header))
        return event

    simulation = simulate(ranks(1, 1), on_rank_loss="fail", averaging="overlapped", anchor=1)
    simulation.run_until(lambda: len(simulation.processes) == 2)
    for process in simulation.processes.values():
        say = process._send
        process._send = lambda event, say=say: None if isinstance(event, BatchesTrained) else say(shortened(event))
    simulation.run_until(lambda: len(simulation.rounds) == 4)
    simulation.freeze(1)
    simulation.run_until(lambda: stalls(simulation), limit_s=60.0)
    assert 1 in [report.rank for report in stalls(simulation)]


def test_an_evaluation_that_takes_much_longer_than_those_before_is_a_stall(simulate):
    """Of the first nobody knows how long it takes. A process that was stopped in the second was never said to be."""
    simulation = simulate(
        ranks(25.0, 30.0), dataset_size=300, epochs=3, has_evaluation=True, evaluation_ms=500.0, on_rank_loss="fail"
    )
    evaluating = lambda: [rank for rank in (0, 1) if simulation.training.evaluations.has(rank)]  # noqa: E731
    simulation.run_until(lambda: len(simulation.evaluations) == 1)
    simulation.run_until(lambda: any(simulation.job.ranks[rank].evaluation_ms for rank in evaluating()))
    (rank,) = evaluating()
    simulation.freeze(rank)
    stopped_s = simulation.clock.now_s
    simulation.run_until(lambda: stalls(simulation), limit_s=stopped_s + 40)
    assert 20.0 < simulation.clock.now_s - stopped_s < 30.0
    assert stalls(simulation)[0].rank == rank
    simulation.thaw(rank)
    assert simulation.run().outcome is Outcome.SUCCEEDED
    assert stalls(simulation)[-1].is_over


def test_a_first_evaluation_is_compared_with_those_of_others(simulate):
    simulation = simulate(
        ranks(25.0, 30.0), dataset_size=300, epochs=9, has_evaluation=True, evaluation_ms=500.0, on_rank_loss="fail"
    )
    simulation.run_until(lambda: len(simulation.evaluations) == 1)
    simulation.run_until(lambda: any(simulation.training.evaluations.has(rank) for rank in (0, 1)))
    (rank,) = (rank for rank in (0, 1) if simulation.training.evaluations.has(rank))
    other = simulation.job.ranks[1 - rank]
    simulation.job.ranks[rank].evaluation_ms, other.evaluation_ms = 0.0, 500.0
    simulation.freeze(rank)
    stopped_s = simulation.clock.now_s
    simulation.run_until(lambda: stalls(simulation), limit_s=stopped_s + 90)
    assert 65.0 < simulation.clock.now_s - stopped_s < 80.0


def test_an_averaging_that_takes_much_longer_than_those_before_is_a_stall(simulate):
    """As of a device that hangs in it: both wait, and neither is left out."""
    simulation = simulate(
        ranks(25.0, 25.0), averaging="blocking", on_rank_loss="fail", sync_ms=500.0, dataset_size=100_000
    )
    simulation.run_until(lambda: len(simulation.rounds) == 3)
    simulation.sync_ms = FOREVER_MS
    began_s = simulation.clock.now_s
    simulation.run_until(lambda: len(stalls(simulation)) == 2, limit_s=began_s + 100)
    assert {report.rank for report in stalls(simulation)} == {0, 1}
    assert 10 < simulation.clock.now_s - began_s < 60, "twenty times the longest one, and a little"
