"""Ranks that die while others train: the others go on, nothing is lost or counted twice, and the rank comes back."""

import itertools
from collections.abc import Sequence

import pytest

from elche_coordinator.core.messages.commands import SendAbandon, StartRank, StopRank
from elche_coordinator.core.messages.ids import Epoch, Rank, RoundId
from elche_coordinator.core.messages.reports import MembershipReport, Outcome
from elche_coordinator.core.records.machine import JobPhase
from elche_coordinator.core.records.round import Round
from elche_coordinator.simulator.collective import Fate
from support.disasters import deaths
from support.stories import at_phase, in_mid_training
from support.watched import AT_RANDOM, WatchedSimulation, ranks

THREE = (25.0, 30.0, 57.5)
POLICIES = [("cadence", "blocking"), ("cadence", "overlapped"), ("async", "overlapped"), ("sync", "blocking")]
by_policy = pytest.mark.parametrize(("policy", "averaging"), POLICIES)


def succeeds(simulation: WatchedSimulation) -> None:
    result = simulation.run(limit_s=simulation.clock.now_s + 3_000)
    assert result.outcome is Outcome.SUCCEEDED, result.error
    simulation.assert_exactly_once()
    assert sum(rank.batches for rank in result.ranks) == simulation.training.global_step
    assert sum(rank.num_samples for rank in simulation.job.ranks.values()) == sum(result.committed_samples)


@by_policy
def test_the_others_go_on_when_a_rank_dies_between_rounds(simulate, policy, averaging):
    simulation = simulate(ranks(*THREE), policy=policy, averaging=averaging, build_ms=10.0)
    in_mid_training(simulation)
    died_s, before = simulation.clock.now_s, len(simulation.rounds)
    simulation.kill(2)
    simulation.run_until(lambda: len(simulation.rounds) >= before + 2, limit_s=died_s + 3_000)
    assert {command.rank for command in simulation.sent(SendAbandon)} == {0, 1}
    lengths_s = [report.duration_s for report in simulation.rounds[2:before]]
    assert simulation.report_times_s[simulation.reports.index(simulation.rounds[before])] - died_s < max(lengths_s) + 1
    succeeds(simulation)


@by_policy
def test_a_rank_dies_before_the_first_group_stands(simulate, policy, averaging):
    """The first round's times were learned as those of all that had been ready: a bug in the coordinator."""
    simulation = simulate(ranks(*THREE), policy=policy, averaging=averaging, dataset_size=8000, build_ms=200.0)
    at_phase(simulation, JobPhase.GROUPING)
    simulation.kill(1)
    simulation.run_until(lambda: simulation.job.phase is JobPhase.TRAINING)
    assert list(simulation.training.members) == [0, 2]
    succeeds(simulation)
    assert [one.rank for one in simulation.sent(StartRank)] == [0, 1, 2, 1]


@by_policy
def test_a_rank_that_died_comes_back_with_the_others_model(simulate, policy, averaging):
    simulation = simulate(ranks(*THREE), policy=policy, averaging=averaging, dataset_size=8000)
    in_mid_training(simulation)
    simulation.kill(1)
    succeeds(simulation)
    assert [one.rank for one in simulation.sent(StartRank)] == [0, 1, 2, 1]
    record = simulation.job.ranks[1]
    assert record.earlier_batches > 0
    assert record.base_step > 5, "it has trained again"
    assert simulation.processes[1].parameters.version == simulation.training.version


def rounds_under_way(simulation: WatchedSimulation) -> bool:
    """Whether every member has entered a round whose result nobody has."""
    opened = simulation.generation.rounds
    return bool(opened) and len(opened[0].entered) == len(opened[0].targets) and not opened[0].results


def dies_as_a_round_ends(simulation: WatchedSimulation, rank: int, fates: Sequence[Fate]) -> Round:
    """Has the rank die in the open round, which then ends so for the others; returns the round."""
    opened, left = simulation.generation.rounds[0], iter(fates)

    def as_it_ends(round_id: RoundId) -> bool:
        if round_id == opened.id:
            simulation.kill(rank)
        return False

    simulation.collective.breaks = as_it_ends
    simulation.collective.fate = lambda: next(left, Fate.BLOCKS)
    return opened


@by_policy
@pytest.mark.parametrize(
    "fates", list(itertools.combinations_with_replacement(Fate, 2)), ids=lambda fates: "-".join(f.name for f in fates)
)
def test_a_rank_dies_in_a_round_that_ends_otherwise_for_each_of_the_others(simulate, policy, averaging, fates):
    """Whatever somebody has received commits, with the dead rank's part; else the round never was."""
    simulation = simulate(ranks(*THREE), policy=policy, averaging=averaging, sync_ms=20.0, build_ms=10.0)
    simulation.run_until(lambda: len(simulation.rounds) > 3 and rounds_under_way(simulation))
    opened = dies_as_a_round_ends(simulation, 2, fates)
    simulation.run_until(lambda: simulation.generation.abandoned is None and simulation.generation.id > 1)
    is_there = [report for report in simulation.rounds if report.round == opened.id]
    assert len(is_there) == (Fate.RECEIVES in fates)
    num_lacking = len(set(fates)) > 1 and Fate.RECEIVES in fates
    assert len(simulation.sent(StopRank)) == num_lacking
    succeeds(simulation)


def test_the_model_of_most_is_kept_when_a_round_ends_otherwise_for_some(simulate):
    """A round that one of three has received was told to nobody: it never was, and that one is started again."""
    simulation = simulate(ranks(*THREE, 40.0), sync_ms=20.0)
    simulation.run_until(lambda: len(simulation.rounds) > 3 and rounds_under_way(simulation))
    opened = dies_as_a_round_ends(simulation, 3, [Fate.RECEIVES, Fate.FAILS, Fate.FAILS])
    succeeds(simulation)
    assert opened.id not in [report.round for report in simulation.rounds]
    assert [command.rank for command in simulation.sent(StopRank)] == [0]


def test_the_job_fails_where_that_is_wanted(simulate):
    simulation = simulate(ranks(*THREE), on_rank_loss="fail")
    in_mid_training(simulation)
    simulation.kill(2)
    result = simulation.run()
    assert result.outcome is Outcome.FAILED
    assert "rank 2 on host (cpu) was killed by signal 9" in result.error


@by_policy
@pytest.mark.parametrize("apart_ms", [0.0, 15.0])
def test_two_ranks_die_shortly_after_each_other(simulate, policy, averaging, apart_ms):
    simulation = simulate(ranks(25.0, 30.0, 57.5, 40.0), policy=policy, averaging=averaging, build_ms=20.0)
    in_mid_training(simulation)
    simulation.kill(1)
    until_s = simulation.clock.now_s + apart_ms / 1000
    simulation.clock.at(until_s, lambda: simulation.kill(3))
    succeeds(simulation)


def test_watchers_are_told(simulate):
    simulation = simulate(ranks(*THREE), dataset_size=8000)
    in_mid_training(simulation)
    simulation.kill(1)
    succeeds(simulation)
    lost, back = [report for report in simulation.reports if isinstance(report, MembershipReport)]
    assert "rank 1 on host (cpu) was killed by signal 9" in lost.text
    assert (lost.rank, lost.num_ranks, lost.is_back) == (1, 2, False)
    assert back == MembershipReport(rank=1, text="rank 1 trains again on host (cpu)", num_ranks=3, is_back=True)
    assert simulation.job.roster.num_lost == 1


def test_a_dead_ranks_part_of_an_evaluation_is_made_again_with_the_next_result(simulate):
    simulation = simulate(ranks(*THREE), has_evaluation=True, eval_size=90, epochs=3, evaluation_ms=200.0)
    in_mid_training(simulation)
    simulation.run_until(lambda: simulation.training.evaluations.has(2))
    simulation.kill(2)
    succeeds(simulation)
    assert [report.epoch for report in simulation.evaluations] == [0, 1, 2]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_dies_at_the_very_end(simulate, rank):
    """While the last model is evaluated and saved: another does both."""
    simulation = simulate(ranks(*THREE), has_evaluation=True, eval_size=90, evaluation_ms=200.0)
    at_phase(simulation, JobPhase.FINISHING)
    simulation.kill(rank)
    succeeds(simulation)
    assert [report.is_final for report in simulation.evaluations] == [True]
    assert simulation.job.result.model


def test_a_checkpoint_whose_writer_dies_is_written_by_another(simulate):
    simulation = simulate(ranks(*THREE), checkpoint_every_epochs=1, epochs=3, checkpoint_ms=300.0)
    in_mid_training(simulation)
    simulation.run_until(lambda: not simulation.training.checkpoints.is_idle)
    (writer,) = {rank for rank, _ in simulation.training.checkpoints._writing.values()}
    simulation.kill(writer)
    succeeds(simulation)
    assert simulation.training.checkpoints.num_failures == 1
    assert len(simulation.job.result.checkpoints) >= 2


def test_finished_epochs_are_told_to_another_rank_when_rank_0_has_died(simulate):
    simulation = simulate(ranks(*THREE), wants_metrics=True, epochs=4)
    simulation.run_until(lambda: len(simulation.epochs) == 1)
    simulation.kill(0)
    succeeds(simulation)
    assert not simulation.training.epochs.unhandled


@by_policy
@pytest.mark.parametrize("seed", range(2))
def test_ranks_that_die_at_random(simulate, policy, averaging, seed):
    """Every sample is in the final model once, whoever dies when, as long as somebody is left."""
    simulation = simulate(
        ranks(25.0, 30.0, 57.5, 40.0), policy=policy, averaging=averaging, build_ms=15.0, sync_ms=10.0, seed=seed,
        dataset_size=3000, epochs=2, checkpoint_every_epochs=1, has_evaluation=True, eval_size=40, wants_metrics=True,
        **AT_RANDOM,
    )  # fmt: skip
    simulation.start()
    deaths(simulation, seed, every_s=0.7)
    succeeds(simulation)


def test_a_newcomer_without_a_batch_gets_the_slowest_ranks_share_of_an_evaluation(simulate):
    """Its speed is not known: as if it were fast, all would wait for it."""
    simulation = simulate(ranks(*THREE), has_evaluation=True, eval_size=90)
    in_mid_training(simulation)
    simulation.job.ranks[1].ms_per_batch = None
    training = simulation.training
    parts = training._begin_evaluation([Epoch(0)], training.members)
    assert parts[Rank(1)].size <= parts[Rank(2)].size + 1 < parts[Rank(0)].size
    simulation.training.evaluations.lose(Rank(1))


def test_a_recording_in_which_ranks_have_changed_is_refused(simulate):
    """It would be repeated with the moments of a rank that was another one then."""
    first = simulate(ranks(*THREE), dataset_size=8000)
    in_mid_training(first)
    first.kill(1)
    succeeds(first)
    again = simulate(ranks(*THREE), dataset_size=8000, replay=tuple(report.recorded for report in first.rounds))
    result = again.run()
    assert result.invalid
    number = [report.recorded.generation for report in first.rounds if report.samples].index(2)
    assert result.error.startswith(f"round {number} of the recording is the first after its ranks have changed")


def collective_fails(simulation: WatchedSimulation) -> None:
    """The next collective fails on a rank, though nobody has died; the others abandon their generation with it."""
    before = simulation.generation.id
    simulation.run_until(lambda: rounds_under_way(simulation))
    member = simulation.processes[Rank(1)]
    member.fail(*member._entry)
    simulation.run_until(lambda: simulation.job.phase is JobPhase.ENDED or simulation.generation.id > before)


def commits_a_round(simulation: WatchedSimulation) -> None:
    committed = len(simulation.rounds)
    simulation.run_until(lambda: len(simulation.rounds) > committed)


def test_a_group_that_breaks_now_and_then_is_formed_again_each_time(simulate):
    """More often than it may in a row: a committed round shows that it works."""
    simulation = simulate(ranks(*THREE), sync_ms=20.0, build_ms=10.0, dataset_size=20_000)
    in_mid_training(simulation)
    for _ in range(7):
        collective_fails(simulation)
        commits_a_round(simulation)
    assert simulation.generation.id == 8
    succeeds(simulation)


def test_a_group_that_breaks_again_and_again_fails_the_job(simulate):
    simulation = simulate(ranks(*THREE), sync_ms=20.0, build_ms=10.0, dataset_size=20_000)
    in_mid_training(simulation)
    for _ in range(5):
        collective_fails(simulation)
    result = simulation.job.result
    assert result is not None
    assert (result.outcome, result.error) == (
        Outcome.FAILED,
        "5 generations in a row were abandoned, the last one because a collective failed",
    )
