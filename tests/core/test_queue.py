"""Who gets slots first: by priority, and in the order of submission; and who makes room for whom."""

from dataclasses import replace

import pytest
from core.test_lost_ranks import succeeds

from elche_coordinator.core.messages.commands import StartRank
from elche_coordinator.core.messages.events import (
    AgentJoined,
    JobCancelled,
    JobSubmitted,
    PauseRequested,
    RankExited,
    SlotsRequested,
)
from elche_coordinator.core.messages.ids import AgentId, JobId, Rank
from elche_coordinator.core.messages.reports import MembershipReport, Outcome
from elche_coordinator.core.messages.spec import JobSpec, Slot
from elche_coordinator.core.records.machine import JobPhase
from elche_coordinator.simulator.simulation import JOB
from support.clusters import Cluster
from support.stories import in_mid_training
from support.watched import WatchedSimulation, ranks

OTHER = JobId("other")


def test_a_large_job_does_not_wait_for_ever_while_small_ones_come():
    cluster = Cluster(4)
    cluster.submit("a", 1)
    cluster.submit("large", 4)
    cluster.submit("b", 1)
    assert cluster.started == ["a"]
    assert cluster.reason("large") == "waits for 4 free slots: 3 of 4 slots are free"
    assert cluster.reason("b") == "waits behind job large: waits for 4 free slots: 3 of 4 slots are free"
    cluster.end("a")
    assert cluster.started == ["a", "large"]
    cluster.end("large")
    assert cluster.started == ["a", "large", "b"]


def test_who_waits_behind_a_job_that_is_cancelled_begins_at_once():
    cluster = Cluster(2)
    cluster.submit("a", 1)
    cluster.submit("large", 2)
    cluster.submit("b", 1)
    cluster.end("large")
    assert cluster.started == ["a", "b"]


def test_who_is_cancelled_waits_for_nobody():
    cluster = Cluster(1)
    for name in ("a", "first", "second"):
        cluster.submit(name, 1)
    cluster.end("second")
    assert cluster.reason("second") == "cancelled by request"


def test_one_that_needs_more_than_there_is_holds_nobody_back():
    cluster = Cluster(2)
    cluster.submit("too large", 3)
    cluster.submit("b", 2)
    assert cluster.started == ["b"]
    assert cluster.reason("too large").endswith("2 of 2 slots are free; start more workers")


def test_twenty_jobs_on_four_slots_are_placed_by_priority_and_all_of_them():
    cluster = Cluster(4)
    cluster.submit("first", 4, priority=9)
    sizes = [1, 4, 2, 3]
    for index in range(20):
        cluster.submit(f"j{index:02d}", sizes[index % 4], priority=index % 3)
    while waiting := [job for job in cluster.core.jobs.values() if job.is_open]:
        running = next(job for job in waiting if job.phase is not JobPhase.QUEUED)
        cluster.end(running.id)
    wanted = sorted(range(20), key=lambda index: (-(index % 3), index))
    assert cluster.started == ["first", *(f"j{index:02d}" for index in wanted)]


def test_jobs_begin_in_the_order_of_their_submission_also_when_the_clock_was_put_back():
    """It was hours ahead: whoever had submitted a job before waited for all that were submitted in these hours."""
    cluster = Cluster(1)
    cluster.submit("runs", 1)
    for name, submitted_at in (("before", 9000.0), ("after", 1800.0), ("later", 1801.0)):
        spec = JobSpec(name=name, source_hash="", file_name="", num_ranks=1)
        cluster.handle(JobSubmitted(job_id=JobId(name), spec=spec, submitted_at=submitted_at))
    for name in ("runs", "before", "after"):
        cluster.end(name)
    assert cluster.started == ["runs", "before", "after", "later"]


def test_nobody_gives_what_is_too_little():
    cluster = Cluster(3)
    cluster.submit("equal", 1, priority=1)
    cluster.submit("low", 2)
    cluster.submit("high", 3, priority=1)
    assert cluster.started == ["equal", "low"]
    assert cluster.core.jobs[JobId("low")].phase is JobPhase.STARTING
    cluster.end("equal")
    assert cluster.started == ["equal", "low", "high"]
    assert cluster.core.jobs[JobId("low")].phase is JobPhase.QUEUED


def submit_other(simulation: WatchedSimulation, num_ranks: int, priority: int) -> None:
    spec = JobSpec(name="other", source_hash="", file_name="", num_ranks=num_ranks, priority=priority)
    simulation.handle(JobSubmitted(job_id=OTHER, spec=spec, submitted_at=1.0))


def end_other(simulation: WatchedSimulation) -> None:
    simulation.handle(JobCancelled(job_id=OTHER))
    for record in list(simulation.core.jobs[OTHER].ranks.values()):
        simulation.handle(RankExited(**record.address, agent_id=record.agent_id, exit_code=0))


def submit_this(simulation: WatchedSimulation, num_slots: int, **spec: int) -> None:
    slots = (Slot(device="cpu"),) * num_slots
    simulation.handle(AgentJoined(agent_id=AgentId("host"), host="host", slots=slots))
    simulation.handle(
        JobSubmitted(job_id=JOB, spec=JobSpec(name="job", source_hash="", file_name="", **spec), submitted_at=0.0)
    )


def test_a_job_that_ends_is_asked_for_slots_in_vain(simulate):
    """It failed by the event after which it was asked, and its error was that its ranks leave for another job."""
    simulation = simulate(ranks(25.0, 30.0), dataset_size=20_000)
    submit_this(simulation, 2, num_ranks=2, min_ranks=1)
    in_mid_training(simulation)
    simulation.handle(JobCancelled(job_id=JOB))
    reason = simulation.job.reason
    simulation.handle(SlotsRequested(job_id=JOB, num_ranks=1, by=OTHER))
    assert simulation.job.reason == reason
    assert "cancelled" in reason


@pytest.mark.parametrize("averaging", ["overlapped", "blocking"])
def test_a_job_shrinks_for_one_of_higher_priority_and_grows_again(simulate, averaging):
    """Its samples all count once; the ranks beyond its least number leave with their work committed."""
    simulation = simulate(ranks(25.0, 30.0, 57.5, 40.0), averaging=averaging, dataset_size=20_000, build_ms=10.0)
    submit_this(simulation, 4, num_ranks=4, min_ranks=2)
    in_mid_training(simulation)
    submit_other(simulation, 2, priority=1)
    other = simulation.core.jobs[OTHER]
    assert "leave their slots to job other" in simulation.job.reason
    simulation.run_until(lambda: other.phase is JobPhase.STARTING)
    assert sorted(simulation.job.run.generation.members) == [0, 1]
    assert [command.rank for command in simulation.sent(StartRank) if command.job_id == JOB] == [0, 1, 2, 3]
    before = len(simulation.rounds)
    simulation.run_until(lambda: len(simulation.rounds) > before + 5)
    assert len(other.ranks) == 2, "what has left does not come back into its slots"
    assert len(simulation.job.run.generation.members) == 2
    end_other(simulation)
    simulation.run_until(lambda: len(simulation.job.run.generation.members) == 4)
    succeeds(simulation)
    assert simulation.job.roster.num_lost == 0


def test_a_job_goes_back_to_the_queue_with_a_checkpoint_for_one_of_higher_priority(simulate):
    simulation = simulate(ranks(25.0, 30.0), dataset_size=20_000, build_ms=10.0)
    submit_this(simulation, 2, num_ranks=2)
    in_mid_training(simulation)
    submit_other(simulation, 2, priority=1)
    other = simulation.core.jobs[OTHER]
    simulation.run_until(lambda: other.phase is JobPhase.STARTING)
    assert simulation.job.phase is JobPhase.QUEUED
    assert simulation.job.spec.resume, "from the checkpoint that was made for it"
    assert simulation.core.explanation(simulation.job.id) == "waits for 2 free slots: 0 of 2 slots are free"
    assert max(simulation.saved) > 0
    end_other(simulation)
    assert simulation.run().outcome is Outcome.SUCCEEDED
    simulation.assert_exactly_once()
    assert [command.rank for command in simulation.sent(StartRank) if command.job_id == JOB] == [0, 1, 0, 1]
    backs = [one for one in simulation.reports if isinstance(one, MembershipReport)]
    assert any("goes back to checkpoint" in one.text for one in backs)


@pytest.mark.parametrize(
    ("priority", "num_ranks", "is_asked"), [(1, 1, True), (1, 2, True), (0, 1, False), (1, 3, False)]
)
def test_a_job_gives_its_slot_on_the_only_host_with_the_checkpoint_of_one_of_higher_priority(
    simulate, priority, num_ranks, is_asked
):
    """That one had lost its slot there with its rank, and waited until the other had ended, however urgent it was."""
    simulation = simulate(ranks(25.0), dataset_size=20_000, build_ms=10.0)
    slots = (Slot(device="cpu"),)
    simulation.handle(AgentJoined(agent_id=AgentId("host"), host="host", slots=slots, folder="its folder"))
    spec = JobSpec(name="job", source_hash="", file_name="", num_ranks=1)
    simulation.handle(JobSubmitted(job_id=JOB, spec=spec, submitted_at=0.0))
    in_mid_training(simulation)
    simulation.handle(AgentJoined(agent_id=AgentId("another"), host="another", slots=slots, folder="another"))
    spec = replace(spec, name="other", num_ranks=num_ranks, priority=priority, resume_work_folder="its folder")
    simulation.handle(JobSubmitted(job_id=OTHER, spec=spec, submitted_at=1.0))
    other = simulation.core.jobs[OTHER]
    assert ("leave their slots to job other" in simulation.job.reason) is is_asked
    if is_asked:
        simulation.run_until(lambda: other.phase is JobPhase.STARTING)
        assert other.ranks[Rank(0)].host == "host"
        assert len(other.ranks) == num_ranks
        end_other(simulation)
    simulation.run_until(lambda: simulation.job.result is not None)
    simulation.assert_exactly_once()
    if not is_asked:
        end_other(simulation)


@pytest.mark.parametrize(("priority", "num_ranks"), [(0, 2), (-1, 2), (1, 3)])
def test_nobody_makes_room_for_an_equal_or_in_vain(simulate, priority, num_ranks):
    simulation = simulate(ranks(25.0, 30.0), dataset_size=4000)
    submit_this(simulation, 2, num_ranks=2, min_ranks=1)
    in_mid_training(simulation)
    submit_other(simulation, num_ranks, priority=priority)
    assert "leave their slots" not in simulation.job.reason
    simulation.run_until(lambda: simulation.job.result is not None)
    assert [command.rank for command in simulation.sent(StartRank) if command.job_id == JOB] == [Rank(0), Rank(1)]
    assert simulation.job.roster.num_lost == 0
    end_other(simulation)


def test_a_paused_job_is_asked_when_it_goes_on(simulate):
    """It makes no round with which its ranks could leave."""
    simulation = simulate(ranks(25.0, 30.0), dataset_size=20_000, build_ms=10.0)
    submit_this(simulation, 2, num_ranks=2, min_ranks=1)
    in_mid_training(simulation)
    simulation.handle(PauseRequested(job_id=JOB, is_paused=True))
    submit_other(simulation, 1, priority=1)
    assert simulation.events(SlotsRequested) == []
    simulation.handle(PauseRequested(job_id=JOB, is_paused=False))
    assert len(simulation.events(SlotsRequested)) == 1
    simulation.run_until(lambda: simulation.core.jobs[OTHER].phase is JobPhase.STARTING)
    end_other(simulation)
    succeeds(simulation)
