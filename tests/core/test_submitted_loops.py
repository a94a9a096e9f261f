"""Submitted loops: scripts with their own loop that agents start, all ranks on one host or none."""

import pickle
from typing import Any

import pytest

from elche.errors import LEFT_ALONE
from elche_coordinator.core.continuation import continuation
from elche_coordinator.core.coordinator import Coordinator
from elche_coordinator.core.invariants import check_invariants
from elche_coordinator.core.life.job import STOP_GRACE_S
from elche_coordinator.core.messages.commands import Command, SendShutdown, StartRank, StopRank
from elche_coordinator.core.messages.events import (
    AgentJoined,
    AgentLost,
    BatchesTrained,
    DeadlinePassed,
    DrainRequested,
    JobCancelled,
    JobSubmitted,
    LoopBegan,
    LoopEpochEnded,
    LoopLeft,
    RankExited,
    RankFailed,
    RankStarted,
    ScaleRequested,
    SessionLost,
    SessionOpened,
)
from elche_coordinator.core.messages.ids import AgentId, JobId, Rank
from elche_coordinator.core.messages.reports import JobResult, Outcome
from elche_coordinator.core.messages.spec import EpochWork, JobSpec, Slot

JOB, OTHER = JobId("loop"), JobId("other")
FIRST, SECOND = AgentId("first"), AgentId("second")


class Cluster:
    """A coordinator with hosts of CPUs. Every event is followed by a check of the rules and a restart."""

    def __init__(self) -> None:
        self.core = Coordinator()
        self.now_s = 100.0

    def handle(self, event: Any, after_s: float = 1.0) -> list[Command]:
        self.now_s += after_s
        commands = self.core.handle(event, now_s=self.now_s)
        check_invariants(self.core)
        ended = self.core.result(JOB) is not None
        self.core = self.core if ended else pickle.loads(pickle.dumps(self.core))
        return commands

    def host(self, agent_id: AgentId, num_slots: int, **more: Any) -> list[Command]:
        slots = (Slot(device="cpu"),) * num_slots
        return self.handle(AgentJoined(agent_id=agent_id, host=str(agent_id), slots=slots, **more))

    def submit(self, num_ranks: int = 2, job_id: JobId = JOB, **more: Any) -> list[Command]:
        spec = JobSpec(
            name="loop", source_hash="hash", file_name="loop.py", num_ranks=num_ranks, **{"is_loop": True, **more}
        )
        return self.handle(JobSubmitted(job_id=job_id, spec=spec, submitted_at=self.now_s))

    def of(self, rank: int, job_id: JobId = JOB) -> dict[str, Any]:
        return self.core.jobs[job_id].ranks[Rank(rank)].address

    def begin(self) -> None:
        """All ranks of the job start and set up their trainers."""
        for rank in self.core.jobs[JOB].ranks:
            agent_id = self.core.jobs[JOB].ranks[rank].agent_id
            self.handle(RankStarted(**self.of(rank), agent_id=agent_id, log_path=f"/logs/rank-{rank}.log"))
            self.handle(SessionOpened(**self.of(rank)))
            self.handle(LoopBegan(**self.of(rank), policy="El Che"))

    def exit(self, rank: int, code: int, log_tail: str = "", after_s: float = 1.0) -> list[Command]:
        agent_id = self.core.jobs[JOB].ranks[Rank(rank)].agent_id
        event = RankExited(**self.of(rank), agent_id=agent_id, exit_code=code, log_tail=log_tail)
        return self.handle(event, after_s)

    @property
    def state(self) -> str:
        view = self.core.view(JOB, self.now_s)
        assert view is not None
        return view.state

    @property
    def reason(self) -> str:
        view = self.core.view(JOB, self.now_s)
        assert view is not None
        return view.reason

    @property
    def result(self) -> JobResult:
        result = self.core.result(JOB)
        assert result is not None
        return result


def started(commands: list[Command]) -> list[tuple[AgentId, int, tuple[int, ...]]]:
    return [(one.agent_id, one.rank, one.loop_slots) for one in commands if isinstance(one, StartRank)]


@pytest.fixture
def training() -> Cluster:
    """A cluster whose one job of two ranks trains."""
    cluster = Cluster()
    cluster.host(FIRST, 2)
    assert len(started(cluster.submit())) == 2
    cluster.begin()
    assert cluster.state == "training"
    return cluster


def test_a_loop_waits_until_one_host_has_slots_for_all_its_ranks() -> None:
    cluster = Cluster()
    cluster.host(FIRST, 1)
    assert started(cluster.submit()) == []
    assert (cluster.state, cluster.reason) == (
        "queued",
        "waits for 2 free slots on one host: 1 of 1 slots are free; no host offers so many, and all ranks of a script "
        "with its own loop are on one: submit it with fewer",
    )
    placed = cluster.host(SECOND, 3)
    assert started(placed) == [(SECOND, 0, (0, 1)), (SECOND, 1, (0, 1))], (
        "all on one host, though there was room before"
    )
    assert cluster.state == "starting"


@pytest.mark.parametrize(
    ("num_ranks", "reason"),
    [
        (1, "waits for 1 free slot: no host offers any; start more workers"),
        (2, "waits for 2 free slots on one host: no host offers any; start more workers"),
    ],
)
def test_a_loop_waits_for_workers_while_there_are_none(num_ranks: int, reason: str) -> None:
    cluster = Cluster()
    cluster.submit(num_ranks)
    assert cluster.reason == reason


def test_a_loop_gets_its_slots_when_the_job_before_it_has_ended() -> None:
    cluster = Cluster()
    cluster.host(FIRST, 2)
    cluster.submit(1, OTHER)
    assert started(cluster.submit()) == []
    assert cluster.reason == "waits for 2 free slots on one host: 1 of 2 slots are free"
    ended = RankExited(**cluster.of(0, OTHER), agent_id=FIRST, exit_code=0)
    assert len(started(cluster.handle(ended))) == 2


def test_the_host_with_most_free_slots_is_taken_whole_by_a_loop_without_a_number_of_ranks() -> None:
    cluster = Cluster()
    cluster.host(FIRST, 1)
    cluster.host(SECOND, 3)
    assert [(agent, rank) for agent, rank, _ in started(cluster.submit(0))] == [(SECOND, rank) for rank in range(3)]


def test_it_trains_once_every_rank_has_set_up_its_trainer() -> None:
    cluster = Cluster()
    cluster.host(FIRST, 2)
    cluster.submit()
    cluster.handle(SessionOpened(**cluster.of(0)))
    cluster.handle(LoopBegan(**cluster.of(0), policy="El Che"))
    assert cluster.state == "starting"
    cluster.handle(SessionOpened(**cluster.of(1)))
    cluster.handle(LoopBegan(**cluster.of(1), policy="El Che"))
    view = cluster.core.view(JOB, cluster.now_s)
    assert view is not None
    assert (view.state, view.policy, len(view.ranks)) == ("training", "El Che", 2)


def test_it_succeeds_when_all_processes_have_exited_with_code_0_and_no_sooner(training: Cluster) -> None:
    for rank in (0, 1):
        event = BatchesTrained(**training.of(rank), local_step=5, num_processed=50, batch_ms=(20.0,))
        training.handle(event)
        work = EpochWork(epoch=0, num_batches=5, num_samples=50, loss_sum=2.5)
        training.handle(LoopEpochEnded(**training.of(rank), work=work, duration_s=3.0, num_done=100))
        training.handle(LoopLeft(**training.of(rank)))
    training.handle(SessionLost(**training.of(0)))
    assert training.state == "training", "the scripts may go on after their loops"
    for _ in range(60):
        training.handle(DeadlinePassed(), after_s=2.0)
    assert training.reason == "trains, in a loop of its own", "nor are they stalled"
    training.exit(0, 0)
    assert training.state == "training"
    training.exit(1, 0)
    assert (training.result.outcome, training.result.committed_samples) == (Outcome.SUCCEEDED, (100,))
    assert not training.core.fleet.taken


def test_a_rank_that_was_silent_and_ends_its_loop_is_silent_no_more(training: Cluster) -> None:
    assert training.core.has_session_due(training.of(0))
    for rank in (0, 1):
        training.handle(BatchesTrained(**training.of(rank), local_step=5, num_processed=50, batch_ms=(20.0,)))
    for _ in range(60):
        training.handle(DeadlinePassed(), after_s=2.0)
    assert [training.core.jobs[JOB].silence.since_s(Rank(rank)) is None for rank in (0, 1)] == [False, False]
    training.handle(LoopLeft(**training.of(0)))
    assert [training.core.jobs[JOB].silence.since_s(Rank(rank)) is None for rank in (0, 1)] == [True, False]
    assert not training.core.has_session_due(training.of(0)), "its script may go on without one"


def test_a_script_that_sets_up_no_trainer_succeeds_too() -> None:
    cluster = Cluster()
    cluster.host(FIRST, 1)
    cluster.submit(1)
    cluster.exit(0, 0)
    assert cluster.result.outcome is Outcome.SUCCEEDED


def test_a_rank_that_exits_with_another_code_ends_the_others(training: Cluster) -> None:
    training.exit(0, 0)
    training.exit(1, 3, "Traceback ...\nValueError: on purpose\n")
    assert training.result.error == (
        "rank 1 on first (cpu) left with exit code 3 at batch 0; its log is /logs/rank-1.log: ValueError: on purpose"
    )


def test_a_rank_that_dies_ends_the_others(training: Cluster) -> None:
    commands = training.exit(1, -9)
    assert [type(one) for one in commands if not hasattr(one, "report")] == [SendShutdown]
    assert training.state == "stopping"
    commands = training.handle(DeadlinePassed(), after_s=STOP_GRACE_S)
    assert [(type(one), one.rank) for one in commands] == [(StopRank, 0)]  # type: ignore[attr-defined]
    training.exit(0, -1)
    assert (training.result.outcome, training.result.failed_rank) == (Outcome.FAILED, 1)
    assert training.result.error.startswith("rank 1 on first (cpu) was killed by signal 9 (often: out of memory)")
    assert not training.core.fleet.taken


def test_who_has_lost_another_is_not_the_reason(training: Cluster) -> None:
    training.exit(0, LEFT_ALONE)
    assert training.state == "training"
    training.exit(1, -9)
    assert training.result.error.startswith("rank 1 on first (cpu) was killed by signal 9")


def test_who_has_lost_another_ends_the_loop_if_nothing_else_is_known_of_it(training: Cluster) -> None:
    training.exit(0, LEFT_ALONE)
    training.handle(DeadlinePassed(), after_s=STOP_GRACE_S)
    assert training.state == "stopping"
    training.exit(1, 0)
    assert training.result.error.startswith("rank 0 on first (cpu) has lost the processes that it works with")


def test_all_that_have_lost_others_fail_the_loop(training: Cluster) -> None:
    training.exit(0, LEFT_ALONE)
    training.exit(1, LEFT_ALONE)
    assert (training.result.outcome, training.result.failed_rank) == (Outcome.FAILED, 0)


def test_a_rank_that_reports_its_error_ends_the_others(training: Cluster) -> None:
    commands = training.handle(RankFailed(**training.of(1), error="ValueError: on purpose, on rank 1 at batch 7"))
    assert sorted(one.rank for one in commands if isinstance(one, SendShutdown)) == [0, 1]
    training.exit(1, 1)
    training.exit(0, 0)
    assert training.result.error == "ValueError: on purpose, on rank 1 at batch 7"


def test_a_lost_host_fails_it(training: Cluster) -> None:
    training.handle(AgentLost(agent_id=FIRST))
    assert training.result.error == "rank 0 is lost: its host first is gone"


def test_cancelling_it_in_the_queue_while_it_starts_and_while_it_trains(training: Cluster) -> None:
    queued = Cluster()
    queued.submit()
    queued.handle(JobCancelled(job_id=JOB))
    assert queued.result.outcome is Outcome.CANCELLED
    starting = Cluster()
    starting.host(FIRST, 2)
    starting.submit()
    commands = starting.handle(JobCancelled(job_id=JOB))
    assert [type(one) for one in commands] == [StopRank, StopRank]
    for rank in (0, 1):
        starting.exit(rank, -1)
    assert starting.result.outcome is Outcome.CANCELLED
    commands = training.handle(JobCancelled(job_id=JOB))
    assert [type(one) for one in commands] == [SendShutdown, SendShutdown]
    for rank in (0, 1):
        training.exit(rank, 0)
    assert training.result.outcome is Outcome.CANCELLED


def test_it_gives_no_slots_and_keeps_its_number_of_ranks(training: Cluster) -> None:
    training.submit(1, OTHER, is_loop=False, priority=5)
    assert training.core.asked == []
    assert training.handle(ScaleRequested(job_id=JOB, num_ranks=1)) == []
    assert training.handle(DrainRequested(agent_id=FIRST, is_drained=True)) == []
    assert training.handle(DrainRequested(agent_id=FIRST, is_drained=False)) == []
    assert (training.state, len(training.core.jobs[JOB].ranks)) == ("training", 2)


def test_one_that_waits_is_queued_by_a_coordinator_of_another_version_and_one_that_runs_has_failed(
    training: Cluster,
) -> None:
    waiting = Cluster()
    waiting.submit(resume="/checkpoints")
    kept = continuation(waiting.core.jobs[JOB])
    assert (kept.end, kept.resume) == (None, "/checkpoints")
    end = continuation(training.core.jobs[JOB]).end
    assert end is not None
    assert end.outcome is Outcome.FAILED


@pytest.mark.parametrize("rank", [2, 4])
def test_a_slowed_rank_that_it_does_not_have_fails_it(rank: int) -> None:
    cluster = Cluster()
    cluster.host(FIRST, 2)
    cluster.submit(0, slow_factors={rank: 2.0})
    assert cluster.result.error == f"rank {rank} cannot be slowed: the job has 2 ranks, from 0"
    assert not cluster.core.fleet.taken
