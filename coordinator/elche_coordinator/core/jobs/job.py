"""One job's life, from submission to result. What runs in it is its body: a managed training or an attached loop."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from enum import Enum, auto
from itertools import count

from elche_coordinator.core.jobs.body import Body
from elche_coordinator.core.jobs.deaths import RESTART_S, Death, Deaths
from elche_coordinator.core.jobs.notices import hang_notice
from elche_coordinator.core.jobs.silence import SilenceWatch
from elche_coordinator.core.messages.commands import Command, Publish, SendShutdown, StartRank, StopRank
from elche_coordinator.core.messages.events import (
    JobEvent,
    PingAnswered,
    PingSent,
    RankFailed,
    RankStarted,
    SessionLost,
    StacksTold,
    UserEventRecorded,
)
from elche_coordinator.core.messages.ids import Incarnation, JobId, Rank
from elche_coordinator.core.messages.reports import JobResult, MembershipReport, Outcome, UserEvent
from elche_coordinator.core.messages.spec import JobSpec
from elche_coordinator.core.records.fleet import Fleet, Place
from elche_coordinator.core.records.machine import (
    JOB_PHASES,
    RANK_PHASES,
    JobPhase,
    JobTrigger,
    Machine,
    RankPhase,
    RankTrigger,
)
from elche_coordinator.core.records.outbox import Outbox, Refusal
from elche_coordinator.core.records.ranks import RankRecord, RankRecords, highest_staying, present, staying

STOP_GRACE_S = 5.0
"""Between asking a rank to leave and having its process ended."""
KILL_GRACE_S = 2.0
"""Between an agent's asking a process to end and killing it."""
WATCHED = (JobPhase.GROUPING, JobPhase.TRAINING, JobPhase.FINISHING)
"""Phases in which ranks wait for each other."""
MAX_FRUITLESS = 3
"""Attempts in a row that may come to no checkpoint."""


class Timer(Enum):
    """For what a job is called at a time."""

    DEADLINE = auto()
    """Ranks must have come, or left."""
    CHECK = auto()
    """Ranks may be silent."""


class Job:
    """The record of one job. Its methods take in what happened and add to `outbox` what is to be done.

    Whoever makes a job gives it its `body` before anything happens.
    """

    body: Body

    def __init__(
        self,
        job_id: JobId,
        spec: JobSpec,
        *,
        submitted_at: float,
        key: str = "",
        last_incarnation: Incarnation = Incarnation(0),  # noqa: B008
    ):
        self.id = job_id
        self.spec = spec
        self.key = key
        self.submitted_at = submitted_at
        self.last_incarnation = last_incarnation
        """The highest that any of its ranks has had."""
        self.reason = "waits for free slots"
        """Why the job is in its phase, in words for people."""
        self.began_s: dict[JobPhase, float] = {}
        """When each phase began, for people."""
        self.ranks: RankRecords = {}
        self.num_lost_ranks = 0
        """Ranks that died or were lost while the job went on."""
        self.missing: dict[Rank, float] = {}
        """Ranks that are to be started again, and not before which time."""
        self.num_wanted = spec.num_ranks
        """How many ranks it is to have; 0 until it is placed, if the submission does not say."""
        self._gives: frozenset[Incarnation] = frozenset()
        """Processes that leave their slots to another job."""
        self.retry_at_s = 0.0
        """When a job that has gone back may be placed again."""
        self._num_fruitless = 0
        """Attempts in a row without a checkpoint."""
        self._deaths = Deaths()
        self.result: JobResult | None = None
        self.outbox = Outbox(job_id)
        self.timers: dict[Timer, float | None] = {}
        """In how many seconds the job is to be called, since `Coordinator` took them last; None: not any more."""
        self.silence = SilenceWatch(job_id, self.ranks, self.outbox, set_check=self._set_check)
        self.life: Machine[JobPhase, JobTrigger] = Machine(f"job {job_id}", JOB_PHASES, JobPhase.QUEUED)
        self._census: Counter[RankPhase] = Counter()
        """How many ranks are in each phase."""
        self._decided: tuple[Outcome, RankFailed | None] | None = None

    def set_deadline(self, delay_s: float | None) -> None:
        """Asks for `on_deadline` in so many seconds; None: not any more."""
        self.timers[Timer.DEADLINE] = delay_s

    def _set_check(self, delay_s: float | None) -> None:
        self.timers[Timer.CHECK] = delay_s

    @property
    def phase(self) -> JobPhase:
        """Where the job is in its life."""
        return self.life.phase

    @property
    def is_open(self) -> bool:
        """Whether its outcome is not decided."""
        return self.life.accepts(JobTrigger.OUTCOME_DECIDED)

    def advance(self, trigger: JobTrigger, reason: str) -> None:
        """Moves the job to its next phase, for this reason. Raises `Refused` when the trigger has no place now."""
        self.life.advance(trigger)
        self.reason = reason

    def num_in(self, phase: RankPhase) -> int:
        """How many of its ranks are in the phase."""
        return self._census[phase]

    def new_life(self) -> Machine[RankPhase, RankTrigger]:
        """The life of a new rank of this job."""
        return Machine("rank", RANK_PHASES, RankPhase.STARTING, self._census)

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

    # Places

    def refuse_places(self, num_places: int) -> bool:
        """Fails the job if it slows a rank that does not exist with so many places. Returns whether it did."""
        num_ranks = max(num_places, self.spec.num_ranks)  # others may come later
        if missing := [rank for rank in self.spec.slow_factors if rank >= num_ranks]:
            self.fail(f"rank {missing[0]} cannot be slowed: the job has {num_ranks} ranks, from 0", invalid=True)
        return bool(missing)

    def place(self, groups: list[tuple[Place, ...]], fleet: Fleet, next_incarnation: Callable[[], Incarnation]) -> None:
        """Starts one rank in each place, or group of places of one host."""
        self.advance(JobTrigger.PLACED, "its ranks load the file")
        self.ranks.clear()  # of an attempt before this one
        self._census.clear()
        self.num_wanted = self.spec.num_ranks or len(groups)
        for index, places in enumerate(groups):
            self._start(Rank(index), places, fleet, next_incarnation(), self.spec)

    def place_again(
        self, rank: Rank, places: tuple[Place, ...], fleet: Fleet, next_incarnation: Callable[[], Incarnation]
    ) -> None:
        """Starts a rank anew that is gone. It gets the model of the others, whatever the job was resumed from."""
        self.missing.pop(rank, None)
        before = self.ranks.get(rank)
        record = self._start(rank, places, fleet, next_incarnation(), replace(self.spec, resume=""))
        if before is not None:
            self._census[before.phase] -= 1
            record.take_over(before)

    @property
    def num_held(self) -> int:
        """Ranks that it has, or is to get again."""
        return len(self.ranks) - self._census[RankPhase.EXITED] + len(self.missing)

    @property
    def num_lacking(self) -> int:
        """How many ranks could be added."""
        is_whole = self.phase not in (JobPhase.GROUPING, JobPhase.TRAINING) or bool(self.spec.replay)
        return 0 if is_whole else max(0, self.num_wanted - self.num_held)

    @property
    def next_rank(self) -> Rank | None:
        """The rank that is to be added, if it is below its number: the lowest that nobody is."""
        taken = {rank for rank, one in self.ranks.items() if one.phase is not RankPhase.EXITED} | self.missing.keys()
        return next(rank for rank in map(Rank, count()) if rank not in taken) if self.num_lacking else None

    @property
    def can_scale(self) -> bool:
        """Whether its number of ranks can be changed."""
        return self.is_open and not self.spec.replay and not self.spec.is_loop

    def scale(self, num_ranks: int, now_s: float) -> None:
        """Sets how many ranks it is to have. Those that are too many leave, the highest first."""
        if not self.can_scale:
            self.refuse_now("ScaleRequested", "it has ended, repeats a recording, or is a loop of the user's own")
            return
        self.num_wanted = num_ranks
        self.spec = replace(self.spec, num_ranks=num_ranks, min_ranks=min(self.spec.min_ranks, num_ranks))
        for rank in sorted(self.missing, reverse=True)[: max(0, self.num_held - num_ranks)]:
            del self.missing[rank]
        num_too_many = max(0, len(staying(self.ranks)) + len(self.missing) - num_ranks)
        self.body.leave(highest_staying(self.ranks, num_too_many), now_s)

    def give_slots(self, num_ranks: int, to: JobId, now_s: float) -> None:
        """Has so many ranks leave, the highest first. If all do, it waits in the queue, at a checkpoint made for it."""
        leaving = highest_staying(self.ranks, num_ranks)
        self._gives |= {record.incarnation for record in leaving}
        self.reason = f"{len(leaving)} ranks leave their slots to job {to}"
        self.body.leave(leaving, now_s)

    def _start(
        self, rank: Rank, places: tuple[Place, ...], fleet: Fleet, incarnation: Incarnation, spec: JobSpec
    ) -> RankRecord:
        self.last_incarnation = incarnation
        first, *others = places
        agent = fleet.agents[first.agent_id]
        devices = tuple(agent.slots[place.slot].device for place in places)
        record = RankRecord(
            rank=rank,
            incarnation=incarnation,
            agent_id=first.agent_id,
            slot=first.slot,
            more_slots=tuple(place.slot for place in others),
            host=agent.host,
            device=f"{len(devices)}x {devices[0].partition(':')[0]}" if others else devices[0],
            slot_devices=devices,
            life=self.new_life(),
            has_start=spec.resume == self.spec.resume,
        )
        self.ranks[rank] = record
        start = StartRank(
            **record.address(self.id),
            agent_id=first.agent_id,
            slot=first.slot,
            more_slots=record.more_slots,
            spec=spec,
            warms_up=self.phase is JobPhase.TRAINING,
        )
        self.outbox.add(start)
        return record

    # Events of ranks, agents and clients

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
                if self.is_open:
                    self.decide(Outcome.FAILED, event.error, event)
                else:
                    self.refuse_now(event, "its outcome is decided")
            case SessionLost():
                self.body.on_session_lost(record)
            case _:
                self.silence.on_heard(record, event, now_s)
                self.body.take_in(record, event, now_s)
                if not self.body.has_batch_due(record):
                    self.silence.on_alive(record, now_s)

    def watch_silence(self, now_s: float) -> None:
        """An event has come while ranks work together: schedules a check of their silence."""
        if self.phase in WATCHED:
            self.silence.watch(now_s)

    def check_silence(self, now_s: float) -> None:
        """Tells of stalled ranks, and leaves out those that others wait for in vain."""
        if self.phase not in WATCHED:
            self.silence.stop()
            return
        stalls, there = self.silence.stalls, present(self.ranks)
        duties = {rank: self.body.duty(record, stalls) for rank, record in there.items() if record.is_connected}
        for rank, why in self.silence.check(duties, now_s).items():
            if self.body.can_lose(self.ranks[rank]):
                self.leave_out(self.ranks[rank], why, now_s)
        self.body.check_links(now_s)

    def leave_out(self, record: RankRecord, why: str, now_s: float) -> None:
        """The others go on without a rank that hangs. Its process is ended; one that is stopped, when it continues."""
        self.silence.on_left_out(record.rank, now_s)
        self.stop(record, waits_while_stopped=True)
        record.is_left_out = True
        self.num_lost_ranks += 1
        self.tell_lost(record, hang_notice(record, why))
        self.body.lose(record, now_s)

    def _on_user_event(self, event: UserEventRecorded) -> None:
        """Publishes an event of user code. Refused after the result, which is the last that watchers get."""
        if self.result is None:
            report = UserEvent(rank=event.rank, text=event.text, num_dropped=event.num_dropped)
            self.outbox.add(Publish(job_id=self.id, report=report))
        else:
            self.refuse_now(event, "nothing follows the result")

    def request_checkpoint(self) -> None:
        """A client wants a checkpoint."""
        if self.phase is JobPhase.TRAINING:
            self.body.request_checkpoint()
        else:
            self.refuse_now("CheckpointRequested", "checkpoints are made only while it trains")

    def pause(self, now_s: float, *, is_paused: bool) -> None:
        """A client wants training to stop after the open round, or to go on."""
        if self.phase is JobPhase.TRAINING:
            self.body.pause(now_s, is_paused=is_paused)
            self.watch_silence(now_s)
        else:
            self.refuse_now("PauseRequested", "only what trains can stop, and go on")

    def cancel(self) -> None:
        """Ends the job by request. Nothing changes when its outcome is decided."""
        if self.is_open:
            self.decide(Outcome.CANCELLED, "cancelled by request")
        else:
            self.refuse_now("JobCancelled", "its outcome is decided")

    def break_off(self, reason: str) -> None:
        """Something of the job could not be carried out. Nothing changes when its outcome is decided."""
        if self.is_open:
            self.fail(reason)
        else:
            self.refuse_now("JobBroken", "its outcome is decided")

    # End: an outcome is decided once; then the ranks leave; then the job has ended.

    def on_exited(self, record: RankRecord, death: Death, notice: str, now_s: float, *, log_tail: str = "") -> None:
        """The process has ended. Before an outcome is decided, the others go on, or the job goes back to a checkpoint,
        or fails with the notice.
        """
        is_open, problem = self.is_open, None
        if is_open and death is not Death.WITH_HOST and not record.is_stopped:
            problem = self.body.blame(record, self._deaths, now_s)
        self.note_gone(record)
        self.silence.hangs.forget([record.rank])
        if problem is not None:
            self.fail(f"{problem}: {notice}", traceback=log_tail, record=record)
        elif is_open and record.is_left_out:
            self._schedule_restart(record, now_s)  # does nothing when the job has gone back
        elif is_open and self.body.can_lose(record):
            self.body.lose(record, now_s)
            self._schedule_restart(record, now_s)
            self.tell_lost(record, notice)
        elif is_open and self.body.goes_back(is_violent=death is not Death.BY_ITSELF):
            self.go_back(record, notice, now_s)
        elif is_open:
            self.fail(notice, traceback=log_tail, record=record)
        self.end_if_gone()

    def go_back(self, record: RankRecord, notice: str, now_s: float, *, is_death: bool = True) -> None:
        """Nobody is left who has the model: the job is queued again, and its next attempt begins from its newest
        checkpoint. The fourth death in a row without a new checkpoint before it fails the job.
        """
        self._num_fruitless = is_death + (0 if self.body.has_saved else self._num_fruitless)
        if self._num_fruitless > MAX_FRUITLESS:
            self.fail(f"{notice}; {MAX_FRUITLESS} attempts in a row have come to no checkpoint", record=record)
            return
        least = self.spec.min_ranks if self.spec.num_ranks else 1  # if it took what was there, it does so again
        self.spec = replace(self.spec, resume=self.body.resume_point, num_ranks=self.num_wanted, min_ranks=least)
        self.body = self.body.anew()
        self.advance(JobTrigger.WENT_BACK, notice)
        self.retry_at_s = now_s + (RESTART_S[self._num_fruitless - 1] if is_death else 0.0)
        self.missing.clear()
        for other in self.ranks.values():
            if other.phase is not RankPhase.EXITED:
                other.is_left_out = True
                self.stop(other)
        self.silence.forgive()
        where = f"checkpoint {self.spec.resume}" if self.spec.resume else "its start"
        report = MembershipReport(rank=record.rank, text=f"{notice}; the job goes back to {where}", num_ranks=0)
        self.outbox.add(Publish(job_id=self.id, report=report))

    def note_gone(self, record: RankRecord) -> None:
        """The rank is gone."""
        record.life.advance(RankTrigger.EXITED)
        self.num_lost_ranks += self.is_open and not record.is_left_out

    def _schedule_restart(self, record: RankRecord, now_s: float) -> None:
        """The others go on without a rank: notes when it is to be started again (`Coordinator._place_missing`)."""
        if record.incarnation in self._gives:
            return  # it comes again when nobody waits for slots
        delay_s = self._deaths.restart_delay_s(record)
        if self.phase in (JobPhase.GROUPING, JobPhase.TRAINING) and self.num_held < self.num_wanted:
            self.missing[record.rank] = now_s + delay_s

    def tell_lost(self, record: RankRecord, notice: str) -> None:
        """Tells watchers that the others go on without a rank."""
        left = present(self.ranks).values()
        num_ranks = sum(one.has_model for one in left) or len(left)  # nobody has it before the first round
        report = MembershipReport(rank=record.rank, text=notice, num_ranks=num_ranks)
        self.outbox.add(Publish(job_id=self.id, report=report))

    def fail(self, error: str, *, invalid: bool = False, traceback: str = "", record: RankRecord | None = None) -> None:
        """Without a record no rank is blamed: no rank has the incarnation 0."""
        failure = RankFailed(
            job_id=self.id,
            rank=record.rank if record else Rank(0),
            incarnation=record.incarnation if record else Incarnation(0),
            error=error,
            traceback=traceback,
            invalid=invalid,
        )
        self.decide(Outcome.FAILED, error, failure)

    def decide(self, outcome: Outcome, reason: str, failure: RankFailed | None = None) -> None:
        """The outcome. Every rank is asked to leave. Raises `Refused` when it is decided already."""
        self.advance(JobTrigger.OUTCOME_DECIDED, reason)
        self._decided = (outcome, failure)
        self.missing.clear()
        for record in self.ranks.values():
            if record.is_left_out:
                self.stop(record)
            elif record.is_connected:
                self.outbox.add(SendShutdown(**record.address(self.id), reason=reason))
            elif record.phase is RankPhase.STARTING:
                self.stop(record)
        self.set_deadline(STOP_GRACE_S)
        self.end_if_gone()

    def let_go(self, record: RankRecord) -> None:
        """Asks a rank to exit that the others do not need any more. It is started again where a slot is free."""
        if record.is_connected:
            self.outbox.add(SendShutdown(**record.address(self.id), reason=f"{record.host} is to be left"))
        else:
            self.stop(record)
        record.is_stopped = record.is_left_out = True
        notice = f"rank {record.rank} has left {record.host} ({record.device}), its work committed"
        self.tell_lost(record, notice)

    def stop(self, record: RankRecord, *, waits_while_stopped: bool = False) -> None:
        """Has the rank's process ended by its agent; if wanted, not as long as somebody has stopped it (SIGSTOP)."""
        record.is_stopped = True
        self.outbox.add(
            StopRank(
                **record.address(self.id),
                agent_id=record.agent_id,
                grace_s=KILL_GRACE_S,
                waits_while_stopped=waits_while_stopped,
            )
        )

    def end_if_gone(self) -> None:
        """The job has ended once its outcome is decided and no rank is left."""
        if self.phase is JobPhase.STOPPING and self._census[RankPhase.EXITED] == len(self.ranks):
            self.life.advance(JobTrigger.RANKS_GONE)
            self.set_deadline(None)
            self.result = self.decided_result()
            self.spec = replace(self.spec, replay=())  # whoever resumes the job goes on after it
            assert self.result is not None
            self.outbox.add(Publish(job_id=self.id, report=self.result))

    def decided_result(self) -> JobResult | None:
        """How it ends; None while that is not decided."""
        return self._make_result(*self._decided) if self._decided is not None else None

    def _make_result(self, outcome: Outcome, failure: RankFailed | None) -> JobResult:
        result = JobResult(outcome=outcome, error="" if outcome is Outcome.SUCCEEDED else self.reason)
        if failure is not None:
            rank = failure.rank if failure.incarnation else None
            result = replace(result, traceback=failure.traceback, invalid=failure.invalid, failed_rank=rank)
        return self.body.complete(result)
