"""One job's life, from submission to result: what a training and a loop have in common."""

from abc import ABC, abstractmethod
from dataclasses import replace
from enum import Enum, auto

from elche_coordinator.core.life.hangs import Duty
from elche_coordinator.core.life.silence import SilenceWatch
from elche_coordinator.core.messages.commands import Command, Publish
from elche_coordinator.core.messages.events import (
    JobEvent,
    PingAnswered,
    PingSent,
    RankFailed,
    RankStarted,
    SessionLost,
    StacksTold,
    UserEventRecorded,
    WorkEvent,
)
from elche_coordinator.core.messages.ids import Attempt, GenerationId, Incarnation, JobId, Rank
from elche_coordinator.core.messages.reports import JobResult, Outcome, UserEvent
from elche_coordinator.core.messages.spec import JobSpec
from elche_coordinator.core.records.failure import Failure
from elche_coordinator.core.records.machine import JOB_PHASES, JobPhase, JobTrigger, Machine, RankPhase
from elche_coordinator.core.records.outbox import Outbox, Refusal
from elche_coordinator.core.records.ranks import RankRecord, RankRecords
from elche_coordinator.core.records.roster import Roster

STOP_GRACE_S = 5.0
"""Between asking a rank to leave and having its process ended."""

WATCHED = (JobPhase.GROUPING, JobPhase.TRAINING, JobPhase.FINISHING)
"""Phases in which ranks wait for each other."""


class Timer(Enum):
    """For what a job is called at a time."""

    DEADLINE = auto()
    """Ranks must have come, or left."""
    CHECK = auto()
    """Ranks may be silent."""


class Job(ABC):
    """One job. Its methods take in what happened and add to `outbox` what is to be done.

    An outcome is decided once; then the ranks leave; then the job has ended and has a result.
    """

    def __init__(
        self,
        job_id: JobId,
        spec: JobSpec,
        *,
        submitted_at: float,
        key: str = "",
        last_incarnation: Incarnation = Incarnation(0),  # noqa: B008
    ) -> None:
        self.id = job_id
        self.spec = spec
        self.key = key
        self.submitted_at = submitted_at
        self.reason = "waits for free slots"
        """Why the job is in its phase, in words for people."""
        self.began_s: dict[JobPhase, float] = {}
        """When each phase began, for people."""
        self.result: JobResult | None = None
        self.outbox = Outbox(job_id)
        self.roster = Roster(job_id, self.outbox, last_incarnation)
        self.timers: dict[Timer, float | None] = {}
        """In how many seconds the job is to be called, since `Coordinator` took them last; None: not any more."""
        self.silence = SilenceWatch(job_id, self.ranks, self.outbox, set_check=self._set_check)
        self.life: Machine[JobPhase, JobTrigger] = Machine(f"job {job_id}", JOB_PHASES, JobPhase.QUEUED)
        self._decided: tuple[Outcome, Failure | None] | None = None

    # What a training and a loop do each in its own way

    @property
    @abstractmethod
    def attempt(self) -> Attempt:
        """Raised whenever the job goes back to a checkpoint; 1 at first."""

    @property
    @abstractmethod
    def resume_point(self) -> str:
        """The checkpoint, or the folder of checkpoints, from which it would begin again; empty: from its start."""

    @property
    @abstractmethod
    def num_wanted(self) -> int:
        """How many ranks it is to have; 0 until it is placed, if the submission does not say."""

    @property
    @abstractmethod
    def can_begin_again(self) -> bool:
        """True when it can go on from `resume_point` with all of its processes gone."""

    @property
    @abstractmethod
    def generation_id(self) -> GenerationId:
        """The newest group of its ranks; 0 before the first."""

    @property
    @abstractmethod
    def is_paused(self) -> bool:
        """True while somebody has paused it."""

    @abstractmethod
    def on_work(self, record: RankRecord, event: WorkEvent, now_s: float) -> None:
        """What a rank reports of its work. What has no place now is refused, and changes nothing."""

    @abstractmethod
    def on_session_lost(self, record: RankRecord, now_s: float) -> None:
        """The rank's stream is lost."""

    @abstractmethod
    def has_batch_due(self, record: RankRecord) -> bool:
        """True while the rank trains, and neither waits for others nor does something else."""

    @abstractmethod
    def duties(self) -> dict[Rank, Duty]:
        """What each rank has to do now, and how long it may be silent."""

    @abstractmethod
    def on_hung(self, record: RankRecord, why: str, now_s: float) -> None:
        """Others wait for the rank in vain."""

    @abstractmethod
    def on_deadline(self) -> None:
        """The time set by `set_deadline` has passed."""

    @abstractmethod
    def save(self) -> None:
        """Has a checkpoint made. Called while it trains."""

    @abstractmethod
    def hold(self, now_s: float, *, is_paused: bool) -> None:
        """Has the ranks stop, or go on. Called while it trains."""

    @abstractmethod
    def work_done(self) -> dict[Rank, int]:
        """How much each rank has done, in any one unit: for shares."""

    @abstractmethod
    def complete(self, result: JobResult) -> JobResult:
        """The result with what has come of the job."""

    # Its life

    @property
    def phase(self) -> JobPhase:
        """Where the job is in its life."""
        return self.life.phase

    @property
    def is_open(self) -> bool:
        """True until its outcome is decided."""
        return self.life.accepts(JobTrigger.OUTCOME_DECIDED)

    @property
    def ranks(self) -> RankRecords:
        """Its ranks, also those that are gone."""
        return self.roster.ranks

    def advance(self, trigger: JobTrigger, reason: str) -> None:
        """Moves the job to its next phase, for this reason. Raises `Refused` when the trigger has no place now."""
        self.life.advance(trigger)
        self.reason = reason

    def set_deadline(self, delay_s: float | None) -> None:
        """Asks for `on_deadline` in so many seconds; None: not any more."""
        self.timers[Timer.DEADLINE] = delay_s

    def _set_check(self, delay_s: float | None) -> None:
        self.timers[Timer.CHECK] = delay_s

    def take_commands(self) -> list[Command]:
        """What is to be done since the last call."""
        return self.outbox.take()

    def take_refusals(self) -> list[Refusal]:
        """What was refused since the last call."""
        return self.outbox.take_refusals()

    def refuse(self, trigger: object, state: str, why: str) -> None:
        """The trigger, an event or its name, has no place in the state, and changes nothing."""
        self.outbox.refuse(trigger, state, why)

    def refuse_now(self, trigger: object, why: str) -> None:
        """The trigger has no place in the job's phase."""
        self.outbox.refuse(trigger, f"job is {self.phase}", why)

    # Events of ranks

    def take_in(self, record: RankRecord, event: JobEvent, now_s: float) -> None:
        """An event of a rank or its agent. What has no place now is refused, and changes nothing."""
        self.watch_silence(now_s)
        match event:
            case RankStarted():
                record.log_path = event.log_path
            case PingSent():
                self.silence.hangs.on_asked(record.rank, now_s)
            case PingAnswered():
                self.silence.hangs.on_answered(record.rank, now_s)
            case StacksTold():
                self.silence.on_stacks(record, event, now_s)
            case UserEventRecorded():
                self._on_user_event(event)
            case RankFailed():
                self._on_failed(event)
            case SessionLost():
                self.on_session_lost(record, now_s)
            case _:
                self.silence.on_heard(record, event, now_s)
                self.on_work(record, event, now_s)
                if not self.has_batch_due(record):
                    self.silence.on_alive(record, now_s)

    def watch_silence(self, now_s: float) -> None:
        """An event has come while ranks work together: schedules a check of their silence."""
        if self.phase in WATCHED:
            self.silence.watch(now_s)

    def check_silence(self, now_s: float) -> None:
        """The time of a check has come: tells of stalled ranks, and finds those that hang."""
        if self.phase not in WATCHED:
            self.silence.stop()
            return
        for rank, why in self.silence.check(self.duties(), now_s).items():
            self.on_hung(self.ranks[rank], why, now_s)

    def _on_user_event(self, event: UserEventRecorded) -> None:
        """Publishes an event of user code. Refused after the result, which is the last that watchers get."""
        if self.result is None:
            report = UserEvent(rank=event.rank, text=event.text, num_dropped=event.num_dropped)
            self.outbox.add(Publish(job_id=self.id, report=report))
        else:
            self.refuse_now(event, "nothing follows the result")

    def _on_failed(self, event: RankFailed) -> None:
        if self.is_open:
            failure = Failure(event.error, rank=event.rank, traceback=event.traceback, invalid=event.invalid)
            self.fail(failure)
        else:
            self.refuse_now(event, "its outcome is decided")

    # What clients and the shell ask for

    def request_checkpoint(self) -> None:
        """A client wants a checkpoint."""
        if self.phase is JobPhase.TRAINING:
            self.save()
        else:
            self.refuse_now("CheckpointRequested", "checkpoints are made only while it trains")

    def pause(self, now_s: float, *, is_paused: bool) -> None:
        """A client wants training to stop after the open round, or to go on."""
        if self.phase is JobPhase.TRAINING:
            self.hold(now_s, is_paused=is_paused)
            self.watch_silence(now_s)
        else:
            self.refuse_now("PauseRequested", "only what trains can stop, and go on")

    def cancel(self) -> None:
        """Ends the job by request. Nothing changes when its outcome is decided."""
        if self.is_open:
            self.decide(Outcome.CANCELLED, "cancelled by request")
        else:
            self.refuse_now("JobCancelled", "its outcome is decided")

    def on_broken(self, reason: str) -> None:
        """Something of the job could not be carried out. Nothing changes when its outcome is decided."""
        if self.is_open:
            self.fail(Failure(reason))
        else:
            self.refuse_now("JobBroken", "its outcome is decided")

    # End

    def fail(self, failure: Failure) -> None:
        """The job has failed. Raises `Refused` when its outcome is decided already."""
        self.decide(Outcome.FAILED, failure.error, failure)

    def decide(self, outcome: Outcome, reason: str, failure: Failure | None = None) -> None:
        """The outcome. Every rank is asked to leave. Raises `Refused` when it is decided already."""
        self.advance(JobTrigger.OUTCOME_DECIDED, reason)
        self._decided = (outcome, failure)
        for record in self.ranks.values():
            if record.is_done_without:
                self.roster.stop(record)
            elif record.phase is not RankPhase.EXITED:
                self.roster.shut_down(record, reason, failed=outcome is Outcome.FAILED)
        self.set_deadline(STOP_GRACE_S)
        self.end_if_gone()

    def end_if_gone(self) -> None:
        """The job has ended once its outcome is decided and no rank is left."""
        if self.phase is JobPhase.STOPPING and not self.roster.num_living:
            self.life.advance(JobTrigger.RANKS_GONE)
            self.set_deadline(None)
            self.result = self.decided_result()
            self.spec = replace(self.spec, replay=())  # whoever resumes the job goes on after it
            assert self.result is not None
            self.outbox.add(Publish(job_id=self.id, report=self.result))

    def decided_result(self) -> JobResult | None:
        """How it ends; None while that is not decided."""
        if self._decided is None:
            return None
        outcome, failure = self._decided
        result = JobResult(outcome=outcome, error="" if outcome is Outcome.SUCCEEDED else self.reason)
        if failure is not None:
            result = replace(result, traceback=failure.traceback, invalid=failure.invalid, failed_rank=failure.rank)
        return self.complete(result)
