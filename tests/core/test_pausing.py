"""A job that is paused stops at a round, waits as long as it is asked to, and goes on as if nothing had been."""

import pytest

from elche.policies import POLICIES
from elche.settings import AgreedSettings
from elche_coordinator.core.describe import describe_training
from elche_coordinator.core.messages.commands import SendThrottle
from elche_coordinator.core.messages.events import (
    DrainRequested,
    JobCancelled,
    JobSubmitted,
    PauseRequested,
    RoundEntered,
)
from elche_coordinator.core.messages.ids import AgentId, JobId
from elche_coordinator.core.messages.reports import Outcome
from elche_coordinator.core.messages.spec import JobSpec, Slot
from elche_coordinator.core.records.fleet import AgentRecord, Fleet
from elche_coordinator.core.records.machine import JobPhase
from support.watched import WatchedSimulation, ranks

JOB = JobId("job")
LONG_S = 1000.0
WAYS = [{"policy": policy, "averaging": averaging} for policy in POLICIES for averaging in ("blocking", "overlapped")]


def pause(simulation, *, is_paused=True):
    simulation.handle(PauseRequested(job_id=JOB, is_paused=is_paused))


def pass_time(simulation, seconds):
    end_s = simulation.clock.now_s + seconds
    simulation.clock.at(end_s, lambda: None)
    simulation.run_until(lambda: simulation.clock.now_s >= end_s)


def at_round(simulation, number):
    simulation.run_until(lambda: len(simulation.rounds) >= number)


def until_both_average(simulation):
    num_entered = len(simulation.events(RoundEntered)) + 2
    simulation.run_until(lambda: len(simulation.events(RoundEntered)) == num_entered)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: " ".join(way.values()))
@pytest.mark.parametrize("number", [1, 4])
@pytest.mark.parametrize("more", [{}, {"max_batch_diff": 3}], ids=["", "max_batch_diff"])
def test_a_paused_job_stands_still_and_goes_on(simulate, way, number, more):
    simulation = simulate(ranks(5, 11.5), **way, **more, epochs=2)
    at_round(simulation, number)
    pass_time(simulation, 0.02)
    pause(simulation)
    pass_time(simulation, 5.0)
    stood = [process.local_step for process in simulation.processes.values()]
    assert describe_training(simulation.job, 0.0).state == "paused"
    assert simulation.generation.rounds == [], "no rank waits in a round for one that stands"
    pass_time(simulation, LONG_S)
    assert [process.local_step for process in simulation.processes.values()] == stood
    pause(simulation, is_paused=False)
    assert simulation.run().outcome is Outcome.SUCCEEDED
    assert LONG_S < simulation.clock.now_s < LONG_S + 60


@pytest.mark.parametrize("way", WAYS, ids=lambda way: " ".join(way.values()))
def test_paused_again_and_again_every_sample_counts_once(simulate, way):
    simulation = simulate(ranks(5, 11.5, jitter=0.2), **way, epochs=2)
    at_round(simulation, 1)
    for index in range(40):
        pause(simulation, is_paused=index % 2 == 0)
        pass_time(simulation, 0.05)
    pause(simulation, is_paused=False)
    assert simulation.run().outcome is Outcome.SUCCEEDED


def test_paused_ranks_stop_at_the_last_round_whatever_their_limit_is(simulate):
    """Reports that come during the pause raise the limit of those that have a `max_batch_diff`."""
    simulation = simulate(ranks(5, 11.5), averaging="blocking", max_batch_diff=3)
    at_round(simulation, 3)
    pause(simulation)
    pass_time(simulation, 5.0)
    for rank, record in simulation.job.ranks.items():
        assert simulation.processes[rank].local_step == record.base_step
    pause(simulation, is_paused=False)
    assert simulation.run().outcome is Outcome.SUCCEEDED


@pytest.mark.parametrize("averaging", ["blocking", "overlapped"])
def test_a_pause_while_ranks_average_takes_no_step_from_them_for_good(simulate, averaging):
    """They are told to stop short of a limit that they were told before, and that the next one may not exceed."""
    simulation = simulate(ranks(5, 5), averaging=averaging, max_batch_diff=2, sync_ms=30.0)
    at_round(simulation, 2)
    for _ in range(3):
        until_both_average(simulation)
        pause(simulation)
        pass_time(simulation, 0.1)
        pause(simulation, is_paused=False)
    assert simulation.run().outcome is Outcome.SUCCEEDED


def test_while_a_rank_waits_in_the_round_the_others_still_come(simulate):
    simulation = simulate(ranks(5, 50), averaging="blocking")
    at_round(simulation, 2)
    known = len(simulation.events(RoundEntered))
    simulation.run_until(lambda: len(simulation.events(RoundEntered)) == known + 1)
    before = len(simulation.rounds)
    pause(simulation)
    pass_time(simulation, 10.0)
    assert len(simulation.rounds) == before + 1
    pause(simulation, is_paused=False)
    assert simulation.run().outcome is Outcome.SUCCEEDED


def test_a_paused_job_can_be_cancelled(simulate):
    simulation = simulate(ranks(5, 11.5))
    at_round(simulation, 2)
    pause(simulation)
    pass_time(simulation, 10.0)
    simulation.handle(JobCancelled(job_id=JOB))
    assert simulation.run().outcome is Outcome.CANCELLED


def test_pausing_twice_and_what_does_not_train_changes_nothing(simulate):
    simulation = simulate(ranks(5, 11.5))
    simulation.start()
    simulation.says_nothing(PauseRequested(job_id=JOB, is_paused=True))
    at_round(simulation, 2)
    simulation.says_nothing(PauseRequested(job_id=JOB, is_paused=False))
    pause(simulation)
    sent = len(simulation.sent(SendThrottle))
    simulation.says_nothing(PauseRequested(job_id=JOB, is_paused=True))
    assert len(simulation.sent(SendThrottle)) == sent
    pause(simulation, is_paused=False)
    assert simulation.run().outcome is Outcome.SUCCEEDED
    simulation.says_nothing(PauseRequested(job_id=JOB, is_paused=True))


def test_a_drained_host_gets_no_more_ranks(simulate):
    fleet = Fleet()
    for name in "ab":
        fleet.join(AgentId(name), AgentRecord(host=name, slots=(Slot(device="cpu"),) * 2))
    assert len(fleet.take(JOB, JobSpec(name="job", source_hash="", file_name="", num_ranks=1), 1)) == 1
    fleet.drain(AgentId("a"), is_drained=True)
    assert {place.agent_id for place in fleet.free_places()} == {"b"}
    assert len(fleet.taken) == 1
    fleet.drain(AgentId("a"), is_drained=False)
    assert len(fleet.free_places()) == 3
    fleet.drain(AgentId("nobody"), is_drained=True)


def test_a_queued_job_waits_while_the_host_is_drained():
    settings = AgreedSettings(dataset_size=300, batch_size=10, epochs=1, policy="cadence")
    simulation = WatchedSimulation(settings=settings, ranks=ranks(5, 5))
    simulation.start()
    host = AgentId("host")
    assert simulation.run().outcome is Outcome.SUCCEEDED
    simulation.handle(DrainRequested(agent_id=host, is_drained=True))
    second = JobSubmitted(job_id=JobId("second"), spec=simulation.job.spec, submitted_at=0.0)
    simulation.handle(second)
    assert simulation.core.jobs[JobId("second")].phase is JobPhase.QUEUED
    simulation.handle(DrainRequested(agent_id=host, is_drained=False))
    assert simulation.core.jobs[JobId("second")].phase is JobPhase.STARTING


@pytest.mark.parametrize("way", WAYS, ids=lambda way: " ".join(way.values()))
def test_patience_that_ends_while_paused_ends_the_job_when_it_goes_on(simulate, way):
    """The round that ends the second epoch is open when the pause comes, and its evaluation decides that it is over."""
    options = {"has_evaluation": True, "monitor": "m", "patience": 1, "epochs": 6, "dataset_size": 300}
    simulation = simulate(ranks(5, 11.5), **way, **options, evaluate=lambda epoch: {"m": 1.0})
    simulation.run_until(lambda: len(simulation.epochs) >= 1)
    ledger = simulation.training.ledger
    simulation.run_until(lambda: ledger.committed_samples(1) + open_samples(ledger) >= 280)
    pause(simulation)
    pass_time(simulation, LONG_S)
    assert simulation.training.ended_early
    leased = (lease.epoch for leases in ledger.rank_leases.values() for lease in leases.leases)
    begun = max(3, 1 + max(leased, default=0))
    pause(simulation, is_paused=False)
    result = simulation.run(limit_s=2 * LONG_S)
    assert result.outcome is Outcome.SUCCEEDED
    assert result.epochs <= begun < 6, "what is leased by then is trained, and no other epoch is begun"


def open_samples(ledger):
    return sum(max(0, leases.processed - leases.committed) for leases in ledger.rank_leases.values())


def test_a_pause_before_the_first_round_takes_effect_with_it(simulate):
    simulation = simulate(ranks(5, 11.5), sync_ms=500)
    simulation.run_until(lambda: simulation.job.phase is JobPhase.TRAINING)
    pause(simulation)
    pass_time(simulation, LONG_S)
    assert len(simulation.rounds) <= 1
    assert sum(process.local_step for process in simulation.processes.values()) == 0
    pause(simulation, is_paused=False)
    assert simulation.run().outcome is Outcome.SUCCEEDED


@pytest.mark.parametrize("averaging", ["blocking", "overlapped"])
def test_pausing_lets_nobody_lead_by_more(simulate, averaging):
    """Between two looks the slowest may move on, but never does a rank get more than the limit beyond it."""
    simulation = simulate(ranks(5, 20), averaging=averaging, max_batch_diff=3, epochs=2)
    at_round(simulation, 3)
    for _ in range(20):
        pass_time(simulation, 0.011)
        pause(simulation)
        fast, slow = (simulation.processes[rank] for rank in (0, 1))
        base = [record.base_step for record in simulation.job.ranks.values()]
        made = (fast.local_step - base[0], slow.local_step - base[1])
        assert made[0] - max(0, made[1]) <= 3 + 1, made
        pause(simulation, is_paused=False)
    assert simulation.run().outcome is Outcome.SUCCEEDED


@pytest.mark.parametrize("after_s", [0.01, 0.3])
def test_a_job_goes_on_while_a_generation_is_given_up(simulate, after_s):
    """A rank dies in a pause, which ends before the others have said that nothing of it runs there any more: no work is
    leased to the dead one, which the next process of its number would have in its books.
    """
    simulation = simulate(ranks(25, 30, 57.5), epochs=2, latency_ms=50.0, build_ms=200.0)
    at_round(simulation, 4)
    pause(simulation)
    pass_time(simulation, 1.0)
    simulation.kill(0)
    pass_time(simulation, 0.1 + after_s)
    pause(simulation, is_paused=False)
    assert simulation.run(limit_s=1_000).outcome is Outcome.SUCCEEDED


def test_the_wait_for_slots_is_counted_from_submission(simulate):
    simulation = simulate(ranks(5, 5), dataset_size=300)
    simulation.run()
    assert describe_training(simulation.job, 3600.0).queue_wait_s == 0.0


def test_speed_and_time_left_of_an_ended_job_stand_still(simulate):
    simulation = simulate(ranks(5, 5), dataset_size=30_000)
    at_round(simulation, 4)
    simulation.handle(JobCancelled(job_id=JOB))
    simulation.run()
    now_s = simulation.clock.now_s
    assert (
        describe_training(simulation.job, now_s).samples_per_s
        == describe_training(simulation.job, now_s + 600).samples_per_s
    )
