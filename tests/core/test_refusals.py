"""What has no place in the present state is refused, and the refusal names the state, the trigger and the reason."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from elche_coordinator.core.messages.events import (
    BatchesTrained,
    BestKept,
    CheckpointFailed,
    CheckpointRequested,
    CheckpointSaved,
    EvaluationDone,
    Event,
    FinalStateSaved,
    GroupFormed,
    JobBroken,
    JobCancelled,
    JobSubmitted,
    LoopEpochEnded,
    LoopLeft,
    LoopProgressed,
    PauseRequested,
    RankExited,
    RankFailed,
    RankReady,
    ResultReceived,
    RoundEntered,
    RoundFailed,
    StacksReported,
    UserEventRecorded,
)
from elche_coordinator.core.messages.ids import AgentId, JobId, Rank
from elche_coordinator.core.messages.spec import EpochWork, JobSpec
from elche_coordinator.core.records.machine import JobPhase
from support.stories import UNEQUAL, in_mid_training
from support.watched import WatchedSimulation, ranks

JOB = JobId("job")
MakeEvent = Callable[[WatchedSimulation], Event]


def refused(simulation: WatchedSimulation, event: Event) -> tuple[str, str, str]:
    """How the core refuses the event: state, trigger and reason. It changes nothing."""
    simulation.says_nothing(event)
    (refusal,) = simulation.core.last_refusals
    assert refusal.job_id == JOB
    assert simulation.core.last_touched == [JOB]
    return refusal.state, refusal.trigger, refusal.why


def address(simulation: WatchedSimulation) -> dict[str, object]:
    return dict(simulation.processes[0].address)


def entered(simulation: WatchedSimulation, **changes: object) -> RoundEntered:
    job = simulation.job
    event = RoundEntered(**address(simulation), generation=job.generation_id, round=simulation.generation.rounds[0].id)
    return replace(event, **changes)


WHILE_IT_TRAINS: list[tuple[str, MakeEvent, str, str]] = [
    ("an old process", lambda s: entered(s, incarnation=99), "rank 0 is incarnation 1", "RoundEntered"),
    ("no such rank", lambda s: entered(s, rank=7), "rank 7 is not of the job", "RoundEntered"),
    ("an old generation", lambda s: entered(s, generation=0), "round 4 is not open", "RoundEntered"),
    ("a committed round", lambda s: entered(s, round=1), "round 1 is not open", "RoundEntered"),
    ("a result twice", lambda s: s.events(ResultReceived)[-1], "round 3 is not open", "ResultReceived"),
    (
        "no such round fails",
        lambda s: RoundFailed(**address(s), generation=s.job.generation_id, round=99, reason=""),
        "round 99 is not open",
        "RoundFailed",
    ),
    (
        "a group twice",
        lambda s: GroupFormed(**address(s), generation=s.job.generation_id),
        "job is in generation 1",
        "GroupFormed",
    ),
    (
        "an old group",
        lambda s: GroupFormed(**address(s), generation=0),
        "job is in generation 1",
        "GroupFormed",
    ),
    (
        "ready twice",
        lambda s: RankReady(**address(s), settings=s.settings, device="cpu"),
        "rank is training",
        "loaded",
    ),
    (
        "an evaluation",
        lambda s: EvaluationDone(**address(s), epoch=0, sums={}, duration_ms=1.0),
        "rank 0 has nothing to evaluate",
        "EvaluationDone",
    ),
    (
        "a checkpoint",
        lambda s: CheckpointSaved(**address(s), version=2, path="", size_bytes=1, duration_s=1.0),
        "version 2 is not being written as a checkpoint",
        "CheckpointSaved",
    ),
    (
        "no checkpoint",
        lambda s: CheckpointFailed(**address(s), version=2, reason="full"),
        "version 2 is not being written as a checkpoint",
        "CheckpointFailed",
    ),
    ("a final state", lambda s: FinalStateSaved(**address(s), path="x"), "job is training", "FinalStateSaved"),
    ("a best model", lambda s: BestKept(**address(s)), "job is training", "BestKept"),
    (
        "another host",
        lambda s: RankExited(**address(s), agent_id=AgentId("other"), exit_code=-9),
        "rank 0 is on host",
        "RankExited",
    ),
    (
        "stacks",
        lambda s: StacksReported(**address(s), agent_id=AgentId("host"), text=""),
        "rank 0 is not stalled",
        "StacksReported",
    ),
    (
        "the same job",
        lambda _: JobSubmitted(job_id=JOB, spec=JobSpec(name="job", source_hash="", file_name=""), submitted_at=0.0),
        "job is training",
        "JobSubmitted",
    ),
    ("a loop's end", lambda s: LoopLeft(**address(s)), "job is training", "LoopLeft"),
    (
        "a loop's epoch",
        lambda s: LoopEpochEnded(
            **address(s), duration_s=1.0, work=EpochWork(epoch=0, num_batches=1, num_samples=1, loss_sum=1.0)
        ),
        "job is training",
        "LoopEpochEnded",
    ),
    (
        "a loop's progress",
        lambda s: LoopProgressed(
            **address(s),
            num_steps=1,
            epoch=0,
            num_epochs=1,
            epoch_size=1,
            epoch_done=1,
            batch_size=1,
            anchor=1,
            averaging_ms=1.0,
        ),
        "job is training",
        "LoopProgressed",
    ),
]


@pytest.mark.parametrize("case", WHILE_IT_TRAINS, ids=lambda case: case[0])
def test_what_has_no_place_while_a_job_trains_is_refused(simulate, case):
    _, make, state, trigger = case
    simulation = simulate(ranks(25, 57.5), dataset_size=3_000)
    simulation.run_until(lambda: len(simulation.rounds) >= 3)
    until_s = simulation.clock.now_s + 0.3
    simulation.run_until(lambda: simulation.clock.now_s >= until_s)
    told = refused(simulation, make(simulation))
    assert told[:2] == (state, trigger)
    assert told[2]


AFTER_THE_END: list[MakeEvent] = [
    lambda _: JobCancelled(job_id=JOB),
    lambda _: JobBroken(job_id=JOB, reason="late"),
    lambda _: PauseRequested(job_id=JOB, is_paused=True),
    lambda _: CheckpointRequested(job_id=JOB),
    lambda s: RankFailed(**address(s), error="late"),
    lambda s: UserEventRecorded(**address(s), text="late"),
    lambda s: EvaluationDone(**address(s), epoch=0, sums={}, duration_ms=1.0),
    lambda s: RoundEntered(**address(s), generation=1, round=1),
    lambda s: s.events(ResultReceived)[-1],
    lambda s: RoundFailed(**address(s), generation=1, round=1, reason="late"),
    lambda s: FinalStateSaved(**address(s), path="late"),
]


@pytest.mark.parametrize("make", AFTER_THE_END)
def test_what_comes_after_a_jobs_end_is_refused(simulate, make):
    simulation = simulate(ranks(25, 57.5), dataset_size=3_000)
    simulation.run()
    event = make(simulation)
    assert refused(simulation, event)[:2] == ("job is ended", type(event).__name__)


def test_a_process_that_ends_twice_is_refused(simulate):
    simulation = simulate(ranks(25, 57.5), dataset_size=3_000)
    simulation.run()
    event = RankExited(**address(simulation), agent_id=AgentId("host"), exit_code=0)
    assert refused(simulation, event)[:2] == ("rank 0 is exited", "RankExited")


def test_what_is_told_while_a_job_waits_is_refused(simulate):
    simulation = simulate(ranks(25), dataset_size=3_000)
    spec = JobSpec(name="job", source_hash="", file_name="", num_ranks=1)
    simulation.core.handle(JobSubmitted(job_id=JOB, spec=spec, submitted_at=0.0), now_s=0.0)
    assert simulation.core.jobs[JOB].phase is JobPhase.QUEUED
    simulation.core.handle(PauseRequested(job_id=JOB, is_paused=True), now_s=0.0)
    (refusal,) = simulation.core.last_refusals
    assert (refusal.state, refusal.trigger) == ("job is queued", "PauseRequested")


def test_what_is_taken_in_is_not_refused(simulate):
    simulation = simulate(ranks(25, 57.5), dataset_size=3_000, has_evaluation=True)
    refusals: list[object] = []

    def ended() -> bool:
        refusals.extend(simulation.core.last_refusals)
        return simulation.job.result is not None

    simulation.run_until(ended)
    assert refusals == []
    event = simulation.events(BatchesTrained)[-1]
    simulation.core.handle(replace(event, job_id=JobId("other")), now_s=simulation.clock.now_s)
    assert simulation.core.last_touched == []
    assert simulation.core.last_refusals == []


def test_an_evaluation_that_was_not_asked_for_changes_no_time_of_its_rank(simulate):
    """Its duration counted as the rank's last one, by which rounds are planned."""
    simulation = simulate(ranks(*UNEQUAL))
    in_mid_training(simulation)
    record = simulation.job.ranks[Rank(0)]
    before = record.reported_at_s, record.evaluation_ms, record.evaluated_ms
    simulation.handle(EvaluationDone(**address(simulation), epoch=0, sums={}, duration_ms=9_000.0))
    assert (record.reported_at_s, record.evaluation_ms, record.evaluated_ms) == before
