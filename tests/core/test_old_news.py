"""Events that come late, twice, or from another time change nothing."""

from dataclasses import replace

import pytest

from elche.policies import POLICIES
from elche_coordinator.core.describe import describe_training
from elche_coordinator.core.life.job import STOP_GRACE_S
from elche_coordinator.core.messages.commands import SendSyncNow
from elche_coordinator.core.messages.events import (
    AgentLost,
    BatchesTrained,
    DeadlinePassed,
    EvaluationDone,
    FinalStateSaved,
    GroupFormed,
    JobCancelled,
    RankExited,
    RankFailed,
    RankReady,
    RankStarted,
    ResultReceived,
    RoundEntered,
    SessionLost,
)
from elche_coordinator.core.messages.ids import AgentId, JobId
from elche_coordinator.core.messages.reports import Outcome
from elche_coordinator.core.records.machine import JobPhase
from support.stories import UNEQUAL, at_phase, in_mid_training, submitted
from support.watched import WatchedSimulation, ranks


def test_a_revision_that_comes_after_the_rank_has_entered_changes_nothing(simulate):
    simulation = simulate(ranks(*UNEQUAL), dataset_size=3_000)
    process = None

    def has_entered_early() -> bool:
        nonlocal process
        opened = simulation.job.run.generation.rounds if simulation.job.run.generation else []
        if len(simulation.rounds) < 4 or not opened or len(opened[0].entered) != 1:
            return False
        process = simulation.processes[next(iter(opened[0].entered))]
        return True

    simulation.run_until(has_entered_early)
    opened = simulation.generation.rounds[0]
    late = SendSyncNow(**process.address, round=opened.id, generation=opened.generation, after_step=10_000)
    process.receive(late)
    simulation.run()
    assert simulation.job.result.outcome is Outcome.SUCCEEDED


def old_news(simulation: WatchedSimulation) -> dict[str, object]:
    """Messages of earlier generations, rounds and processes, of ranks and jobs that are not."""
    job = simulation.job
    rank = simulation.processes[0]
    address = rank.address
    batches = BatchesTrained(
        **address, local_step=10**6, num_processed=10**7, batch_ms=(1.0,) * 9, loss_sum=9.0, loss_count=1
    )
    received, open_id = simulation.events(ResultReceived)[-1], simulation.generation.rounds[0].id
    entered = RoundEntered(**address, generation=job.generation_id, round=open_id)
    return {
        "batches of an old process": replace(batches, incarnation=99),
        "batches of a rank that is not": replace(batches, rank=7),
        "batches of a job that is not": replace(batches, job_id="other"),
        "a round entered by an old process": replace(entered, incarnation=99),
        "a round entered in an old generation": replace(entered, generation=0),
        "a committed round entered": replace(entered, round=1),
        "a round entered that is not announced": replace(entered, round=10**6),
        "a committed round received again": received,
        "a round received in an old generation": replace(
            received, generation=0, round=simulation.generation.rounds[0].id
        ),
        "a round received by an old process": replace(
            received, incarnation=99, round=simulation.generation.rounds[0].id
        ),
        "a group formed again": GroupFormed(**address, generation=job.generation_id),
        "an old group formed": GroupFormed(**address, generation=0),
        "a rank ready again": RankReady(**address, settings=simulation.settings, device="cpu"),
        "an evaluation nobody asked for": EvaluationDone(**address, epoch=0, sums={"a": (1.0, 1)}, duration_ms=1.0),
        "a final state too early": FinalStateSaved(**address, path="early"),
        "the same job again": submitted("job", 2),
        "the end of an old process": RankExited(
            **(address | {"incarnation": 99}), agent_id=AgentId("host"), exit_code=-9
        ),
        "the end of a process, of which another host speaks": RankExited(
            **address, agent_id=AgentId("other"), exit_code=-9
        ),
        "the start of a process, of which another host speaks": RankStarted(
            **address, agent_id=AgentId("other"), log_path="/another"
        ),
        "the error of an old process": RankFailed(**(address | {"incarnation": 99}), error="old"),
        "the lost session of an old process": SessionLost(**(address | {"incarnation": 99})),
        "a cancelled job that is not": JobCancelled(job_id=JobId("other")),
        "a lost host that is not": AgentLost(agent_id=AgentId("other")),
    }


NEWS = 23


@pytest.mark.parametrize("index", range(NEWS))
def test_old_news_changes_nothing(simulate, index):
    simulation = simulate(ranks(*UNEQUAL), dataset_size=3_000)
    in_mid_training(simulation)
    news = old_news(simulation)
    assert len(news) == NEWS
    before = describe_training(simulation.job, 0.0)
    simulation.says_nothing(list(news.values())[index])
    assert describe_training(simulation.job, 0.0) == before
    assert simulation.run().outcome is Outcome.SUCCEEDED


def test_progress_told_before_changes_nothing(simulate):
    simulation = simulate(ranks(*UNEQUAL), dataset_size=3_000)
    in_mid_training(simulation)
    address = simulation.processes[0].address
    before = describe_training(simulation.job, 0.0)
    simulation.says_nothing(BatchesTrained(**address, local_step=1, num_processed=10, loss_sum=9.0, loss_count=1))
    assert describe_training(simulation.job, 0.0) == before


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("averaging", ["blocking", "overlapped"])
def test_every_event_twice_is_the_same_as_once(simulate, policy, averaging):
    options = {"dataset_size": 2_003, "epochs": 3, "has_evaluation": True, "policy": policy, "averaging": averaging}
    simulation = simulate(ranks(5, 11.5), send_twice=True, **options)
    assert simulation.run().outcome is Outcome.SUCCEEDED
    assert [report.epoch for report in simulation.evaluations] == [0, 1, 2]


def test_a_time_that_nothing_waits_for_changes_nothing(simulate):
    simulation = simulate(ranks(5, 11.5))
    in_mid_training(simulation, 1)
    assert simulation.core.next_deadline_s() > simulation.clock.now_s
    simulation.says_nothing(DeadlinePassed())
    simulation.run()
    simulation.clock.now_s += STOP_GRACE_S + 1
    simulation.says_nothing(DeadlinePassed())


def test_a_second_cancel_changes_nothing(simulate):
    simulation = simulate(ranks(5, 5))
    at_phase(simulation, JobPhase.TRAINING)
    simulation.handle(JobCancelled(job_id=JobId("job")))
    simulation.says_nothing(JobCancelled(job_id=JobId("job")))
    simulation.run()
    simulation.says_nothing(JobCancelled(job_id=JobId("job")))


def test_a_group_of_another_generation_is_not_the_one_that_is_waited_for(simulate):
    simulation = simulate(ranks(5, 11.5))
    at_phase(simulation, JobPhase.GROUPING)
    for generation in (0, 2):
        simulation.says_nothing(GroupFormed(**simulation.processes[0].address, generation=generation))
    assert simulation.run().outcome is Outcome.SUCCEEDED
