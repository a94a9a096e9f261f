"""Ranks that hang or are stopped: the others go on without them, as soon as waiting costs more than their loss."""

from random import Random

import pytest
from core.test_lost_ranks import POLICIES, THREE, by_policy, rounds_under_way, succeeds

from elche_coordinator.core.describe import describe_training
from elche_coordinator.core.life.hangs import Duty, HangWatch
from elche_coordinator.core.messages.commands import SendAbandon, SendPing, StartRank, StopRank
from elche_coordinator.core.messages.events import BatchesTrained, PauseRequested, RankFailed
from elche_coordinator.core.messages.ids import Rank
from elche_coordinator.core.messages.reports import MembershipReport, Outcome
from elche_coordinator.core.records.machine import JobPhase
from elche_coordinator.simulator.simulation import JOB, RankModel
from support.disasters import deaths
from support.stories import at_phase, in_mid_training
from support.watched import AT_RANDOM, WatchedSimulation, ranks


def lost(simulation: WatchedSimulation) -> list[MembershipReport]:
    return [report for report in simulation.reports if isinstance(report, MembershipReport) and not report.is_back]


def passes(simulation: WatchedSimulation, duration_s: float) -> None:
    until_s = simulation.clock.now_s + duration_s
    simulation.clock.at(until_s, lambda: None)
    simulation.run_until(lambda: simulation.clock.now_s >= until_s)


def num_back(simulation: WatchedSimulation) -> int:
    return sum(isinstance(report, MembershipReport) and report.is_back for report in simulation.reports)


def pause(simulation: WatchedSimulation, *, is_paused: bool) -> None:
    simulation.handle(PauseRequested(job_id=JOB, is_paused=is_paused))


def is_left_out(simulation: WatchedSimulation) -> bool:
    return bool(lost(simulation))


@by_policy
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.long(reason="another rank")), 2])
def test_a_stopped_rank_is_left_out_and_comes_back_when_it_continues(simulate, policy, averaging, rank):
    size = 9_000 if policy == "sync" else 45_000
    simulation = simulate(ranks(*THREE), policy=policy, averaging=averaging, dataset_size=size, build_ms=10.0)
    in_mid_training(simulation)
    stopped_s = simulation.clock.now_s
    simulation.freeze(rank)
    simulation.run_until(lambda: is_left_out(simulation), limit_s=stopped_s + 20)
    limit_s = 12.0 if policy == "async" else 3.0  # under async nobody waits before the epoch ends
    assert simulation.clock.now_s - stopped_s < limit_s, "25 to 57 ms a batch"
    (report,) = lost(simulation)
    assert report.text.startswith(f"rank {rank} on host (cpu) is left out: it has not answered for ")
    assert report.text.endswith(", and others wait for it")
    assert simulation.sent(StopRank)[-1].waits_while_stopped
    before = len(simulation.rounds)
    simulation.run_until(lambda: len(simulation.rounds) > before + 5)
    assert describe_training(simulation.job, simulation.clock.now_s).ranks[rank].state == "leaving"
    assert simulation.processes[rank].is_alive, "who has stopped it may look at it"
    simulation.thaw(rank)
    succeeds(simulation)
    assert [command.rank for command in simulation.sent(StartRank)] == [0, 1, 2, rank]
    assert [report.is_back for report in simulation.reports if isinstance(report, MembershipReport)] == [False, True]
    assert simulation.job.roster.num_lost == 1


def test_a_rank_that_is_stopped_again_and_again_is_left_out_as_soon(simulate):
    """Somebody has stopped it: that says nothing of how long its own pauses are."""
    simulation = simulate(ranks(*THREE), dataset_size=20_000)
    in_mid_training(simulation)
    for number in range(2):
        stopped_s = simulation.clock.now_s
        simulation.freeze(1)
        simulation.run_until(lambda number=number: len(lost(simulation)) > number, limit_s=stopped_s + 20)
        assert simulation.clock.now_s - stopped_s < 3.0
        passes(simulation, 1.0)
        simulation.thaw(1)
        simulation.run_until(lambda number=number: num_back(simulation) > number)
        passes(simulation, 3.0)
    succeeds(simulation)


@pytest.mark.parametrize("seed", range(2))
def test_to_wait_for_a_stopped_rank_is_no_pause_of_ones_own(simulate, seed):
    """Whenever ranks are stopped, within a collective, too: those that wait for them are left out as soon in turn."""
    simulation = simulate(ranks(25.0, 25.0, 25.0), dataset_size=50_000, sync_ms=30.0, build_ms=10.0, seed=seed)
    in_mid_training(simulation)
    random = Random(seed)
    for number in range(6):
        passes(simulation, random.uniform(1.0, 2.0))
        rank = Rank(number % 3)
        others = [record for record in simulation.job.ranks.values() if record.rank != rank]
        simulation.freeze(rank)
        simulation.run_until(lambda others=others: not any(map(simulation.job.has_batch_due, others)))
        from_s = simulation.clock.now_s
        simulation.run_until(lambda number=number: len(lost(simulation)) > number, limit_s=from_s + 20)
        assert simulation.clock.now_s - from_s < 3.0, f"stop {number}"
        passes(simulation, 1.0)
        simulation.thaw(rank)
        simulation.run_until(lambda number=number: num_back(simulation) > number)
    succeeds(simulation)


@by_policy
def test_a_rank_is_stopped_within_a_collective(simulate, policy, averaging):
    """Its peers hang with it. They answer, and it does not: so it is known who is to be left out."""
    simulation = simulate(ranks(*THREE), policy=policy, averaging=averaging, sync_ms=20.0)
    simulation.run_until(lambda: len(simulation.rounds) > 3 and rounds_under_way(simulation))
    stopped_s = simulation.clock.now_s
    simulation.freeze(1)
    simulation.run_until(lambda: is_left_out(simulation), limit_s=stopped_s + 10)
    assert simulation.clock.now_s - stopped_s < 3.0
    assert [report.rank for report in lost(simulation)] == [1]
    simulation.run_until(lambda: simulation.generation.abandoned is None and simulation.generation.id > 1)
    simulation.thaw(1)
    succeeds(simulation)


def test_a_step_that_never_returns_is_left_out(simulate):
    """The process answers, and makes no batch: its agent is to end it, and it is started again."""
    hanging = RankModel(batch_ms=25.0, changes=((2.0, 1e6), (2.5, 25.0)))
    simulation = simulate([RankModel(batch_ms=25.0), hanging, RankModel(batch_ms=30.0)], dataset_size=20_000)
    simulation.run_until(lambda: is_left_out(simulation), limit_s=9.0)
    assert simulation.clock.now_s - 2.0 < 4.5
    (report,) = lost(simulation)
    assert report.text.startswith("rank 1 on host (cpu) is left out: it has made no batch for ")
    succeeds(simulation)
    assert [command.rank for command in simulation.sent(StartRank)] == [0, 1, 2, 1]


def test_a_question_that_was_lost_with_a_connection_is_asked_again(simulate):
    """It counted as asked ever after, so that a rank which made a long batch later was left out, without a question."""
    hanging = RankModel(batch_ms=25.0, changes=((6.0, 1e6), (6.5, 25.0)))
    simulation = simulate([RankModel(batch_ms=25.0), hanging, RankModel(batch_ms=30.0)], dataset_size=20_000)
    simulation.clock.at(2.0, lambda: simulation.cut_off(1, 1.2))
    simulation.run_until(lambda: simulation.clock.now_s > 5.9)
    assert simulation.sent(SendPing)
    assert lost(simulation) == []
    simulation.run_until(lambda: is_left_out(simulation), limit_s=14.0)
    assert lost(simulation)[0].text.startswith("rank 1 on host (cpu) is left out: it has made no batch for ")
    succeeds(simulation)


def test_a_pause_that_a_rank_has_made_before_is_no_hang(simulate):
    """A second recompilation, or collection of garbage, as long as the first: at most the first is taken for a hang."""
    pausing = RankModel(batch_ms=25.0, changes=((5.0, 6000.0), (5.1, 25.0), (30.0, 6000.0), (30.1, 25.0)))
    simulation = simulate([RankModel(batch_ms=25.0), pausing], dataset_size=100_000)
    succeeds(simulation)
    assert len(lost(simulation)) <= 1
    assert simulation.clock.now_s > 40


def test_slow_ranks_are_never_left_out(simulate):
    """Two minutes a batch beside 5 ms: all wait for the slow one, which answers."""
    for batch_ms in ((5.0, 120_000.0), (5.0, 5.0, 300.0)):
        simulation = simulate(ranks(*batch_ms), dataset_size=2000, epochs=1)
        assert simulation.run().outcome is Outcome.SUCCEEDED
        assert lost(simulation) == []


def test_a_first_batch_that_compiles_is_waited_for(simulate):
    """There is no history; it answers."""
    compiling = RankModel(batch_ms=90_000.0, changes=((1.0, 25.0),))
    simulation = simulate([RankModel(batch_ms=25.0), compiling], dataset_size=3000)
    succeeds(simulation)
    assert lost(simulation) == []


def test_nobody_is_left_out_in_a_pause(simulate):
    simulation = simulate(ranks(*THREE))
    in_mid_training(simulation)
    pause(simulation, is_paused=True)
    simulation.freeze(1)
    until_s = simulation.clock.now_s + 60
    simulation.clock.at(until_s, lambda: None)
    simulation.run_until(lambda: simulation.clock.now_s >= until_s)
    assert lost(simulation) == []
    simulation.thaw(1)
    pause(simulation, is_paused=False)
    succeeds(simulation)


def last_is_stopped(simulation: WatchedSimulation, after_s: float, for_s: float) -> None:
    """After so many seconds of training rank 0 is left out, and started again; meanwhile rank 1 is stopped."""
    passes(simulation, after_s)
    simulation.freeze(0)
    simulation.run_until(lambda: is_left_out(simulation))
    simulation.freeze(1)
    simulation.thaw(0)
    simulation.clock.after(for_s, lambda: simulation.thaw(1))


@pytest.mark.parametrize(("after_s", "for_s"), [(2.0, 9.0), (80.0, 60.0)])
def test_the_last_rank_with_the_model_is_waited_for(simulate, after_s, for_s):
    """It has what nobody else has. It is asked, shown as stalled, and goes on when it continues."""
    simulation = simulate(ranks(250.0, 300.0), dataset_size=12_000)
    last_is_stopped(simulation, after_s, for_s)
    succeeds(simulation)
    assert [report.rank for report in lost(simulation)] == [0]
    assert simulation.job.attempt == 1


@pytest.mark.parametrize("saves", [False, True])
def test_the_last_rank_with_the_model_is_waited_for_as_long_as_its_loss_costs(simulate, saves):
    """Rank 0 is ready to train with it, and nobody lets it continue: the job goes back, as if it had died."""
    simulation = simulate(ranks(250.0, 300.0), dataset_size=12_000, checkpoint_every_minutes=0.3 if saves else None)
    last_is_stopped(simulation, 80.0, 10_000.0)
    stopped_s = simulation.clock.now_s
    simulation.run_until(lambda: simulation.job.attempt == 2 or simulation.job.phase is JobPhase.QUEUED)
    where = "checkpoint simulated/checkpoints" if saves else "its start"
    assert lost(simulation)[-1].text.endswith(f"and others wait for it; the job goes back to {where}")
    waited_s = simulation.clock.now_s - stopped_s
    assert 10 <= waited_s < 20 if saves else 80 <= waited_s < 90
    result = simulation.run(limit_s=stopped_s + 3_000)
    assert result.outcome is Outcome.SUCCEEDED, result.error
    simulation.assert_exactly_once()


def test_for_the_last_rank_with_the_model_nobody_waits_in_a_pause(simulate):
    simulation = simulate(ranks(25.0, 30.0), dataset_size=30_000)
    last_is_stopped(simulation, 2.0, 100.0)
    pause(simulation, is_paused=True)
    passes(simulation, 100.0)
    pause(simulation, is_paused=False)
    succeeds(simulation)
    assert simulation.job.attempt == 1


def test_where_the_last_rank_must_not_be_lost_it_is_waited_for(simulate):
    simulation = simulate(ranks(25.0, 30.0), dataset_size=30_000, on_rank_loss="fail")
    passes(simulation, 2.0)
    simulation.freeze(1)
    simulation.clock.after(60.0, lambda: simulation.thaw(1))
    succeeds(simulation)
    assert lost(simulation) == []


def test_nobody_is_left_out_while_the_others_have_work(simulate):
    """It is silent for longer than its history explains, and costs nobody anything yet: it may come back in time."""
    simulation = simulate(ranks(25.0, 30.0), anchor=600, max_anchor=600, dataset_size=60_000)
    simulation.run_until(lambda: len(simulation.rounds) >= 3)
    silent_from_s = simulation.clock.now_s + 1.0
    simulation.clock.at(silent_from_s, lambda: simulation.freeze(1))
    simulation.clock.at(silent_from_s + 4.0, lambda: simulation.thaw(1))
    simulation.run_until(lambda: len(simulation.rounds) >= 5)
    assert lost(simulation) == []


def test_what_a_rank_that_was_left_out_still_says_is_refused(simulate):
    simulation = simulate(ranks(*THREE), dataset_size=20_000)
    in_mid_training(simulation)
    simulation.freeze(1)
    simulation.run_until(lambda: is_left_out(simulation))
    address = simulation.processes[1].address
    simulation.says_nothing(RankFailed(**address, error="it woke up amid strangers"))
    simulation.says_nothing(BatchesTrained(**address, local_step=10_000, num_processed=100_000, batch_ms=(1.0,)))
    simulation.thaw(1)
    succeeds(simulation)


def test_a_slow_disk_is_no_hang(simulate):
    """Leases and questions wait for records: ranks that got none of them do not hang."""
    simulation = simulate(ranks(*THREE), persist_ms=4000.0, dataset_size=1000)
    succeeds(simulation)
    assert lost(simulation) == []


def test_a_question_counts_from_when_it_has_left():
    """It may have waited for the disk."""
    watch, duties = HangWatch(), {Rank(0): Duty(), Rank(1): Duty()}
    for rank in duties:
        watch.on_message(rank, 0.0)
    assert watch.check(duties, 1.0)[0] == [0, 1]
    watch.on_asked(Rank(0), 1.0)
    watch.on_answered(Rank(0), 1.0)
    assert watch.check(duties, 4.0)[1] == {}
    watch.on_asked(Rank(1), 4.0)
    assert watch.check(duties, 6.0)[1].keys() == {1}


def test_who_answers_and_cannot_train_waits_for_the_one_that_does_not_answer():
    """Its device waits for a collective with a stopped rank: it was left out itself, since its batches are shorter."""
    watch, duties = HangWatch(), {Rank(0): Duty(is_busy=True, hang_s=1.0), Rank(1): Duty(is_busy=True, hang_s=3.0)}
    left_out: dict[Rank, str] = {}
    for tenths in range(100):
        asked, left_out, _ = watch.check(duties, tenths / 10)
        for rank in asked:
            watch.on_asked(rank, tenths / 10)
            if rank == 0:
                watch.on_answered(rank, tenths / 10)
        if left_out:
            break
    assert left_out == {1: "it has not answered for 1.5 s"}


@pytest.mark.parametrize(("due_s", "left_out_s"), [(None, 8.0), (1.0, 2.9), (100.0, 8.0)])
def test_who_trains_on_only_because_a_rank_is_late_counts_as_waiting(due_s, left_out_s):
    """A rank that hung was left out only when the others had no more work. What they do meanwhile is in no round."""
    watch = HangWatch()
    duties = {
        Rank(0): Duty(is_busy=True, hang_s=2.0, due_s=due_s and due_s + 99),
        Rank(1): Duty(is_busy=True, hang_s=2.0, cost_s=1.0, due_s=due_s),
    }
    watch.on_message(Rank(1), 0.0)
    for tenths in range(100):
        watch.on_message(Rank(0), tenths / 10)
        asked, left_out, _ = watch.check(duties, tenths / 10)
        for rank in asked:
            watch.on_asked(rank, tenths / 10)
        if left_out:
            break
    assert (list(left_out), tenths / 10) == ([1], left_out_s)


def test_a_rank_that_is_late_does_not_wait_for_itself():
    watch, duties = HangWatch(), {Rank(0): Duty(is_busy=True, hang_s=5.0, due_s=1.0)}
    watch.check(duties, 0.0)
    assert watch.check(duties, 3.0) == ([], {}, None)


def test_one_slow_answer_is_forgotten():
    """A process that was stopped for two seconds is waited for four times as long next, and soon no longer."""
    watch, duties = HangWatch(), {Rank(0): Duty(), Rank(1): Duty()}

    def mute_s(at_s: float) -> float:
        """How long it may be silent from here on."""
        for rank in duties:
            watch.on_message(rank, at_s)
        watch.check(duties, at_s + 1.0)
        for rank in duties:
            watch.on_asked(rank, at_s + 1.0)
        watch.on_answered(Rank(0), at_s + 1.0)
        return next(tenths / 10 for tenths in range(10, 200) if watch.check(duties, at_s + tenths / 10)[1])

    assert mute_s(0.0) == 2.5
    watch.on_answered(Rank(1), 3.0)
    assert mute_s(100.0) == 9.0, "four times 2 s, from the question on"
    for at_s in range(200, 205):
        watch.on_message(Rank(1), at_s)
        watch.check(duties, at_s + 0.6)
        watch.on_asked(Rank(1), at_s + 0.6)
        watch.on_answered(Rank(1), at_s + 0.6)
    assert mute_s(300.0) == 2.5


def test_a_coordinator_that_was_stopped_blames_nobody(simulate):
    """What ranks have said meanwhile is still to be read when the first deadline fires: here an answer, for one."""
    slower = RankModel(batch_ms=25.0, changes=((3.0, 900.0),))
    simulation = simulate([*ranks(25.0, 25.0), slower], dataset_size=20_000)
    simulation.run_until(lambda: simulation.training.started is not None if simulation.job.run.training else False)
    simulation.run_until(lambda: simulation.job.silence.hangs._asked_s.get(2) is not None)
    simulation.sleep(30.0)
    succeeds(simulation)
    assert lost(simulation) == []


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_is_stopped_at_the_very_end(simulate, rank):
    simulation = simulate(ranks(*THREE), has_evaluation=True, eval_size=90, evaluation_ms=200.0)
    at_phase(simulation, JobPhase.FINISHING)
    simulation.freeze(rank)
    succeeds(simulation)


def test_a_rank_is_stopped_while_a_group_is_built(simulate):
    simulation = simulate(ranks(*THREE), build_ms=200.0)
    in_mid_training(simulation)
    simulation.kill(0)
    simulation.run_until(lambda: simulation.job.run.membership.forming is not None)
    simulation.freeze(1)
    succeeds(simulation)
    assert [report.rank for report in lost(simulation)][:2] == [0, 1]


def test_ranks_are_asked_only_while_others_wait(simulate):
    simulation = simulate(ranks(*THREE), dataset_size=3000)
    succeeds(simulation)
    assert simulation.sent(SendPing) == []
    assert simulation.sent(SendAbandon) == []


@pytest.mark.parametrize(("policy", "averaging"), POLICIES)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long(reason="another seed"))])
def test_ranks_that_die_and_stop_at_random(simulate, policy, averaging, seed):
    """Every sample is in the final model once, whoever dies, stops and continues when."""
    simulation = simulate(
        ranks(25.0, 30.0, 57.5, 40.0), policy=policy, averaging=averaging, build_ms=15.0, sync_ms=10.0, seed=seed,
        dataset_size=8000, epochs=2, checkpoint_every_epochs=1, has_evaluation=True, eval_size=40, wants_metrics=True,
        **AT_RANDOM,
    )  # fmt: skip
    simulation.start()
    deaths(simulation, seed, every_s=3.0)
    freezes(simulation, seed, every_s=4.0)
    succeeds(simulation)


def freezes(simulation: WatchedSimulation, seed: int, *, every_s: float) -> None:
    """Stops a rank now and then for up to ten seconds, but leaves one that has the model."""
    random = Random(seed + 1)

    def strike() -> None:
        job = simulation.job
        if job.result is not None:
            return
        running = [rank for rank, one in simulation.processes.items() if one.is_alive and not one.is_frozen]
        with_model = [rank for rank in running if job.ranks[rank].is_present and job.ranks[rank].has_model]
        if job.phase is JobPhase.TRAINING and len(with_model) > 2:
            process = simulation.processes[random.choice(running)]
            process.clock.freeze()
            simulation.clock.after(random.uniform(0.1, 10.0), process.clock.thaw)
        simulation.clock.after(random.expovariate(1 / every_s), strike)

    simulation.clock.after(random.expovariate(1 / every_s), strike)
