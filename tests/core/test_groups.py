"""Replica groups: to the core one rank each, on several slots of one host."""

from dataclasses import replace

from elche_coordinator.core.coordinator import Coordinator
from elche_coordinator.core.describe import describe_training
from elche_coordinator.core.invariants import check_invariants
from elche_coordinator.core.messages.commands import StartRank
from elche_coordinator.core.messages.events import AgentJoined, AgentLost, JobSubmitted, RankExited
from elche_coordinator.core.messages.ids import AgentId, JobId
from elche_coordinator.core.messages.reports import Outcome
from elche_coordinator.core.messages.spec import JobSpec, Slot
from elche_coordinator.core.records.machine import JobPhase
from support.watched import ranks


def joined(name: str, num_slots: int, device: str = "cpu") -> AgentJoined:
    return AgentJoined(agent_id=AgentId(name), host=name, slots=(Slot(device=device),) * num_slots)


def submitted(name: str, num_ranks: int, group_size: int) -> JobSubmitted:
    settings = {"group_size": str(group_size)}
    spec = JobSpec(name=name, source_hash="", file_name="", num_ranks=num_ranks, settings=settings)
    return JobSubmitted(job_id=JobId(name), spec=spec, submitted_at=0.0)


def placed(core: Coordinator, *events: object) -> list[tuple[str, tuple[int, ...]]]:
    """The host and the slots of each rank that is started."""
    commands = [command for event in events for command in core.handle(event, now_s=0.0)]
    check_invariants(core)
    return [
        (command.agent_id, (command.slot, *command.more_slots))
        for command in commands
        if isinstance(command, StartRank)
    ]


def test_a_group_lies_on_one_host():
    """Two slots are left on one host and one on another: no place for a third group of two."""
    core = Coordinator()
    hosts = joined("a", 3), joined("b", 3)
    assert placed(core, *hosts, submitted("three", 3, 2)) == []
    assert core.jobs[JobId("three")].phase is JobPhase.QUEUED
    assert core.explanation(JobId("three")) == "waits for 3 groups of 2 free slots on one host: 6 of 6 slots are free"
    assert placed(core, submitted("two", 2, 2)) == [("a", (0, 1)), ("b", (0, 1))]
    assert placed(core, joined("c", 6)) == [("c", (0, 1)), ("c", (2, 3)), ("c", (4, 5))]


def test_a_job_that_asks_for_no_number_gets_as_many_groups_as_fit():
    core = Coordinator()
    assert placed(core, joined("a", 5), joined("b", 1), joined("c", 3), submitted("all", 0, 2)) == [
        ("a", (0, 1)),
        ("a", (2, 3)),
        ("c", (0, 1)),
    ]
    assert placed(core, submitted("rest", 0, 1)) == [("a", (4,)), ("b", (0,)), ("c", (2,))]


def test_a_group_that_fits_nowhere_waits():
    core = Coordinator()
    assert placed(core, joined("a", 3), joined("b", 3), submitted("wide", 0, 4)) == []
    assert placed(core, submitted("narrow", 1, 1)) == [("a", (0,))]


def test_a_group_is_shown_as_what_it_is_made_of():
    core = Coordinator()
    slots = tuple(Slot(device=f"cuda:{index}") for index in range(4))
    placed(core, replace(joined("a", 0), slots=slots), submitted("job", 1, 4))
    (rank,) = describe_training(core.trainings[JobId("job")], 0.0).ranks
    assert rank.device == "4x cuda"


def test_groups_train_as_ranks_do(simulate):
    simulation = simulate(ranks(25, 57.5), group_size=2)
    result = simulation.run()
    assert result.outcome is Outcome.SUCCEEDED
    assert result.committed_samples == (4000,)
    assert len(result.ranks) == 2


def test_a_member_that_dies_takes_its_group_out_and_is_named(simulate):
    simulation = simulate(ranks(25, 57.5), group_size=4, on_rank_loss="fail")
    simulation.run_until(lambda: len(simulation.rounds) == 3)
    simulation.kill(1, group_position=2)
    result = simulation.run()
    assert result.outcome is Outcome.FAILED
    assert result.error.startswith(
        "process 2 (cpu) of rank 1 on host (4x cpu) was killed by signal 9 (often: out of memory) at batch "
    )


def test_a_member_that_nobody_knows_is_not_named(simulate):
    simulation = simulate(ranks(25), group_size=2, on_rank_loss="fail")
    simulation.run_until(lambda: len(simulation.rounds) == 1)
    address = simulation.processes[0].address
    simulation.processes[0].is_alive = False
    simulation.handle(RankExited(**address, agent_id=AgentId("host"), exit_code=1, group_position=7))
    assert simulation.run().error.startswith("rank 0 on host (2x cpu) left with exit code 1")


def test_a_host_that_is_lost_takes_all_slots_of_its_groups():
    core = Coordinator()
    placed(core, joined("a", 4), joined("b", 2), submitted("job", 3, 2))
    core.handle(AgentLost(agent_id=AgentId("a")), now_s=1.0)
    check_invariants(core)
    assert {place.agent_id for place in core.fleet.taken} == {"b"}
    assert core.jobs[JobId("job")].reason == "rank 0 is lost: its host a is gone"
