"""Jobs whose number of ranks changes while they train: by slots that come free, and because somebody asks."""

import pytest
from core.test_lost_ranks import by_policy, succeeds

from elche_coordinator.core.messages.commands import SendFormGroup, SendShutdown, StartRank
from elche_coordinator.core.messages.events import AgentJoined, AgentLost, GroupFormed, JobSubmitted, ScaleRequested
from elche_coordinator.core.messages.ids import AgentId, JobId, Rank
from elche_coordinator.core.messages.spec import JobSpec, Slot
from elche_coordinator.core.records.machine import JobPhase, RankPhase
from elche_coordinator.simulator.simulation import JOB
from support.stories import in_mid_training
from support.watched import WatchedSimulation, ranks

FOUR = (25.0, 30.0, 57.5, 40.0)


def submit(simulation: WatchedSimulation, *, num_ranks: int, min_ranks: int = 0, num_slots: int) -> None:
    simulation.handle(AgentJoined(agent_id=AgentId("host"), host="host", slots=(Slot(device="cpu"),) * num_slots))
    spec = JobSpec(name="job", source_hash="", file_name="", num_ranks=num_ranks, min_ranks=min_ranks)
    simulation.handle(JobSubmitted(job_id=JOB, spec=spec, submitted_at=0.0))


def scale(simulation: WatchedSimulation, num_ranks: int) -> None:
    simulation.handle(ScaleRequested(job_id=JOB, num_ranks=num_ranks))


def joins(simulation: WatchedSimulation, name: str, num_slots: int) -> None:
    simulation.handle(AgentJoined(agent_id=AgentId(name), host=name, slots=(Slot(device="cpu"),) * num_slots))


def num_training(simulation: WatchedSimulation) -> int:
    return sum(record.is_present and record.has_model for record in simulation.job.ranks.values())


@by_policy
def test_a_job_begins_with_what_is_there_and_takes_in_what_comes(simulate, policy, averaging):
    simulation = simulate(ranks(*FOUR), policy=policy, averaging=averaging, dataset_size=8000, build_ms=10.0)
    submit(simulation, num_ranks=4, min_ranks=2, num_slots=2)
    in_mid_training(simulation)
    assert num_training(simulation) == 2
    joins(simulation, "b", 1)
    simulation.run_until(lambda: num_training(simulation) == 3)
    joins(simulation, "c", 7)
    succeeds(simulation)
    assert [command.rank for command in simulation.sent(StartRank)] == [0, 1, 2, 3]
    assert all(rank.batches > 0 for rank in simulation.job.result.ranks)


def test_slots_that_come_while_a_job_starts_are_its_own_once_its_ranks_are_ready(simulate):
    simulation = simulate(ranks(*FOUR), dataset_size=8000)
    submit(simulation, num_ranks=4, min_ranks=2, num_slots=2)
    joins(simulation, "b", 2)
    assert [command.rank for command in simulation.sent(StartRank)] == [0, 1]
    simulation.run_until(lambda: simulation.job.phase is JobPhase.GROUPING)
    assert [command.rank for command in simulation.sent(StartRank)] == [0, 1, 2, 3]


def test_fewer_than_suffice_wait(simulate):
    simulation = simulate(ranks(*FOUR))
    submit(simulation, num_ranks=4, min_ranks=3, num_slots=2)
    assert simulation.job.phase is JobPhase.QUEUED
    assert (
        simulation.core.explanation(simulation.job.id)
        == "waits for 3 free slots: 2 of 2 slots are free; start more workers"
    )
    joins(simulation, "b", 1)
    succeeds(simulation)


@by_policy
def test_ranks_leave_and_come_as_somebody_asks(simulate, policy, averaging):
    simulation = simulate(ranks(*FOUR), policy=policy, averaging=averaging, dataset_size=20_000)
    in_mid_training(simulation)
    scale(simulation, 2)
    simulation.run_until(lambda: len(simulation.core.fleet.taken) == 2)
    assert sorted(command.rank for command in simulation.sent(SendShutdown)) == [2, 3]
    assert sorted(simulation.job.run.generation.members) == [0, 1]
    scale(simulation, 3)
    simulation.run_until(lambda: num_training(simulation) == 3)
    succeeds(simulation)
    assert [command.rank for command in simulation.sent(StartRank)] == [0, 1, 2, 3, 2]
    assert simulation.job.roster.num_lost == 0


def test_one_that_is_gone_is_not_started_again_when_it_is_too_many(simulate):
    simulation = simulate(ranks(*FOUR), dataset_size=20_000)
    in_mid_training(simulation)
    simulation.kill(1)
    scale(simulation, 3)
    succeeds(simulation)
    assert len(simulation.sent(StartRank)) in (4, 5), "the dead one may have been started before that was known"
    assert len(simulation.generation.members) == 3


def test_who_waits_comes_before_who_wants_more(simulate):
    simulation = simulate(ranks(*FOUR), dataset_size=20_000)
    submit(simulation, num_ranks=4, min_ranks=1, num_slots=2)
    in_mid_training(simulation)
    other = JobSpec(name="other", source_hash="", file_name="", num_ranks=1)
    simulation.handle(JobSubmitted(job_id=JobId("other"), spec=other, submitted_at=1.0))
    joins(simulation, "b", 1)
    assert simulation.core.jobs[JobId("other")].phase is JobPhase.STARTING
    assert len(simulation.job.ranks) == 2


def test_all_but_the_number_stays_through_a_return_to_a_checkpoint(simulate):
    simulation = simulate(ranks(*FOUR), dataset_size=8000)
    in_mid_training(simulation)
    scale(simulation, 2)
    simulation.run_until(lambda: len(simulation.core.fleet.taken) == 2)
    for rank in (0, 1):
        simulation.kill(rank)
    simulation.run_until(lambda: simulation.job.attempt == 2)
    simulation.run_until(lambda: simulation.job.phase is JobPhase.TRAINING)
    assert list(simulation.job.ranks) == [Rank(0), Rank(1)]
    simulation.run()


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_scaling_while_the_ranks_load_the_file(simulate, num_ranks):
    """It once was a bug in the coordinator: nobody was to leave, and the first of them was named."""
    simulation = simulate(ranks(*FOUR), dataset_size=2000)
    submit(simulation, num_ranks=2, num_slots=4)
    assert simulation.job.phase is JobPhase.STARTING
    scale(simulation, num_ranks)
    simulation.run_until(lambda: simulation.job.phase is JobPhase.TRAINING)
    succeeds(simulation)
    assert len(simulation.generation.members) == num_ranks


def test_scaling_up_does_not_disturb_a_rank_that_is_joining(simulate):
    simulation = simulate(ranks(*FOUR), dataset_size=20_000, build_ms=500.0)
    submit(simulation, num_ranks=2, num_slots=3)
    in_mid_training(simulation)
    scale(simulation, 3)
    simulation.run_until(lambda: simulation.job.run.membership.forming is not None)
    forming = simulation.job.run.membership.forming
    scale(simulation, 4)
    assert simulation.job.run.membership.forming is forming
    succeeds(simulation)


def test_a_newcomer_whose_group_stands_joins_the_next_one_when_another_newcomer_dies(simulate):
    """It was in no group any more: it kept its slot to the job's end, and never trained."""
    simulation = simulate(ranks(*FOUR), dataset_size=20_000, build_ms=200.0)
    submit(simulation, num_ranks=1, num_slots=4)
    in_mid_training(simulation)
    scale(simulation, 4)
    membership = simulation.job.run.membership
    simulation.run_until(lambda: membership.forming is not None and len(membership.forming.members) == 4)
    first, second = (rank for rank in membership.forming.members if rank not in membership.standing.members)
    address = simulation.job.ranks[first].address
    simulation.handle(GroupFormed(**address, generation=membership.forming.id))
    simulation.kill(second)
    simulation.run_until(lambda: num_training(simulation) == 4)
    succeeds(simulation)
    assert [command.rank for command in simulation.sent(StartRank)].count(first) == 1


@by_policy
def test_ranks_leave_while_the_survivors_of_a_death_meet(simulate, policy, averaging):
    """The group that they built was given up, and none was built in its place."""
    simulation = simulate(ranks(*FOUR), policy=policy, averaging=averaging, dataset_size=20_000, build_ms=500.0)
    in_mid_training(simulation)
    simulation.kill(3)
    simulation.run_until(lambda: simulation.job.run.membership.forming is not None)
    assert simulation.generation.is_abandoned
    scale(simulation, 2)
    succeeds(simulation)
    assert len(simulation.generation.members) == 2


@by_policy
def test_all_with_the_initial_model_are_to_leave_while_the_one_that_stays_starts_again(simulate, policy, averaging):
    """Before the first round each process has the model: the one that was starting was taken to go on with it alone."""
    simulation = simulate(ranks(*FOUR), policy=policy, averaging=averaging, dataset_size=2000)
    simulation.start()
    simulation.run_until(lambda: simulation.job.phase is JobPhase.TRAINING)
    simulation.kill(0)
    simulation.run_until(lambda: simulation.job.ranks[Rank(0)].phase is RankPhase.STARTING)
    assert simulation.generation.abandoned is not None
    assert not simulation.rounds
    scale(simulation, 1)
    succeeds(simulation)
    assert list(simulation.generation.members) == [Rank(0)]


def test_a_job_that_took_what_was_there_does_so_again_and_grows_to_what_it_had(simulate):
    simulation = simulate(ranks(*FOUR), dataset_size=20_000)
    submit(simulation, num_ranks=0, num_slots=4)
    in_mid_training(simulation)
    for process in simulation.processes.values():
        process.is_alive = False
    simulation.handle(AgentLost(agent_id=AgentId("host")))
    joins(simulation, "b", 1)
    simulation.run_until(lambda: simulation.job.phase is JobPhase.TRAINING)
    assert len(simulation.job.ranks) == 1
    joins(simulation, "c", 9)
    simulation.run_until(lambda: num_training(simulation) == 4)
    simulation.run()


def test_ranks_of_one_host_follow_each_other_in_the_ring(simulate):
    """After ranks of a lost host came back elsewhere, ranks 0 and 2 are on one host, and rank 1 on another."""
    simulation = simulate(ranks(*FOUR[:3]), dataset_size=20_000)
    joins(simulation, "b", 2)
    submit(simulation, num_ranks=3, num_slots=2)
    assert [simulation.job.ranks[Rank(rank)].agent_id for rank in range(3)] == ["b", "b", "host"]
    in_mid_training(simulation)
    for rank in range(2):
        simulation.processes[rank].is_alive = False
    simulation.handle(AgentLost(agent_id=AgentId("b")))
    simulation.run_until(lambda: num_training(simulation) == 2)
    joins(simulation, "c", 1)
    simulation.run_until(lambda: num_training(simulation) == 3)
    hosts = [simulation.job.ranks[Rank(rank)].agent_id for rank in range(3)]
    assert hosts == ["host", "c", "host"]
    simulation.run()
    newest = max(command.generation for command in simulation.sent(SendFormGroup))
    formed = [command for command in simulation.sent(SendFormGroup) if command.generation == newest]
    assert {command.rank: command.position for command in formed} == {0: 0, 2: 1, 1: 2}


@pytest.mark.parametrize("when", ["queued", "ended"])
def test_scaling_before_and_after(simulate, when):
    simulation = simulate(ranks(25.0, 30.0), dataset_size=500)
    if when == "ended":
        simulation.run()
        simulation.says_nothing(ScaleRequested(job_id=JOB, num_ranks=3))
    else:
        submit(simulation, num_ranks=4, num_slots=2)
        scale(simulation, 2)
        assert simulation.run().outcome == "succeeded"
