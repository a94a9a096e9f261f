"""Cancelled jobs, jobs that wait for slots, and the next in the queue."""

import pytest

from elche_coordinator.core.coordinator import Coordinator
from elche_coordinator.core.jobs.managed_job import WRITES_MODEL
from elche_coordinator.core.life.job import STOP_GRACE_S
from elche_coordinator.core.messages.commands import StartRank, StopRank
from elche_coordinator.core.messages.events import (
    AgentJoined,
    JobCancelled,
    JobsForgotten,
    JobSubmitted,
    RankExited,
    UserEventRecorded,
)
from elche_coordinator.core.messages.ids import AgentId, JobId
from elche_coordinator.core.messages.reports import Outcome
from elche_coordinator.core.messages.spec import JobSpec, Slot
from elche_coordinator.core.records.machine import JobPhase
from support.stories import at_phase, in_mid_training, submitted
from support.watched import ranks


@pytest.mark.parametrize(
    "phase", [JobPhase.QUEUED, JobPhase.STARTING, JobPhase.GROUPING, JobPhase.TRAINING, JobPhase.FINISHING]
)
def test_a_job_can_be_cancelled_in_every_phase(simulate, phase):
    simulation = simulate(ranks(5, 5), dataset_size=300)
    if phase is JobPhase.QUEUED:
        simulation.handle(submitted("job", 2))
    at_phase(simulation, phase)
    simulation.handle(JobCancelled(job_id=JobId("job")))
    result = simulation.run()
    assert (result.outcome, result.error) == (Outcome.CANCELLED, "cancelled by request")
    if phase is not JobPhase.STARTING:
        assert simulation.sent(StopRank) == []
    assert simulation.clock.now_s < STOP_GRACE_S


def test_the_view_of_an_ended_job_says_how_many_epochs_are_complete(simulate):
    """Of a job that had made its three epochs `elche jobs` said 2/3."""
    simulation = simulate(ranks(5, 11.5), dataset_size=300, epochs=3)
    simulation.run_until(lambda: len(simulation.epochs) == 3)
    assert simulation.core.view(JobId("job"), simulation.clock.now_s).epoch == 2, "the last one, while it is there"
    simulation.run()
    assert simulation.core.view(JobId("job"), simulation.clock.now_s).epoch == 3
    cancelled = simulate(ranks(5, 11.5), dataset_size=3000, epochs=3)
    cancelled.run_until(lambda: len(cancelled.epochs) == 1)
    cancelled.handle(JobCancelled(job_id=JobId("job")))
    cancelled.run()
    assert cancelled.core.view(JobId("job"), cancelled.clock.now_s).epoch == 1


def test_figures_of_a_job_that_stops_are_those_of_its_result(simulate):
    """While a cancelled job's ranks were being ended its speed fell: `elche jobs` and the page said 1,246 samples/s,
    the summary 1,761. Work that no round has taken counted as progress, and the job had a remaining time.
    """
    simulation = simulate(ranks(5, 11.5), dataset_size=3000, epochs=3)
    in_mid_training(simulation, 2)
    ledger = simulation.training.ledger
    simulation.run_until(lambda: ledger.total_processed() > ledger.total_committed())
    simulation.processes[1].receive = lambda command: None  # so that stopping takes time
    simulation.handle(JobCancelled(job_id=JobId("job")))
    stopping = simulation.core.view(JobId("job"), simulation.clock.now_s)
    result = simulation.run()
    ended, committed = simulation.core.view(JobId("job"), simulation.clock.now_s + 60), sum(result.committed_samples)
    for view in (stopping, ended):
        assert (view.samples_per_s, view.num_samples, view.eta_s) == (result.samples_per_s, committed, 0.0)
        assert view.overhead_fraction == stopping.overhead_fraction


def test_a_rank_that_does_not_leave_is_stopped_after_the_grace(simulate):
    simulation = simulate(ranks(5, 5))
    in_mid_training(simulation, 2)
    deaf = simulation.processes[1]
    deaf.receive = lambda command: None
    cancelled_s = simulation.clock.now_s
    simulation.handle(JobCancelled(job_id=JobId("job")))
    assert simulation.run().outcome is Outcome.CANCELLED
    (stopped,) = simulation.sent_at(StopRank)
    assert stopped[0] == pytest.approx(cancelled_s + STOP_GRACE_S)
    assert stopped[1].rank == 1


def test_a_queued_job_starts_when_the_one_before_it_ends(simulate):
    simulation = simulate(ranks(5, 5), dataset_size=300)
    simulation.start()
    simulation.handle(submitted("next", 1))
    assert simulation.core.jobs["next"].phase is JobPhase.QUEUED
    assert simulation.run().outcome is Outcome.SUCCEEDED
    assert simulation.core.jobs["next"].phase is JobPhase.STARTING
    assert [command.job_id for command in simulation.sent(StartRank)] == ["job", "job", "next"]
    simulation.handle(JobCancelled(job_id=JobId("next")))
    (stop,) = (command for command in simulation.sent(StopRank))
    simulation.core.handle(
        RankExited(
            job_id=stop.job_id, rank=stop.rank, incarnation=stop.incarnation, agent_id=stop.agent_id, exit_code=0
        ),
        now_s=99,
    )
    simulation.reports = [report for report in simulation.reports if report is not simulation.core.jobs["next"].result]
    for process in simulation.processes.values():
        process.is_alive = False


def test_only_jobs_that_have_ended_are_forgotten() -> None:
    """And a submission with the key of a forgotten one is a new job."""
    core = Coordinator()
    spec = JobSpec(name="job", source_hash="", file_name="")
    for name in ("ended", "waits"):
        core.handle(JobSubmitted(job_id=JobId(name), spec=spec, submitted_at=0.0, key=name), now_s=0)
    core.handle(JobCancelled(job_id=JobId("ended")), now_s=1)
    core.handle(JobsForgotten(job_ids=(JobId("ended"), JobId("waits"), JobId("nobody"))), now_s=2)
    assert core.job_ids() == ["waits"]
    assert (core.keys.get("ended"), core.keys.get("waits")) == (None, "waits")
    core.handle(JobSubmitted(job_id=JobId("new"), spec=spec, submitted_at=0.0, key="ended"), now_s=3)
    assert core.job_ids() == ["waits", "new"]


def test_a_process_that_is_said_to_end_twice_frees_no_slot_of_the_next_job(simulate):
    core = simulate([]).core
    core.handle(AgentJoined(agent_id=AgentId("a"), host="a", slots=(Slot(device="cpu"),)), now_s=0)
    for name in ("first", "next"):
        core.handle(submitted(name, 1), now_s=0)
    (address,) = core.addresses(JobId("first"))
    ended = RankExited(**address, agent_id=AgentId("a"), exit_code=1)
    for at_s in (1, 2):
        core.handle(ended, now_s=at_s)
        assert [job_id for job_id, _ in core.fleet.taken.values()] == ["next"]


def test_a_job_that_wants_more_slots_than_there_are_waits(simulate):
    simulation = simulate([], dataset_size=300)
    slots = (Slot(device="cpu"),) * 2
    simulation.handle(AgentJoined(agent_id=AgentId("a"), host="a", slots=slots))
    simulation.handle(submitted("big", 3))
    assert simulation.core.jobs["big"].phase is JobPhase.QUEUED
    assert simulation.sent(StartRank) == []
    simulation.core.handle(AgentJoined(agent_id=AgentId("b"), host="b", slots=slots), now_s=1)
    assert [(command.agent_id, command.slot) for command in simulation.sent(StartRank)] == [
        ("a", 0),
        ("a", 1),
        ("b", 0),
    ]


def test_a_job_that_asks_for_no_number_gets_every_free_slot(simulate):
    simulation = simulate([])
    simulation.core.handle(submitted("all", 0), now_s=0)
    assert simulation.core.jobs["all"].phase is JobPhase.QUEUED
    simulation.core.handle(AgentJoined(agent_id=AgentId("a"), host="a", slots=(Slot(device="cpu"),) * 3), now_s=0)
    assert len(simulation.sent(StartRank)) == 3


def test_a_negative_number_of_ranks_takes_no_slot(simulate):
    simulation = simulate([])
    simulation.core.handle(AgentJoined(agent_id=AgentId("a"), host="a", slots=(Slot(device="cpu"),) * 3), now_s=0)
    simulation.core.handle(submitted("odd", -1), now_s=0)
    assert simulation.sent(StartRank) == []


def test_a_finishing_jobs_reason_is_what_its_writer_says(simulate):
    """Such as that the disk is full, for up to ten minutes; once it has died, the next one writes."""
    simulation = simulate(ranks(5, 5), dataset_size=300)
    at_phase(simulation, JobPhase.FINISHING)
    saver = simulation.job.run.training.saver
    for rank, said in ((1 - saver, "another's"), (saver, "no room")):
        address = simulation.processes[rank].address
        simulation.handle(UserEventRecorded(**address, text=said))
    assert simulation.core.view(JobId("job"), simulation.clock.now_s).reason == f"rank {saver}: no room"
    simulation.kill(saver)
    simulation.run_until(lambda: simulation.job.run.training.saver != saver)
    assert simulation.core.view(JobId("job"), simulation.clock.now_s).reason == WRITES_MODEL
    simulation.run()
