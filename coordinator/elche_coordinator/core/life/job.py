"""The life of a job, from submission to result: the common base of trainings and loops."""

from abc import ABC, abstractmethod
from dataclasses import replace
from enum import Enum, auto

from elche_coordinator.core.life.hangs import Duty
from elche_coordinator.core.life.silence import SilenceWatch
from elche_coordinator.core.messages.events import (
    JobBroken,
    JobEvent,
    JobSubmitted,
    LoopAttached,
    PingAnswered,
    PingSent,
    RankFailed,
    RankStarted,
    SessionLost,
    StacksReported,
    UserEventRecorded,
    WorkEvent,
)
from elche_coordinator.core.messages.ids import Attempt, GenerationId, Incarnation, Rank
from elche_coordinator.core.messages.reports import ENDED_EARLY, JobResult, Outcome, UserEvent
from elche_coordinator.core.messages.spec import JobSpec
from elche_coordinator.core.records.failure import Failure
from elche_coordinator.core.records.machine import JOB_PHASES, JobPhase, JobTrigger, Machine, RankPhase
from elche_coordinator.core.records.outbox import Outbox
from elche_coordinator.core.records.ranks import RankRecord, RankRecords
from elche_coordinator.core.records.roster import Roster

STOP_GRACE_S = 5.0
"""Seconds between asking a rank to leave and having its process ended."""

WATCHED = (JobPhase.GROUPING, JobPhase.TRAINING, JobPhase.FINISHING)
"""Phases in which ranks wait for each other."""


class Timer(Enum):
    """Reasons for which a job is called at a set time."""

    DEADLINE = auto()
    """Time by which ranks must have connected, or left."""
    CHECK = auto()
    """Check for silent ranks."""


class Job(ABC):
    """One job. Its methods handle events and add commands to `outbox`.

    An outcome is decided once; then the ranks leave; then the job has ended and has a result.
    """

    def __init__(self, event: JobSubmitted | LoopAttached) -> None:
        self.id = event.job_id
        self.spec = event.spec
        """The submission, as the client sent it."""
        self.key = event.key if isinstance(event, JobSubmitted) else ""
        """The client's key for the submission, by which a repeated one is recognized; empty: it sent none."""
        self.submitted_at = event.submitted_at
        """Time of the submission, in seconds since 1970."""
        self.reason = "waits for free slots"
        """The reason of the job's phase, for people."""
        self.began_s: dict[JobPhase, float] = {}
        """Time at which each phase began, for people."""
        self.result: JobResult | None = None
        """Set once, when the outcome is decided and no process is left; the job changes no more then."""
        self.outbox = Outbox(self.id)
        """Commands and refusals since `Coordinator` took them."""
        before = event.last_incarnation if isinstance(event, JobSubmitted) else Incarnation(0)
        self.roster = Roster(self.outbox, before)
        """Its ranks' records, and the start and end of their processes."""
        self.timers: dict[Timer, float | None] = {}
        """Changes of timers since `Coordinator` took them, in seconds from now; None: cancelled."""
        self.silence = SilenceWatch(self.ranks, self.outbox, set_check=self._set_check)
        self.life: Machine[JobPhase, JobTrigger] = Machine(f"job {self.id}", JOB_PHASES, JobPhase.QUEUED)
        self._decided: tuple[Outcome, Failure | None] | None = None
        """The outcome, and the failure if there was one; None while the job is open. Never changed once set."""

    # Implemented by trainings and loops

    @property
    @abstractmethod
    def attempt(self) -> Attempt:
        """Number of the attempt, from 1; each return to a checkpoint raises it."""

    @property
    def resumption(self) -> JobSpec:
        """The submission with which it would begin again; without `resume` it would start over."""
        return self.spec

    @property
    @abstractmethod
    def num_wanted(self) -> int:
        """The number of ranks that it should have; 0 until it is placed, if the submission has none."""

    @property
    @abstractmethod
    def can_begin_again(self) -> bool:
        """True if it can begin again, with `resumption`, after all of its processes have ended."""

    @property
    @abstractmethod
    def generation_id(self) -> GenerationId:
        """The newest generation of its ranks; 0 before the first."""

    @property
    @abstractmethod
    def is_paused(self) -> bool:
        """True while a client has paused it."""

    @abstractmethod
    def on_work(self, record: RankRecord, event: WorkEvent, now_s: float) -> None:
        """Handles a rank's report of its work; refuses, unchanged, one that does not fit the present state."""

    @abstractmethod
    def on_session_lost(self, record: RankRecord, now_s: float) -> None:
        """Handles the loss of a rank's stream."""

    @abstractmethod
    def has_batch_due(self, record: RankRecord) -> bool:
        """True while the rank trains, and neither waits for others nor does something else."""

    @abstractmethod
    def duties(self) -> dict[Rank, Duty]:
        """Each rank's present duty, with the silence that it may keep."""

    @abstractmethod
    def on_hung(self, record: RankRecord, duty: Duty, why: str, now_s: float) -> None:
        """Handles a hung rank, for which others wait."""

    @abstractmethod
    def on_deadline(self) -> None:
        """Called when the time of `set_deadline` has passed."""

    @abstractmethod
    def save(self) -> None:
        """Requests a checkpoint. Called only while it trains."""

    @abstractmethod
    def hold(self, now_s: float, *, is_paused: bool) -> None:
        """Has the ranks stop, or go on. Called only while it trains."""

    @abstractmethod
    def work_done(self) -> dict[Rank, int]:
        """Work of each rank, in a unit of the job's choice; views show each rank's share of the sum."""

    @abstractmethod
    def complete(self, result: JobResult) -> JobResult:
        """Adds the job's figures to the result."""

    # Its life

    @property
    def phase(self) -> JobPhase:
        """The job's phase."""
        return self.life.phase

    @property
    def is_open(self) -> bool:
        """True until its outcome is decided."""
        return self.life.accepts(JobTrigger.OUTCOME_DECIDED)

    @property
    def ended_early(self) -> str:
        """Why training has ended before its last epoch's end; empty if it has not."""
        return ""

    @property
    def ranks(self) -> RankRecords:
        """Its ranks, including lost ones."""
        return self.roster.ranks

    def advance(self, trigger: JobTrigger, reason: str) -> None:
        """Moves the job to its next phase, with a reason. Raises `Refused` if the phase does not allow the trigger."""
        self.life.advance(trigger)
        self.reason = reason

    def set_deadline(self, delay_s: float | None) -> None:
        """Schedules `on_deadline` in `delay_s` seconds; None cancels it."""
        self.timers[Timer.DEADLINE] = delay_s

    def _set_check(self, delay_s: float | None) -> None:
        self.timers[Timer.CHECK] = delay_s

    def refuse_now(self, trigger: object, why: str) -> None:
        """Records that the trigger does not fit the job's phase."""
        self.outbox.refuse(trigger, f"job is {self.phase}", why)

    # Events of ranks

    def take_in(self, record: RankRecord, event: JobEvent, now_s: float) -> None:
        """Handles an event of a rank or its agent; refuses, unchanged, one that does not fit the present state."""
        self.watch_silence(now_s)
        match event:
            case RankStarted():
                record.log_path = event.log_path
            case PingSent():
                self.silence.hangs.on_asked(record.rank, now_s)
            case PingAnswered():
                self.silence.hangs.on_answered(record.rank, now_s)
            case StacksReported():
                self.silence.on_stacks(record, event, now_s)
            case UserEventRecorded():
                self.on_user_event(event)
            case RankFailed():
                self._on_failed(event)
            case SessionLost():
                self.on_session_lost(record, now_s)
            case _:
                # Before the job takes the event in: it is compared with what the record says until then.
                self.silence.on_message(record, event, now_s)
                self.on_work(record, event, now_s)
                if not self.has_batch_due(record):
                    self.silence.on_alive(record, now_s)

    def watch_silence(self, now_s: float) -> None:
        """Schedules a check for silent ranks, if ranks work together now."""
        if self.phase in WATCHED:
            self.silence.watch(now_s)

    def check_silence(self, now_s: float) -> None:
        """Reports stalled ranks and handles hung ones. Called at the scheduled time."""
        if self.phase not in WATCHED:
            self.silence.stop()
            return
        duties = self.duties()
        for rank, why in self.silence.check(duties, now_s).items():
            self.on_hung(self.ranks[rank], duties[rank], why, now_s)

    def on_user_event(self, event: UserEventRecorded) -> None:
        """Publishes an event of user code. Refused after the result, which is the last report to watchers."""
        if self.result is None:
            report = UserEvent(rank=event.rank, text=event.text, num_dropped=event.num_dropped, is_of_user=True)
            self.outbox.publish(report)
        else:
            self.refuse_now(event, "nothing follows the result")

    def _on_failed(self, event: RankFailed) -> None:
        if self.is_open:
            failure = Failure(event.error, rank=event.rank, traceback=event.traceback, invalid=event.invalid)
            self.fail(failure)
        else:
            self.refuse_now(event, "its outcome is decided")

    # Requests of clients and the shell

    def request_checkpoint(self) -> None:
        """Requests a checkpoint for a client."""
        if self.phase is JobPhase.TRAINING:
            self.save()
        else:
            self.refuse_now("CheckpointRequested", "checkpoints are made only while it trains")

    def pause(self, now_s: float, *, is_paused: bool) -> None:
        """Has training stop after the open round, or go on, for a client."""
        if self.phase is JobPhase.TRAINING:
            self.hold(now_s, is_paused=is_paused)
            self.watch_silence(now_s)
        else:
            self.refuse_now("PauseRequested", "only a job that trains can be paused or resumed")

    def cancel(self) -> None:
        """Cancels the job. Does nothing once its outcome is decided."""
        if self.is_open:
            self.decide(Outcome.CANCELLED, "cancelled by request")
        else:
            self.refuse_now("JobCancelled", "its outcome is decided")

    def on_broken(self, event: JobBroken, now_s: float) -> None:
        """Fails the job because a command could not be carried out. Does nothing once its outcome is decided."""
        if self.is_open:
            self.fail(Failure(event.reason))
        else:
            self.refuse_now("JobBroken", "its outcome is decided")

    # End

    def fail(self, failure: Failure) -> None:
        """Fails the job. Raises `Refused` when its outcome is decided already."""
        self.decide(Outcome.FAILED, failure.error, failure)

    def decide(self, outcome: Outcome, reason: str, failure: Failure | None = None) -> None:
        """Decides the outcome, and asks every rank to leave. Raises `Refused` when it is decided already."""
        self.advance(JobTrigger.OUTCOME_DECIDED, reason)
        self._decided = (outcome, failure)
        told = ENDED_EARLY if outcome is Outcome.SUCCEEDED and self.ended_early else outcome
        for record in self.ranks.values():
            # It has been asked to exit, or is left out. A suspended one (SIGSTOP) has had its time to continue.
            if record.is_done_without:
                self.roster.stop(record)
            elif record.phase is not RankPhase.EXITED:
                self.roster.shut_down(record, reason, outcome=told)
        self.set_deadline(STOP_GRACE_S)
        self.end_if_gone()  # a job without processes gets no event that would end it

    def end_if_gone(self) -> None:
        """Ends the job if its outcome is decided and no rank is left."""
        if self.phase is JobPhase.STOPPING and not self.roster.num_living:
            self.life.advance(JobTrigger.RANKS_GONE)
            self.set_deadline(None)
            self.result = self.decided_result()
            self.spec = replace(self.spec, replay=())  # a job that resumes this one goes on after the recording
            assert self.result is not None
            self.outbox.publish(self.result)

    def decided_result(self) -> JobResult | None:
        """The decided result; None before."""
        if self._decided is None:
            return None
        outcome, failure = self._decided
        result = JobResult(outcome=outcome, error="" if outcome is Outcome.SUCCEEDED else self.reason)
        if failure is not None:
            result = replace(result, traceback=failure.traceback, invalid=failure.invalid, failed_rank=failure.rank)
        return self.complete(result)
