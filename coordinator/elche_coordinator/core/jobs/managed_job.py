"""A job whose ranks elche starts: they load the user's file, form a process group, train, and save a model."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import assert_never

from elche.evaluation import never_finite
from elche_coordinator.core.jobs.deaths import Death, Deaths, FruitlessAttempts
from elche_coordinator.core.jobs.duties import duties_of, has_batch_due
from elche_coordinator.core.jobs.membership import Problem
from elche_coordinator.core.jobs.notices import hang_notice, too_few_notice
from elche_coordinator.core.jobs.outcome import with_training
from elche_coordinator.core.jobs.placed import PlacedJob
from elche_coordinator.core.jobs.places import Places
from elche_coordinator.core.jobs.run import RoundEvent, Run
from elche_coordinator.core.life.hangs import Duty
from elche_coordinator.core.life.job import WATCHED
from elche_coordinator.core.messages.events import (
    BatchesTrained,
    BestKept,
    CheckpointFailed,
    CheckpointSaved,
    EpochMetricsTaken,
    EvaluationDone,
    FinalStateSaved,
    GenerationAbandoned,
    GroupFormed,
    HeaderReported,
    JobBroken,
    JobSubmitted,
    LeaveRequested,
    LinksProbed,
    LoopBegan,
    LoopEpochEnded,
    LoopLeft,
    LoopProgressed,
    RankReady,
    RankStopped,
    ReserveRecalled,
    ResultReceived,
    RoundEntered,
    RoundFailed,
    SessionOpened,
    UserEventRecorded,
    WorkEvent,
)
from elche_coordinator.core.messages.ids import Attempt, GenerationId, Incarnation, JobId, Rank
from elche_coordinator.core.messages.reports import JobResult, MembershipReport, Outcome
from elche_coordinator.core.messages.spec import JobSpec
from elche_coordinator.core.records.failure import BackToCheckpoint, Failure
from elche_coordinator.core.records.machine import DepartureTrigger, Hold, JobPhase, JobTrigger, RankPhase, RankTrigger
from elche_coordinator.core.records.ranks import RankRecord, highest_staying, staying
from elche_coordinator.core.results.counts import Counts
from elche_coordinator.core.rounds.generation import Generation

WRITES_MODEL = "writes its final state"
"""The reason of a job that has trained all."""


class ManagedJob(PlacedJob):
    """Starts, groups and trains its ranks. In each attempt `training` and `membership` are None until all ranks are
    ready and agree.

    An event goes to the part that it concerns: the `generation`, the `membership`, the `training`, or the `model`. A
    part returns decisions beyond it (`Failure`, `BackToCheckpoint`), and the job carries them out.
    """

    def __init__(self, event: JobSubmitted) -> None:
        super().__init__(event)
        self.places = Places(self.roster, self.outbox, event.spec.num_ranks)
        self.retry_at_s = 0.0
        """Time from which a job that has gone back may be placed again."""
        self._gives: frozenset[Incarnation] = frozenset()
        """Processes that leave for another job: their ranks get slots again only when no other job waits for these."""
        self._fruitless = FruitlessAttempts()
        self._deaths = Deaths()
        self._counted = Counts()
        """Counts of earlier attempts."""
        self.run = Run(self.spec, self.roster, self.outbox, past_attempts=event.past_attempts)

    @property
    def attempt(self) -> Attempt:
        """One more than the attempt of the checkpoint from which it resumes; else 1."""
        return self.run.startup.attempt

    @property
    def generation_id(self) -> GenerationId:
        return self.run.generation_id

    @property
    def is_paused(self) -> bool:
        return self.run.is_held(Hold.ASKED)

    @property
    def resumption(self) -> JobSpec:
        """Its submission, with the checkpoint, or folder of checkpoints, from which it would resume."""
        if self.run.newest is not None:
            return self.run.newest.resumed_by(self.spec)
        begun = self.run.training
        return self.spec if begun is None else replace(self.spec, resume_version=begun.restored_version)

    @property
    def counts(self) -> Counts:
        """Counts of all attempts."""
        return self._counted + self.run.counts

    # Places

    @property
    def num_lacking(self) -> int:
        is_whole = self.phase not in (JobPhase.GROUPING, JobPhase.TRAINING) or bool(self.spec.replay)
        if is_whole:
            return 0
        # where nobody stays, the first newcomer gets the model from those that leave, before they do
        is_handed_over = not staying(self.ranks) and all(one.stopped_round is None for one in self.ranks.values())
        return self.places.num_without_leaving if is_handed_over else self.places.num_lacking

    @property
    def can_scale(self) -> bool:
        return self.is_open and not self.spec.replay

    def scale(self, num_ranks: int, now_s: float) -> None:
        """Sets the number of ranks, and lowers the least number to it. Surplus ranks leave, the highest first."""
        if not self.can_scale:
            self.refuse_now("ScaleRequested", "it has ended, or repeats a recording")
            return
        self.spec = self.spec.scaled(num_ranks)
        self.leave(highest_staying(self.ranks, self.places.want(num_ranks)), now_s)

    def give_slots(self, num_ranks: int, to: JobId, now_s: float) -> None:
        """Has `num_ranks` ranks leave, the highest first. If all do, the job is queued, with a checkpoint
        made for it.
        """
        if not self.is_open:  # it may have ended by the very event after which it is asked
            self.refuse_now("SlotsRequested", "it has ended")
            return
        leaving = highest_staying(self.ranks, num_ranks)
        # By process, not by rank: another process of the rank may be started later, on another slot.
        self._gives |= {record.incarnation for record in leaving}
        self.reason = f"{len(leaving)} ranks leave their slots to job {to}"
        self.leave(leaving, now_s)

    # Events of ranks

    def on_session_lost(self, record: RankRecord, now_s: float) -> None:
        """Has the agent end the process, which may still run, and report its end."""
        if not (self.phase is JobPhase.STOPPING or record.is_ending or record.phase is RankPhase.EXITED):
            self.roster.stop(record)
            self._hold_or_go_on(now_s)

    def on_work(self, record: RankRecord, event: WorkEvent, now_s: float) -> None:
        """Handles a rank's reports of its start, of rounds, and of chores."""
        match event:
            case (
                BatchesTrained()
                | RoundEntered()
                | ResultReceived()
                | HeaderReported()
                | RoundFailed()
                | ReserveRecalled()
            ):
                self._on_rounds(record, event, now_s)
            case RankReady():
                self._on_ready(record, event, now_s)
            case LeaveRequested():
                self.leave([record], now_s)
            case RankStopped():
                self._on_stopped(record, event, now_s)
            case LinksProbed():
                if (apart := self.run.links.on_probed(record, event)) is not None:
                    self._leave_out_apart(apart, now_s)
            case GroupFormed() | GenerationAbandoned():
                self._on_generation(record, event, now_s)
            case EvaluationDone() | CheckpointSaved() | CheckpointFailed() | EpochMetricsTaken():
                self._on_result_of_round(record, event, now_s)
            case FinalStateSaved() | BestKept():
                self._on_model(record, event)
            case SessionOpened():
                pass  # `RankReady` follows with all data
            case LoopProgressed() | LoopEpochEnded() | LoopBegan() | LoopLeft():
                self.refuse_now(event, "it is not a loop of the user's own")
            case _:
                assert_never(event)

    def _on_ready(self, record: RankRecord, event: RankReady, now_s: float) -> None:
        """Handles a rank that has read the user's file. When all have, and agree, the group forms."""
        # First, since it refuses a `RankReady` that comes again, before anything is taken in from it.
        record.life.advance(RankTrigger.LOADED)
        is_first = self.run.membership is None
        if (other := self.run.other_data(record, event)) is not None:
            self._refuse_data(record, other, now_s)
            return
        failure = self.run.admit(record, event)
        are_there = not self.places.missing and not self.roster.num_in(RankPhase.STARTING)
        if is_first and self.phase is JobPhase.STARTING and are_there:
            self._leave_behind()
            failure = self.run.begin(record)
            if failure is None:
                self.advance(JobTrigger.RANKS_READY, "its ranks meet")
                self.watch_silence(now_s)
        if failure is not None:
            self.fail(failure)

    def _leave_behind(self) -> None:
        """Has the others begin without ranks that lack their checkpoint, as on a host with a disk of its own. They are
        started again, and get the others' model.
        """
        if not self._goes_back(is_violent=True):
            return
        for rank, why in self.run.startup.behind().items():
            record = self.ranks[rank]
            record.departs(DepartureTrigger.LEFT_OUT)
            self.roster.stop(record)
            text = f"rank {rank} on {record.host} begins later, with the others' model: {why}"
            self.roster.report_lost(record, text)

    def _on_generation(self, record: RankRecord, event: GroupFormed | GenerationAbandoned, now_s: float) -> None:
        """Handles a rank's group that stands or is abandoned."""
        if self.run.membership is None or not self.is_open:
            self.refuse_now(event, "no group is being formed")
            return
        before, training = self.run.generation, self.run.training
        version = training.version if training is not None else None
        match event:
            case GroupFormed():
                self._go_on(self.run.on_formed(record, event, now_s), before, now_s)
            case GenerationAbandoned():
                self._go_on(self.run.membership.on_abandoned(record, event, now_s), before, now_s)
                self._check_links(now_s)
        if self.run.generation is not before:  # else the same ranks stay
            self._hold_or_go_on(now_s)
        if training is not None and training.version != version:
            self._save_stopped(now_s)

    def _on_rounds(self, record: RankRecord, event: RoundEvent, now_s: float) -> None:
        """Handles reports of batches and rounds."""
        if self.phase is JobPhase.TRAINING:
            before, training = self.run.generation, self.run.training
            version = training.version if training is not None else None
            self._go_on(self.run.on_rounds(record, event, now_s), before, now_s)
            is_same = self.run.generation is before and training is not None and training.version == version
            if not is_same:  # else the same ranks stay as before, also while their generation is being abandoned
                self._hold_or_go_on(now_s)
        elif not isinstance(event, BatchesTrained):  # ranks report batches until they leave
            self.refuse_now(event, "rounds are made only while it trains")

    def _go_on(self, problem: Problem | None, before: Generation | None, now_s: float) -> None:
        """Called after members or rounds may have changed: the job fails, goes back, ends, or trains on. The generation
        `before` stood when the event came.
        """
        match problem:
            case Failure():
                self.fail(problem)
                return
            case BackToCheckpoint():
                if self._goes_back(is_violent=True):
                    self.go_back(problem.rank, problem.reason, now_s)
                else:
                    self.fail(Failure(problem.reason))
                return
        if self.run.generation is not before and self.phase is JobPhase.GROUPING:
            self.advance(JobTrigger.GROUP_FORMED, "trains")
        elif self.run.generation is not before:
            self.reason = "trains"
        if self.run.training is not None and self.run.training.is_over and self.phase is JobPhase.TRAINING:
            self.advance(JobTrigger.LAST_ROUND_COMMITTED, WRITES_MODEL)

    def _on_result_of_round(
        self,
        record: RankRecord,
        event: EvaluationDone | CheckpointSaved | CheckpointFailed | EpochMetricsTaken,
        now_s: float,
    ) -> None:
        """Handles a finished chore of a round's result: an evaluation, a checkpoint or a callback. The job may have
        waited for it.
        """
        training = self.run.training
        if training is None or (isinstance(event, EvaluationDone) and not self.is_open):
            self.refuse_now(event, "its outcome is decided, or it has no training yet")
            return
        match event:
            case EvaluationDone():
                if failure := training.on_evaluated(record, event, now_s):
                    self.fail(failure)
            case CheckpointSaved():
                training.on_checkpoint_saved(record, event, now_s)
                if self.phase is JobPhase.TRAINING and not staying(self.ranks) and not training.checkpoints.is_awaited:
                    for one in self.ranks.values():
                        if one.stopped_round is not None:  # its agent still waits for an order to save the draft
                            self.roster.shut_down(one, "another rank's draft is used")
                    self.go_back(record.rank, f"rank {record.rank} leaves {record.host}", now_s, is_death=False)
                    return
            case CheckpointFailed():
                training.on_checkpoint_failed(record, event)
            case EpochMetricsTaken():
                training.on_metrics_taken(record, event)
            case _:
                assert_never(event)
        self._finish()

    def save(self) -> None:
        """Requests that the next announced round becomes a checkpoint."""
        if self.run.training is not None:
            self.run.training.checkpoints.request()

    # Holding training

    def hold(self, now_s: float, *, is_paused: bool) -> None:
        if self.run.generation is not None:
            self._set_hold(Hold.ASKED, now_s, holds=is_paused)

    def _set_hold(self, hold: Hold, now_s: float, *, holds: bool) -> None:
        assert self.run.generation is not None
        self.silence.forgive()
        if holds:
            self.run.generation.pause(hold)
        else:
            self.run.generation.unpause(hold, now_s)

    def _hold_or_go_on(self, now_s: float) -> None:
        """Holds the job while it has fewer ranks than its least number. Not if no rank stays: it then goes back to a
        checkpoint, which takes another round.
        """
        training = self.run.training
        if training is None or self.run.generation is None or self.phase is not JobPhase.TRAINING or training.is_over:
            return
        if self.spec.min_ranks <= 1 and not self.run.is_held(Hold.TOO_FEW):
            return  # before all ranks are counted, with each of a host's thousand that is gone
        there = staying(training.members)
        is_short = 0 < len(there) < self.spec.min_ranks
        if is_short != self.run.is_held(Hold.TOO_FEW):
            self._set_hold(Hold.TOO_FEW, now_s, holds=is_short)
            self._report_hold(len(there), is_over=not is_short)

    def _report_hold(self, num_ranks: int, *, is_over: bool) -> None:
        """Reports that the job waits, naming the lowest rank that is missing, or (`is_over`) that it goes on."""
        rank = next(rank for rank in map(Rank, count()) if is_over or rank not in staying(self.ranks))
        waits = f"the job {too_few_notice(num_ranks, self.spec.min_ranks)}"
        text = f"the job has {num_ranks} ranks and goes on" if is_over else waits
        report = MembershipReport(rank=rank, text=text, num_ranks=num_ranks, is_back=is_over)
        self.outbox.publish(report)

    # Silence

    def duties(self) -> dict[Rank, Duty]:
        """Each rank's duty: a batch, an evaluation, or a wait for others, such as in a round."""
        return duties_of(self.ranks, self.run.training, self.run.generation, self.silence.stalls)

    def check_silence(self, now_s: float) -> None:
        """As for every job; also checks if ranks can reach each other."""
        super().check_silence(now_s)
        if self.phase in WATCHED:
            self._check_links(now_s)

    def on_hung(self, record: RankRecord, duty: Duty, why: str, now_s: float) -> None:
        """Leaves the rank out, if the others can go on without it. If it is the last one with the model, the job goes
        back to a checkpoint, as when it dies.
        """
        if self._can_lose(record):
            self._leave_out(record, why, now_s)
        elif duty.is_last and self._goes_back(is_violent=True):
            self.go_back(record.rank, hang_notice(record, why), now_s)

    def has_batch_due(self, record: RankRecord) -> bool:
        return has_batch_due(record, self.run.generation)

    def _leave_out(self, record: RankRecord, why: str, now_s: float) -> None:
        """Leaves a hung rank out: the others go on without it."""
        self.silence.on_left_out(record.rank, now_s)
        self.roster.leave_out(record)
        self.roster.report_lost(record, hang_notice(record, why))
        self._on_lost(record, now_s)

    def _refuse_data(self, record: RankRecord, other: str, now_s: float) -> None:
        """Leaves out a rank whose data differs from that of the training ranks, and restarts it like one that died. The
        job fails if it may lose no rank.
        """
        if not self._can_lose(record):
            self.fail(Failure(other, invalid=True))
            return
        self.roster.leave_out(record)
        self.roster.report_lost(record, f"rank {record.rank} on {record.host} is left out: {other}")
        self._on_lost(record, now_s)

    def _check_links(self, now_s: float) -> None:
        if self.run.check_links(now_s):
            self.watch_silence(now_s)

    def _leave_out_apart(self, apart: Mapping[Rank, str], now_s: float) -> None:
        """Leaves out ranks that cannot reach others, given with reasons; a first group is relayed instead, if
        allowed.
        """
        if self.run.links.is_of_group and (membership := self.run.membership) is not None:
            forming = membership.forming if self.run.links.is_of(membership.forming) else None
            has_relayed = bool(apart) and forming is not None and membership.relay(next(iter(apart.values())))
            if forming is not None and forming.failure and not has_relayed:
                reasons = [f"rank {rank}: {why}" for rank, why in apart.items()]
                reason = f"{forming.failure} ({reasons[0]})" if reasons else forming.failure
                problem = membership.try_again(forming, reason, now_s, are_apart=bool(apart))
                self._go_on(problem, self.run.generation, now_s)
            return
        for rank in filter(lambda rank: self._can_lose(self.ranks[rank]), apart):
            self._leave_out(self.ranks[rank], apart[rank], now_s)

    # Ranks that are gone

    def on_exited(self, record: RankRecord, death: Death, notice: str, now_s: float, *, log_tail: str = "") -> None:
        """Handles the end of a process. Until an outcome is decided, the others go on, or the job goes back to a
        checkpoint, or fails with the notice.
        """
        is_open, accusation = self.is_open, None
        if is_open and death in (Death.BY_ITSELF, Death.KILLED) and not record.is_ending:
            # Before the exit is noted, which makes the rank count as one that had nothing to train.
            accusation = self.run.blame(record, self._deaths, now_s)
        self.roster.note_exit(record, counts=is_open)
        self.silence.hangs.forget([record.rank])
        if accusation is not None:
            self.fail(Failure(f"{accusation}: {notice}", rank=record.rank, traceback=log_tail))
        elif is_open and record.is_done_without:
            self._schedule_restart(record, now_s)  # does nothing when the job has gone back
        elif is_open and self._can_lose(record):
            self._on_lost(record, now_s)
            self._schedule_restart(record, now_s)
            self.roster.report_lost(record, notice)
        # `is_first` is asked last, because it counts the death.
        elif death is Death.KILLED and self._is_starting_with_others(record) and self._deaths.is_first(record):
            # Only this rank begins again: going back would have all load the file again.
            self.places.missing[record.rank] = now_s
            self.roster.report_lost(record, f"{notice}; it is started again")
        elif is_open and (self._goes_back(is_violent=death is not Death.BY_ITSELF) or self._has_not_begun(death)):
            self.go_back(record.rank, notice, now_s)
        elif is_open:
            self.fail(Failure(notice, rank=record.rank, traceback=log_tail))
        self.end_if_gone()

    def _has_not_begun(self, death: Death) -> bool:
        """True if a job loses nothing by going back to the queue, also one that may lose no rank."""
        return death is Death.NEVER_LIVED and self.phase is JobPhase.STARTING

    def _is_starting_with_others(self, record: RankRecord) -> bool:
        """True while the job starts, so that others would have to begin again if it went back for this rank."""
        is_one_of_several = self.phase is JobPhase.STARTING and bool(staying(self.ranks))
        return is_one_of_several and not record.is_ending and self._goes_back(is_violent=True)

    def on_no_place(self, rank: Rank, now_s: float) -> None:
        """Goes back to the queue: another job has taken the slot."""
        self.go_back(rank, f"rank {rank} cannot be started again: its slot was given to another job", now_s)

    def _can_lose(self, record: RankRecord) -> bool:
        return self.is_open and self.run.can_lose(record)

    def _on_lost(self, record: RankRecord, now_s: float) -> None:
        """Has the others go on without the rank."""
        assert self.run.training is not None
        assert self.run.membership is not None
        generation = self.run.generation
        failure = self.run.training.lose(record)
        if failure is None and self.phase is not JobPhase.FINISHING:
            failure = self.run.membership.on_lost(record, now_s)
        # After `training.lose`, which has chosen who writes the final state again: that rank stores the best model,
        # too.
        self.run.model.lose(record, self.run.training)
        if self.phase is JobPhase.FINISHING and record.rank != self.run.training.saver:
            self.reason = WRITES_MODEL
        self._go_on(failure, generation, now_s)
        self._hold_or_go_on(now_s)
        if record.stopped_round is None:  # it may have been the last one that had not stopped
            self._save_stopped(now_s)
        self._finish()

    def _schedule_restart(self, record: RankRecord, now_s: float) -> None:
        """Notes the time at which a lost rank may be restarted (`Placing`)."""
        if record.incarnation in self._gives:
            return  # it gave its slots to another job, and gets new ones only as an added rank does
        delay_s = self._deaths.restart_delay_s(record)
        if self.phase in (JobPhase.GROUPING, JobPhase.TRAINING):
            self.places.need_again(record.rank, now_s + delay_s)

    # Ranks that leave

    def leave(self, leaving: Sequence[RankRecord], now_s: float) -> None:
        """Has these ranks leave once their work is committed. If no rank with the model stays, the job goes back to a
        checkpoint that is made now.
        """
        if leaving:
            self._leave(leaving, now_s)
        self._hold_or_go_on(now_s)  # also when its least number has changed

    def _leave(self, leaving: Sequence[RankRecord], now_s: float) -> None:
        """As `leave`. A job that is starting goes back to the queue; a replay goes on, since its ranks must stay the
        same.
        """
        training, membership, first = self.run.training, self.run.membership, leaving[0]
        if self.phase is JobPhase.STARTING and self._goes_back(is_violent=True):
            self.go_back(first.rank, f"rank {first.rank} is to leave {first.host}", now_s, is_death=False)
        if training is None or membership is None or self.phase not in (JobPhase.GROUPING, JobPhase.TRAINING):
            return
        if training.replay is not None:
            return
        for record in leaving:
            record.departs(DepartureTrigger.ASKED)
            if not training.has_model(record) and record.is_present:
                self.roster.dismiss(record)  # a newcomer has no work to commit
                self._on_lost(record, now_s)
        if any(map(training.has_model, staying(training.members).values())):
            self._go_on(membership.on_leaving(now_s), self.run.generation, now_s)
        else:
            training.checkpoints.request()

    def _on_stopped(self, record: RankRecord, event: RankStopped, now_s: float) -> None:
        """Handles a rank that has stopped without a coordinator. If others train on, its agent reports its exit."""
        record.stopped_round = event.round
        record.departs(DepartureTrigger.ASKED)
        self._save_stopped(now_s)

    def _save_stopped(self, now_s: float) -> None:
        """Once all present ranks have stopped, so that the outcome of all their rounds is known, orders the draft of
        the last committed round to become a checkpoint, to which the job goes back.
        """
        training = self.run.training
        if training is None or self.phase is not JobPhase.TRAINING or training.replay is not None:
            return
        if all(one.stopped_round is not None or not one.is_present for one in training.members.values()):
            training.save_stopped(now_s)

    def stay(self, records: Sequence[RankRecord], now_s: float) -> None:
        for record in records:
            record.departs(DepartureTrigger.TAKEN_BACK)
        if self.run.membership is not None:
            self._go_on(self.run.membership.on_leaving(now_s), self.run.generation, now_s)
        self._hold_or_go_on(now_s)

    # Going back

    def go_back(self, rank: Rank, notice: str, now_s: float, *, is_death: bool = True) -> None:
        """Queues the job again, since no rank has its model; the next attempt begins from its newest checkpoint. Too
        many deaths in a row without a new checkpoint fail the job.
        """
        if self.run.has_saved:
            self._fruitless.on_checkpoint()
        delay_s = 0.0
        if is_death:
            if in_vain := self._fruitless.add(now_s):
                self.fail(Failure(f"{notice}; {in_vain}", rank=rank))
                return
            delay_s = self._fruitless.delay_s
        # without a number of ranks it begins on whatever slots are free
        least = self.spec.min_ranks if self.spec.num_ranks else 1
        self.spec = replace(self.resumption, num_ranks=self.num_wanted, min_ranks=least)
        # Before the new run, whose counts begin at 0: counters that fall are resets to Prometheus.
        self._counted = self.counts
        self.run = Run(
            self.spec,
            self.roster,
            self.outbox,
            past_attempts=self.attempt,
            kept=self.run.kept,
            first_checkpoint_s=self.run.first_checkpoint_of_next(now_s) if is_death else None,
        )
        self.advance(JobTrigger.WENT_BACK, notice)
        self.retry_at_s = now_s + delay_s
        self.places.missing.clear()
        for other in self.ranks.values():
            if other.phase is not RankPhase.EXITED:
                # Left out before it is stopped: the exit of any other rank would make the job go back once more.
                other.departs(DepartureTrigger.LEFT_OUT)
                self.roster.stop(other)
        self.silence.forgive()
        where = f"checkpoint {self.spec.resume}" if self.spec.resume else "its start"
        report = MembershipReport(rank=rank, text=f"{notice}; the job goes back to {where}", num_ranks=0)
        self.outbox.publish(report)

    def on_broken(self, event: JobBroken, now_s: float) -> None:
        """As for every job, but it goes back to its newest checkpoint if that is enough."""
        if not (event.may_go_back and self.is_open and self._goes_back(is_violent=True)):
            super().on_broken(event, now_s)
        elif self.run.training is not None:
            self.go_back(Rank(0), event.reason, now_s)
        else:
            self.refuse_now("JobBroken", "it begins again already")

    @property
    def can_begin_again(self) -> bool:
        """True if it can go back to a checkpoint once all of its processes have ended."""
        return self._goes_back(is_violent=True)

    def _goes_back(self, *, is_violent: bool) -> bool:
        """True if the job goes back to its newest checkpoint once no rank has the model. Only if a death `is_violent`:
        a process that exited by itself would do so again.
        """
        settings = [record.settings for record in self.ranks.values() if record.settings is not None]
        wanted = [self.spec.on_rank_loss, *(one.on_rank_loss for one in settings)]
        return is_violent and not self.spec.replay and "fail" not in wanted

    # End

    def on_deadline(self) -> None:
        """Stops ranks that have not left in time."""
        for record in self.ranks.values():
            if record.phase is not RankPhase.EXITED:
                self.roster.stop(record)

    def _on_model(self, record: RankRecord, event: FinalStateSaved | BestKept) -> None:
        """Handles the final model, or the best one, being on disk."""
        if isinstance(event, FinalStateSaved):
            saver = self.run.training.saver if self.run.training is not None else None
            if self.phase is not JobPhase.FINISHING or record.rank != saver:  # such as one that has died since
                self.refuse_now(event, f"rank {record.rank} is not asked to write the final state")
                return
            self.run.model.on_saved(record, event)
        else:
            if self.run.training is None or not self.run.model.awaits_best_of(record):
                self.refuse_now(event, f"rank {record.rank} was not asked to store the best model")
                return
            self.run.model.on_best_kept(event, self.run.training)
        self._finish()

    def on_user_event(self, event: UserEventRecorded) -> None:
        """As for every job. While the final model is written, what its rank says is the job's reason: such as that the
        disk is full.
        """
        super().on_user_event(event)
        training = self.run.training
        if self.phase is JobPhase.FINISHING and training is not None and event.rank == training.saver:
            self.reason = f"rank {event.rank}: {event.text}"

    def _finish(self) -> None:
        """Decides the outcome of a finishing job once all is written: a failure if the final evaluation is spoilt."""
        training = self.run.training
        if self.phase is not JobPhase.FINISHING or training is None or not self.run.model.complete(training):
            return
        if spoilt := training.evaluations.spoilt:
            model = self.run.model
            best = f"; {model.path} is the {model.model_is}" if model.model_is not in ("", "last") else ""
            self.fail(Failure(spoilt + best))
            return
        odd = never_finite(training.evaluations.metrics)
        self.decide(Outcome.SUCCEEDED, f"all samples are committed; {odd}" if odd else "all samples are committed")

    def decide(self, outcome: Outcome, reason: str, failure: Failure | None = None) -> None:
        """As for every job; also cancels restarts of ranks."""
        super().decide(outcome, reason, failure)
        self.places.missing.clear()

    @property
    def ended_early(self) -> str:
        """Why training has ended before its last epoch's end."""
        return self.run.training.ended_early if self.run.training is not None else ""

    def work_done(self) -> dict[Rank, int]:
        """Committed batches of each rank."""
        return {rank: record.num_batches for rank, record in self.ranks.items()}

    def complete(self, result: JobResult) -> JobResult:
        """Adds the training's figures to the result; of a job that has gone back and waits, those of its newest
        checkpoint, which is all that is left of it.
        """
        if self.run.training is None:
            result = replace(result, checkpoints=tuple(self.run.kept))
            newest = self.run.kept[-1] if self.run.kept else None
            return result if newest is None else replace(result, epochs=newest.epoch, metrics=newest.metrics)
        return with_training(result, self.run.training, self.run.model, self.ranks)
