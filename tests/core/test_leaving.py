"""Ranks that leave: their work is committed, they exit by themselves, and they are started elsewhere."""

from dataclasses import replace
from random import Random

import pytest
from core.test_lost_ranks import THREE, by_policy, succeeds

from elche_coordinator.core.messages.commands import SendAbandon, SendEpochMetrics, SendShutdown, StartRank, StopRank
from elche_coordinator.core.messages.events import (
    AgentJoined,
    DrainRequested,
    EpochMetricsTaken,
    JobSubmitted,
    LeaveRequested,
)
from elche_coordinator.core.messages.ids import AgentId, JobId, Rank
from elche_coordinator.core.messages.reports import MembershipReport
from elche_coordinator.core.messages.spec import JobSpec, Slot
from elche_coordinator.core.records.machine import JobPhase, RankPhase
from support.disasters import deaths
from support.effort import lines_run
from support.stories import at_phase, in_mid_training
from support.watched import AT_RANDOM, WatchedSimulation, ranks


def on_two_hosts(simulation: WatchedSimulation) -> WatchedSimulation:
    """Rank 0 is alone on host b; the host named `host` has room for it too."""
    simulation.handle(AgentJoined(agent_id=AgentId("b"), host="b", slots=(Slot(device="cpu"),)))
    simulation.start()
    assert simulation.job.ranks[Rank(0)].host == "b"
    return simulation


def drain(simulation: WatchedSimulation, name: str, *, is_drained: bool = True) -> None:
    simulation.handle(DrainRequested(agent_id=AgentId(name), is_drained=is_drained))


@by_policy
def test_a_rank_of_a_drained_host_commits_its_work_and_goes_elsewhere(simulate, policy, averaging):
    simulation = simulate(ranks(*THREE), policy=policy, averaging=averaging, dataset_size=8000, build_ms=10.0)
    on_two_hosts(simulation)
    in_mid_training(simulation)
    drain(simulation, "b")
    simulation.run_until(lambda: simulation.sent(SendShutdown))
    (left,) = simulation.sent(SendShutdown)
    assert (left.rank, left.reason, left.outcome) == (0, "its slot on b is wanted", "")
    process = simulation.processes[0]
    num_lost = process.local_step - simulation.job.ranks[0].num_batches
    assert num_lost <= (4 if policy != "async" else 20), "nearly all that it has trained is committed"
    assert simulation.sent(SendAbandon) == [], "nobody's round is broken off"
    succeeds(simulation)
    assert [command.agent_id for command in simulation.sent(StartRank)] == ["b", "host", "host", "host"]
    gone, back = [report for report in simulation.reports if isinstance(report, MembershipReport)]
    assert gone.text == "rank 0 has left b (cpu), its work committed"
    assert back.text == "rank 0 trains again on host (cpu)"
    assert simulation.sent(StopRank) == []
    assert simulation.job.roster.num_lost == 0


@by_policy
def test_a_rank_that_is_to_end_commits_its_work_and_is_started_again(simulate, policy, averaging):
    simulation = simulate(ranks(*THREE), policy=policy, averaging=averaging, dataset_size=8000, build_ms=10.0)
    in_mid_training(simulation)
    simulation.handle(LeaveRequested(**simulation.processes[1].address))
    succeeds(simulation)
    assert [command.rank for command in simulation.sent(StartRank)] == [0, 1, 2, 1]
    assert simulation.sent(SendAbandon) == []
    assert simulation.job.roster.num_lost == 0


def test_a_finished_epoch_is_told_to_another_when_who_was_told_leaves(simulate):
    """It was told again to the rank that was let go, and the job waited for its callback without end."""
    simulation = simulate(ranks(*THREE), dataset_size=2000, epochs=4, wants_metrics=True)
    handle = simulation.handle

    def without_the_callback_of_rank_0(event):
        if not isinstance(event, EpochMetricsTaken) or event.rank != 0:
            handle(event)

    simulation.handle = without_the_callback_of_rank_0
    simulation.run_until(lambda: simulation.sent(SendEpochMetrics))
    handle(LeaveRequested(**simulation.processes[0].address))
    simulation.kill(2)  # their generation is abandoned, and rank 0 let go when that is done
    simulation.run_until(lambda: simulation.sent(SendShutdown))
    told = [command.rank for command in simulation.sent(SendEpochMetrics) if command.report.epoch == 0]
    assert told == [0, 1]
    simulation.handle = handle
    succeeds(simulation)


def test_the_only_rank_is_to_end(simulate):
    """What it has trained is in the checkpoint from which it goes on."""
    simulation = simulate(ranks(25.0), dataset_size=20_000)
    simulation.run_until(lambda: len(simulation.rounds) == 3)
    before = simulation.rounds[-1].version
    simulation.handle(LeaveRequested(**simulation.processes[0].address))
    simulation.run_until(lambda: simulation.job.attempt == 2 and simulation.job.phase is JobPhase.TRAINING)
    assert simulation.processes[0].parameters.version > before
    simulation.run()


def test_a_host_that_is_wanted_again_keeps_its_rank(simulate):
    simulation = on_two_hosts(simulate(ranks(*THREE), dataset_size=8000, build_ms=500.0))
    in_mid_training(simulation)
    drain(simulation, "b")
    drain(simulation, "b", is_drained=False)
    succeeds(simulation)
    assert [command.rank for command in simulation.sent(StartRank)] == [0, 1, 2]


def test_a_host_that_is_drained_already_changes_nothing_for_jobs_that_wait(simulate):
    """An agent that said without end that it leaves had all waiting jobs looked at each time: others waited for 2 s."""
    simulation = on_two_hosts(simulate(ranks(*THREE), dataset_size=8000))
    in_mid_training(simulation)
    spec = JobSpec(name="job", source_hash="", file_name="job.py", num_ranks=9)
    for number in range(30):
        more = replace(spec, conditions=(f"host=no{number}",))
        simulation.handle(JobSubmitted(job_id=JobId(str(number)), spec=more, submitted_at=1.0))
    drain(simulation, "b")
    again = lines_run(lambda: drain(simulation, "b"))
    back = lines_run(lambda: drain(simulation, "b", is_drained=False))
    assert again < back / 2, (again, back)


def test_where_nobody_would_stay_a_checkpoint_is_made_and_the_job_waits(simulate):
    simulation = simulate(ranks(*THREE), dataset_size=8000)
    in_mid_training(simulation)
    drain(simulation, "host")
    simulation.run_until(lambda: simulation.job.phase is JobPhase.QUEUED and not simulation.core.fleet.taken)
    (saved,) = simulation.saved.values()
    version, committed = simulation.rounds[-1].version, sum(report.samples for report in simulation.rounds)
    assert saved.parameters.version >= version - 2, "hardly any work is made again"
    assert committed > 0
    simulation.handle(AgentJoined(agent_id=AgentId("c"), host="c", slots=(Slot(device="cpu"),) * 3))
    goes_on(simulation)
    assert simulation.job.attempt == 2


def test_who_has_the_model_stays_until_a_newcomer_has_got_it(simulate):
    simulation = on_two_hosts(simulate(ranks(*THREE), dataset_size=8000, build_ms=300.0))
    in_mid_training(simulation)
    simulation.kill(0)
    simulation.run_until(lambda: simulation.job.run.membership.forming is not None and simulation.processes[0].is_alive)
    drain(simulation, "host")
    simulation.run_until(lambda: len(simulation.sent(SendShutdown)) == 2)
    assert simulation.job.ranks[Rank(0)].has_model
    assert list(simulation.generation.members) == [0]
    succeeds(simulation)
    assert simulation.job.attempt == 1


def test_who_has_loaded_the_checkpoint_stays_until_a_newcomer_has_got_the_model(simulate):
    """Before an attempt's first round nobody has made one, and a newcomer was started without the checkpoint."""
    simulation = simulate(ranks(*THREE), dataset_size=8000)
    in_mid_training(simulation)
    drain(simulation, "host")
    simulation.run_until(lambda: simulation.job.phase is JobPhase.QUEUED and not simulation.core.fleet.taken)
    for name, num_slots in (("c", 2), ("d", 3)):
        simulation.handle(AgentJoined(agent_id=AgentId(name), host=name, slots=(Slot(device="cpu"),) * num_slots))
    at_phase(simulation, JobPhase.TRAINING)
    (newcomer,) = (record.rank for record in simulation.job.ranks.values() if record.host == "d")
    slow = next(rank for rank in simulation.job.ranks if rank != newcomer)
    simulation.freeze(newcomer)
    drain(simulation, "c")
    simulation.run_until(lambda: simulation.job.ranks[newcomer].is_done_without)
    simulation.freeze(slow)
    simulation.thaw(newcomer)
    simulation.run_until(lambda: simulation.job.ranks[newcomer].phase is RankPhase.READY)
    assert simulation.training.started is None
    simulation.thaw(slow)
    goes_on(simulation)
    assert simulation.job.attempt == 2


def goes_on(simulation: WatchedSimulation) -> None:
    result = simulation.run(limit_s=simulation.clock.now_s + 3_000)
    assert result.outcome == "succeeded", result.error
    simulation.assert_exactly_once()


def test_drained_while_it_loads_the_file_a_job_waits_however_often(simulate):
    """Nobody has died: these attempts do not count."""
    simulation = simulate(ranks(*THREE), dataset_size=2000, latency_ms=20.0)
    simulation.start()
    for _ in range(6):
        simulation.run_until(lambda: simulation.job.phase is JobPhase.STARTING)
        drain(simulation, "host")
        simulation.run_until(lambda: simulation.job.phase is JobPhase.QUEUED and not simulation.core.fleet.taken)
        drain(simulation, "host", is_drained=False)
    goes_on(simulation)


@by_policy
@pytest.mark.parametrize("seed", range(1))
def test_hosts_that_are_drained_while_ranks_die(simulate, policy, averaging, seed):
    simulation = simulate(
        ranks(25.0, 30.0, 57.5, 40.0), policy=policy, averaging=averaging, build_ms=15.0, sync_ms=10.0, seed=seed,
        dataset_size=5000, epochs=2, checkpoint_every_epochs=1, has_evaluation=True, eval_size=40, wants_metrics=True,
        **AT_RANDOM,
    )  # fmt: skip
    for name in "bcd":
        simulation.handle(AgentJoined(agent_id=AgentId(name), host=name, slots=(Slot(device="cpu"),) * 2))
    simulation.start()
    deaths(simulation, seed, every_s=2.0)
    random = Random(seed)

    def strike() -> None:
        if simulation.job.result is None:
            name = random.choice(["b", "c", "d"])
            drain(simulation, name)
            simulation.clock.after(random.uniform(0.0, 2.0), lambda: drain(simulation, name, is_drained=False))
            simulation.clock.after(random.expovariate(1.0), strike)

    simulation.clock.after(1.0, strike)
    goes_on(simulation)


def test_who_leaves_need_not_wait_for_the_next_round(simulate):
    """The open round is made within about a batch of the slowest, without those who leave none is open after it."""
    simulation = simulate(ranks(25.0, 30.0, 57.5), dataset_size=60_000, anchor=60, build_ms=10.0)
    in_mid_training(simulation)
    before = len(simulation.rounds)
    simulation.run_until(lambda: len(simulation.rounds) > before and bool(simulation.generation.rounds))
    now_s = simulation.clock.now_s
    leaving = simulation.processes[Rank(1)]
    simulation.handle(LeaveRequested(**leaving.address))
    simulation.run_until(lambda: not leaving.is_alive)
    assert simulation.clock.now_s - now_s < 0.5, "a round lasts 3.5 s"
    succeeds(simulation)
