"""One job: its ranks and its life, from submission to result."""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from elche_coordinator.core.jobs.attached import Loop
from elche_coordinator.core.jobs.stalls import BATCHES, CHECK_S, LEAST_S, StallWatch
from elche_coordinator.core.messages.commands import (
    AskStacks,
    Command,
    Publish,
    SendFormGroup,
    SendKeepBest,
    SendShutdown,
    StartRank,
    StopRank,
)
from elche_coordinator.core.messages.events import (
    BatchesTrained,
    BestKept,
    CheckpointFailed,
    CheckpointSaved,
    EpochMetricsTaken,
    EvaluationDone,
    FinalStateSaved,
    GroupFormed,
    LoopAttached,
    LoopEpochEnded,
    LoopLeft,
    LoopProgressed,
    RankExited,
    RankFailed,
    RankReady,
    RankStarted,
    RoundEntered,
    RoundFailed,
    RoundHeld,
    SessionLost,
    SessionOpened,
    StacksTold,
    UserEventRecorded,
)
from elche_coordinator.core.messages.ids import AgentId, Attempt, Epoch, Generation, Incarnation, JobId, Rank
from elche_coordinator.core.messages.reports import JobResult, Outcome, RankResult, StallReport, UserEvent
from elche_coordinator.core.messages.spec import (
    Architecture,
    JobSpec,
    Settings,
    first_disagreement,
    senseless_setting,
    whole_number,
)
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
from elche_coordinator.core.records.outbox import Outbox
from elche_coordinator.core.records.ranks import RankRecord
from elche_coordinator.core.results.training import Training
from elche_coordinator.core.rounds.backends import Choice, choose_backend

RECORD_FORMAT = 1
"""Of durable records. A coordinator sets those of newer ones aside."""
STOP_GRACE_S = 5.0
"""Between asking a rank to leave and having its process ended."""
JOIN_GRACE_S = 60.0
"""Between a loop's becoming a job and all its ranks' being there."""
KILL_GRACE_S = 2.0
"""Between an agent's asking a process to end and killing it."""


class Job:
    """The record of one job. Its methods take in what happened and add to `commands` what is to be done."""

    def __init__(
        self,
        job_id: JobId,
        spec: JobSpec,
        *,
        submitted_at: float,
        set_deadline: Callable[[float | None], None],
        set_check: Callable[[float | None], None],
        key: str = "",
    ):
        self.id = job_id
        self.spec = spec
        self.key = key
        self.submitted_at = submitted_at
        self.life: Machine[JobPhase, JobTrigger] = Machine(f"job {job_id}", JOB_PHASES, JobPhase.QUEUED)
        self.reason = "waits for free slots"
        self.began_s: dict[JobPhase, float] = {}
        """When each phase began, for people."""
        self.num_lost_ranks = 0
        """Ranks that died or were lost while the job went on."""
        self.ranks: dict[Rank, RankRecord] = {}
        self._census: Counter[RankPhase] = Counter()
        """How many ranks are in each phase."""
        self.attempt = Attempt(1)
        self.generation = Generation(0)
        self.backend: Choice | None = None
        """By which backend the ranks average, once they have met."""
        self.training: Training | None = None
        """Present once the ranks have read the user's file and agree on it."""
        self.loop: Loop | None = None
        """In place of a training: the job is a loop of the user's own."""
        self.model_path = ""
        self.model_agent_id: AgentId | None = None
        """The host that has the model."""
        self.model_is = ""
        """Whether the model is the best one or the last, once that is known."""
        self.best_problem = ""
        """Why the best model is not beside it."""
        self._saver: RankRecord | None = None
        """Who has written the model."""
        self._awaits_best = False
        """Whether that rank is to say that the best model is kept."""
        self.result: JobResult | None = None
        self._architecture: Architecture | None = None
        """Of the first rank that was ready."""
        self._difference: str | None = None
        """Between that and another rank's."""
        self._resumed: Mapping[str, Any] | None = None
        """The training's state in the checkpoint that the job goes on from."""
        self._decided: tuple[Outcome, RankFailed | None] | None = None
        self._set_deadline = set_deadline
        self.stalls = StallWatch()
        self._set_check = set_check
        self._will_check = False
        self._outbox = Outbox(job_id, asdict(replace(spec, replay=())))
        self._outbox.change()

    @property
    def phase(self) -> JobPhase:
        """Where the job is in its life."""
        return self.life.phase

    def take_commands(self, record: Callable[[], dict[str, object]]) -> list[Command]:
        """What is to be done since the last call; a change of the durable record comes first."""
        return self._outbox.take(record)

    def wait_for_slots(self, num_free: int, num_slots: int) -> None:
        """Says what a queued job waits for, and what is there."""
        num, size = self.spec.num_ranks, self.spec.group_size
        wanted = f"{num or 1} free slot{'s' if num > 1 else ''}"
        if size > 1:
            wanted = f"{num or 1} group{'s' if num > 1 else ''} of {size} free slots on one host"
        there = f"{num_free} of {num_slots} slots are free" if num_slots else "no host offers any"
        never = "" if (num or 1) * size <= num_slots else "; start more workers"
        self.reason = f"waits for {wanted}: {there}{never}"

    # Start: places -> processes -> user's file read -> process group -> first round.

    def refuse_places(self, num_places: int) -> bool:
        """Fails the job when it is to slow a rank that so many places do not give it; whether it did."""
        missing = [rank for rank in self.spec.slow_factors if rank >= num_places]
        if missing:
            self._fail(f"rank {missing[0]} cannot be slowed: the job has {num_places} ranks, from 0", invalid=True)
        return bool(missing)

    def place(self, groups: list[tuple[Place, ...]], fleet: Fleet, next_incarnation: Callable[[], Incarnation]) -> None:
        """Starts one rank in each place, or group of places of one host."""
        self.life.advance(JobTrigger.PLACED)
        self.reason = "its ranks load the file"
        self._outbox.change()
        for index, (first, *others) in enumerate(groups):
            agent = fleet.agents[first.agent_id]
            devices = tuple(agent.slots[place.slot].device for place in (first, *others))
            record = RankRecord(
                rank=Rank(index),
                incarnation=next_incarnation(),
                agent_id=first.agent_id,
                slot=first.slot,
                more_slots=tuple(place.slot for place in others),
                host=agent.host,
                device=f"{len(devices)}x {devices[0].partition(':')[0]}" if others else devices[0],
                slot_devices=devices,
                life=self._new_life(),
            )
            self.ranks[record.rank] = record
            start = StartRank(
                **record.address(self.id),
                agent_id=first.agent_id,
                slot=first.slot,
                more_slots=record.more_slots,
                spec=self.spec,
            )
            self._outbox.add(start)

    def attach(self, event: LoopAttached, next_incarnation: Callable[[], Incarnation], now_s: float) -> None:
        """A loop's processes train already; there is nothing to place and nothing to agree on."""
        for trigger in (JobTrigger.PLACED, JobTrigger.RANKS_READY, JobTrigger.GROUP_FORMED):
            self.life.advance(trigger)
        self.reason = "trains, in a loop of its own"
        self._outbox.change()
        for index, (host, device) in enumerate(event.ranks):
            incarnation = next_incarnation()
            record = RankRecord(
                rank=Rank(index),
                incarnation=incarnation,
                agent_id=AgentId(""),
                slot=0,
                host=host,
                device=device,
                life=self._new_life(),
            )
            record.life.advance(RankTrigger.LOADED)
            record.life.advance(RankTrigger.GROUPED)
            self.ranks[record.rank] = record
        self.loop = Loop(self.id, event.policy, self.ranks, self._outbox, began_s=now_s, latest_s=now_s)
        self._set_deadline(JOIN_GRACE_S)

    def _new_life(self) -> Machine[RankPhase, RankTrigger]:
        return Machine("rank", RANK_PHASES, RankPhase.STARTING, self._census)

    # Silence

    def note_stacks(self, record: RankRecord, event: StacksTold, now_s: float) -> None:
        """What a stalled rank's threads do."""
        if record.rank in self.stalls.stalled:
            self._report_stall(record, now_s - self.stalls.stalled[record.rank], stacks=event.text)

    def watch_silence(self) -> None:
        """A rank has spoken: looks soon whether any is too silent, unless that is to be done already."""
        if not self._will_check and self.phase is JobPhase.TRAINING:
            self._will_check = True
            self._set_check(CHECK_S)

    def check_silence(self, now_s: float) -> None:
        """Finds ranks that have become stalled, tells of them, and asks their hosts what they do."""
        self._will_check = False
        if self.phase is not JobPhase.TRAINING:
            return
        limits_s = {}
        for record in self.ranks.values():
            if (limit_s := self._patience_s(record)) is not None:
                limits_s[record.rank] = limit_s
            else:
                self.stalls.note_order(record.rank)
        found, next_s = self.stalls.check(limits_s, now_s)
        for rank in found:
            record = self.ranks[rank]
            self._report_stall(record, now_s - self.stalls.stalled[rank])
            if record.agent_id:
                self._outbox.add(AskStacks(**record.address(self.id), agent_id=record.agent_id))
        if next_s is not None:
            self._will_check = True
            self._set_check(next_s)

    def _patience_s(self, record: RankRecord) -> float | None:
        """How long a silence of the rank is explained; None while it waits for somebody else."""
        if self.training is not None:
            if self.training.is_averaging(record):
                return LEAST_S + BATCHES * self.training.longest_averaging_s
            return self.stalls.patience_s(record) if self.training.should_work(record) else None
        is_running = self.loop is not None and not self.loop.is_paused and record.is_connected
        return self.stalls.patience_s(record) if is_running else None

    def note_alive(self, record: RankRecord, now_s: float) -> None:
        """The rank has done something else than a batch: its silence is over, and says nothing of its speed."""
        if record.rank in self.stalls.stalled:
            self._note_progress(record, now_s)
        self.stalls.note_order(record.rank)

    def _note_progress(self, record: RankRecord, now_s: float) -> None:
        silent_s = self.stalls.note_progress(record.rank, now_s)
        if silent_s is not None:
            self._report_stall(record, silent_s, is_over=True)

    def _report_stall(self, record: RankRecord, silent_s: float, *, is_over: bool = False, stacks: str = "") -> None:
        report = StallReport(
            rank=record.rank,
            host=record.host,
            device=record.device,
            silent_s=silent_s,
            usual_ms=record.ms_per_batch or 0.0,
            is_over=is_over,
            stacks=stacks,
        )
        self._outbox.add(Publish(job_id=self.id, report=report))

    # What agents and ranks say on the way to training

    def note_started(self, record: RankRecord, event: RankStarted) -> None:
        """The agent has started the process."""
        record.log_path = event.log_path

    def note_ready(self, record: RankRecord, event: RankReady) -> None:
        """The rank has read the user's file. When all have, and agree, the group forms."""
        record.life.advance(RankTrigger.LOADED)
        record.settings, record.device, record.build = event.settings, event.device, event.build
        record.batch_size = event.batch_size or event.settings.batch_size
        self._compare_architectures(record.rank, event)
        self._take_resumed(event)
        if self.phase is not JobPhase.STARTING or self._census[RankPhase.STARTING]:
            return
        settings = {rank: other.settings for rank, other in self.ranks.items() if other.settings is not None}
        problem = self._difference or first_disagreement(settings) or senseless_setting(event.settings)
        if problem is not None:
            self._fail(problem, invalid=True)
            return
        self._open_books(event.settings)

    def _compare_architectures(self, rank: Rank, event: RankReady) -> None:
        architecture = Architecture(rank=rank, layout_hash=event.settings.layout_hash, tensors=event.tensors)
        if self._architecture is None:
            self._architecture = architecture
        self._difference = self._difference or self._architecture.difference(architecture)

    def _take_resumed(self, event: RankReady) -> None:
        """The checkpoint that the ranks have loaded; each says the same of it, or has read another one."""
        if not event.resumed:
            return
        try:
            resumed = json.loads(event.resumed)
            self.attempt = Attempt(whole_number(resumed["attempt"], "attempt") + 1)
        except (ValueError, KeyError, TypeError, RecursionError):
            self._difference = self._difference or "the checkpoint says nothing of its training; is it elche's?"
            return
        if self._resumed is not None and self._resumed != resumed:
            self._difference = self._difference or "the ranks have read different checkpoints; name one that all reach"
        self._resumed = resumed

    def _open_books(self, settings: Settings) -> None:
        generation = Generation(self.generation + 1)
        try:
            builds = {rank: record.build for rank, record in self.ranks.items() if record.build is not None}
            self.backend = choose_backend(settings.backend, builds)
            training = Training(
                self.id,
                settings,
                self.ranks,
                generation,
                self._outbox,
                attempt=self.attempt,
                resumed=self._resumed,
                replay=self.spec.replay,
            )
        except ValueError as error:
            self._fail(str(error), invalid=True)
            return
        self.training = training
        if training.is_complete:
            self._fail(_nothing_to_train(training, self.spec.resume), invalid=True)
            return
        self._form_group(generation)

    def _form_group(self, generation: Generation) -> None:
        assert self.backend is not None
        self.life.advance(JobTrigger.RANKS_READY)
        self.reason = "its ranks meet"
        self.generation = generation
        self._outbox.change()
        for position, record in enumerate(self.ranks.values()):
            self._outbox.add(
                SendFormGroup(
                    **record.address(self.id),
                    attempt=self.attempt,
                    generation=generation,
                    position=position,
                    world_size=len(self.ranks),
                    backend=self.backend.backend,
                )
            )

    def note_grouped(self, record: RankRecord, event: GroupFormed, now_s: float) -> None:
        """The rank's group stands. When all ranks' do, training begins."""
        if event.generation != self.generation or self.training is None:
            return
        record.life.advance(RankTrigger.GROUPED)
        if self.phase is JobPhase.GROUPING and self._census[RankPhase.TRAINING] == len(self.ranks):
            self.life.advance(JobTrigger.GROUP_FORMED)
            self.reason = "trains"
            self.training.begin(now_s)

    # Training

    def note_batches(self, record: RankRecord, event: BatchesTrained, now_s: float) -> None:
        """Progress of a rank."""
        if event.local_step > record.local_step:
            self._note_progress(record, now_s)
        if self.loop:
            self.loop.note_batches(record, event, now_s)
        elif self.training and self.phase is JobPhase.TRAINING:
            self.training.note_batches(record, event, now_s)

    def note_entered(self, record: RankRecord, event: RoundEntered) -> None:
        """The rank has taken its snapshot for a round."""
        if self.training and self.phase is JobPhase.TRAINING:
            self.training.note_entered(record, event)

    def note_held(self, record: RankRecord, event: RoundHeld, now_s: float) -> None:
        """The rank holds a round's result."""
        if self.training is None or self.phase is not JobPhase.TRAINING:
            return
        problem = self.training.note_held(record, event, now_s)
        if problem is not None:
            self._fail(problem)
        elif self.training.is_complete:
            self.life.advance(JobTrigger.LAST_ROUND_COMMITTED)
            self.reason = "writes its final state"

    def note_round_failed(self, record: RankRecord, event: RoundFailed, now_s: float) -> None:
        """The rank will not hold a round."""
        if self.training and self.phase is JobPhase.TRAINING:
            problem = self.training.note_failed(record, event, now_s)
            if problem is not None:
                self._fail(problem)

    def note_evaluated(self, record: RankRecord, event: EvaluationDone) -> None:
        """The evaluation that was asked for is there."""
        if self.loop:
            self.loop.note_evaluated(event)
        if self.training and self.life.accepts(JobTrigger.OUTCOME_DECIDED):
            problem = self.training.note_evaluated(record, event)
            if problem is not None:
                self._fail(problem)
            self._finish()

    def note_checkpoint_saved(self, record: RankRecord, event: CheckpointSaved, now_s: float) -> None:
        """A checkpoint is whole."""
        if self.loop:
            self.loop.note_checkpoint_saved(event, now_s)
        elif self.training:
            self.training.note_checkpoint_saved(record, event, now_s)
            self._finish()

    def note_checkpoint_failed(self, record: RankRecord, event: CheckpointFailed) -> None:
        """A checkpoint cannot be written."""
        if self.loop:
            self.loop.num_checkpoint_failures += 1
        elif self.training:
            self.training.note_checkpoint_failed(record, event)
            self._finish()

    def note_metrics_taken(self, record: RankRecord, event: EpochMetricsTaken) -> None:
        """The job's own callback has taken a finished epoch."""
        record.callback_errors = max(record.callback_errors, event.callback_errors)
        if self.training:
            self.training.metrics_untaken.pop(event.epoch, None)
            self._finish()

    def note_user_event(self, event: UserEventRecorded) -> None:
        """User code wants something to be seen; not after the result, after which nothing follows."""
        if self.result is None:
            report = UserEvent(rank=event.rank, text=event.text, num_dropped=event.num_dropped)
            self._outbox.add(Publish(job_id=self.id, report=report))

    def request_checkpoint(self) -> None:
        """A client wants a checkpoint: the next round that is announced becomes one."""
        if self.loop and self.phase is JobPhase.TRAINING:
            self.loop.request_checkpoint()
        elif self.training and self.phase is JobPhase.TRAINING:
            self.training.checkpoints.request()

    def pause(self, now_s: float, *, is_paused: bool) -> None:
        """A client wants training to stop after the open round, or to go on."""
        if self.loop and self.phase is JobPhase.TRAINING:
            self.loop.pause(is_paused=is_paused)
        elif self.training and self.phase is JobPhase.TRAINING:
            for rank in self.ranks:
                self.stalls.note_order(rank)
            if is_paused:
                self.training.pause()
            else:
                self.training.unpause(now_s)

    def note_saved(self, record: RankRecord, event: FinalStateSaved) -> None:
        """The job's model is on disk."""
        if self.phase is JobPhase.FINISHING:
            self.model_path, self.model_agent_id, self._saver = event.path, record.agent_id, record
            self._finish()

    def note_best_kept(self, record: RankRecord, event: BestKept) -> None:
        """The best model is beside the last one or in its place, or why it cannot be."""
        training = self.training
        is_asked = self._awaits_best and record is self._saver and self.phase is JobPhase.FINISHING
        if training is None or not is_asked:
            return
        self._awaits_best, self.best_problem, self.model_is = False, event.error, "last"
        if training.settings.restore == "best" and not event.error:
            self.model_is = f"best of epoch {training.evaluations.best_epoch}"
        self._finish()

    # End: an outcome is decided once; then the ranks leave; then the job has ended.

    def _finish(self) -> None:
        training, saver = self.training, self._saver
        if self.phase is not JobPhase.FINISHING or training is None or saver is None or not training.is_idle:
            return
        if not self.model_is and not self._awaits_best:
            self._keep_best(training, saver)
        if not self._awaits_best:
            self._decide(Outcome.SUCCEEDED, "all samples are committed")

    def _keep_best(self, training: Training, saver: RankRecord) -> None:
        """Has the best model put beside the last one, or in its place. Every version that was judged has a checkpoint,
        unless it is the last one, or could not be written.
        """
        best = training.evaluations.best_version
        checkpoint = training.checkpoints.of(best)
        if best is None:
            self.model_is = "last"
        elif best != training.version and checkpoint is None:
            self.model_is, self.best_problem = "last", "the best model has no checkpoint, which could not be written"
        else:
            path = checkpoint.path if checkpoint is not None and best != training.version else ""
            restores = training.settings.restore == "best"
            self._outbox.add(SendKeepBest(**saver.address(self.id), checkpoint=path, restores=restores))
            self._awaits_best = True

    def note_failed(self, record: RankRecord, event: RankFailed) -> None:
        """User code raised on the rank, or the job is not valid: the job fails with what the rank says."""
        if self.life.accepts(JobTrigger.OUTCOME_DECIDED):
            self._decide(Outcome.FAILED, event.error, event)

    def note_loop_progress(self, record: RankRecord, event: LoopProgressed) -> None:
        """How far a loop of the user's own is."""
        if self.loop:
            self.loop.note_progress(record, event)

    def note_loop_epoch_ended(self, record: RankRecord, event: LoopEpochEnded) -> None:
        """An epoch of such a loop has ended on a rank."""
        if self.loop:
            self.loop.note_epoch_ended(record, event)

    def note_session_opened(self, record: RankRecord, event: SessionOpened) -> None:
        """A rank of such a loop is there."""
        if self.loop:
            self.loop.has_joined.add(record.rank)

    def note_loop_left(self, record: RankRecord, event: LoopLeft) -> None:
        """A rank of such a loop has come to its end. When all have, the job has succeeded."""
        if self.loop is None:
            return
        record.life.advance(RankTrigger.EXITED)
        has_left_all = all(other.phase is RankPhase.EXITED for other in self.ranks.values())
        if has_left_all and self.life.accepts(JobTrigger.OUTCOME_DECIDED):
            self._decide(Outcome.SUCCEEDED, "the loop has come to its end")
        self._end_if_gone()

    def note_session_lost(self, record: RankRecord, event: SessionLost) -> None:
        """A lost stream is not a death: the agent says when the process has ended, and is asked to end it. Of a loop
        of the user's own there is no agent: its process is gone, or nobody can reach it."""
        if self.loop is not None:
            if record.phase is not RankPhase.EXITED:
                where = f"rank {record.rank} on {record.host} ({record.device})"
                self.note_exited(record, f"{where} is gone without a word, at batch {record.local_step}")
        elif self.phase is not JobPhase.STOPPING and not record.is_stopped and record.phase is not RankPhase.EXITED:
            self._stop(record)

    def note_exited(self, record: RankRecord, notice: str, log_tail: str = "") -> None:
        """The process has ended. Before an outcome is decided, that fails the job with the notice."""
        record.life.advance(RankTrigger.EXITED)
        if self.life.accepts(JobTrigger.OUTCOME_DECIDED):
            self.num_lost_ranks += 1
            self._fail(notice, traceback=log_tail, record=record)
        self._end_if_gone()

    def break_off(self, reason: str) -> None:
        """Something of the job could not be carried out. Nothing changes when its outcome is decided."""
        if self.life.accepts(JobTrigger.OUTCOME_DECIDED):
            self._fail(reason)

    def cancel(self) -> None:
        """Ends the job by request. Nothing changes when its outcome is decided."""
        if self.life.accepts(JobTrigger.OUTCOME_DECIDED):
            self._decide(Outcome.CANCELLED, "cancelled by request")

    def stop_stragglers(self) -> None:
        """The grace time is over: processes that have not left are ended; of a loop, those that never came are gone."""
        if self.loop is not None and self.phase is JobPhase.TRAINING:
            for record in self.ranks.values():
                if record.rank not in self.loop.has_joined and record.phase is not RankPhase.EXITED:
                    self.note_exited(
                        record, f"rank {record.rank} on {record.host} never came: it cannot reach us, or is gone"
                    )
            return
        for record in self.ranks.values():
            if record.phase is RankPhase.EXITED:
                continue
            if self.loop is not None:
                self.note_exited(record, "")
            else:
                self._stop(record)

    def _fail(
        self, error: str, *, invalid: bool = False, traceback: str = "", record: RankRecord | None = None
    ) -> None:
        """Of no rank's fault unless its record is given: no rank has the incarnation 0."""
        failure = RankFailed(
            job_id=self.id,
            rank=record.rank if record else Rank(0),
            incarnation=record.incarnation if record else Incarnation(0),
            error=error,
            traceback=traceback,
            invalid=invalid,
        )
        self._decide(Outcome.FAILED, error, failure)

    def _decide(self, outcome: Outcome, reason: str, failure: RankFailed | None = None) -> None:
        self.life.advance(JobTrigger.OUTCOME_DECIDED)
        self.reason = reason
        self._decided = (outcome, failure)
        self._outbox.change()
        for record in self.ranks.values():
            if record.is_connected:
                self._outbox.add(SendShutdown(**record.address(self.id), reason=reason))
            elif record.phase is RankPhase.STARTING:
                self._stop(record)
        self._set_deadline(STOP_GRACE_S)
        self._end_if_gone()

    def _stop(self, record: RankRecord) -> None:
        record.is_stopped = True
        self._outbox.add(StopRank(**record.address(self.id), agent_id=record.agent_id, grace_s=KILL_GRACE_S))

    def _end_if_gone(self) -> None:
        if self.phase is JobPhase.STOPPING and self._census[RankPhase.EXITED] == len(self.ranks):
            self.life.advance(JobTrigger.RANKS_GONE)
            self._set_deadline(None)
            self._outbox.change()
            self.result = self._make_result()
            self.spec = replace(self.spec, source="", replay=())  # whoever resumes the job reads it from the record
            self._outbox.add(Publish(job_id=self.id, report=self.result))

    def _make_result(self) -> JobResult:
        assert self._decided is not None
        outcome, failure = self._decided
        result = JobResult(
            outcome=outcome,
            error="" if outcome is Outcome.SUCCEEDED else self.reason,
            traceback=failure.traceback if failure else "",
            invalid=failure.invalid if failure else False,
            failed_rank=failure.rank if failure and failure.incarnation else None,
        )
        if self.loop is not None:
            return self.loop.complete(result)
        if self.training is None:
            return result
        result = replace(result, model=self.model_path, model_is=self.model_is, best_problem=self.best_problem)
        return _with_training(result, self.training, self.ranks)

    def to_json(self) -> dict[str, object]:
        """The durable record, as plain values."""
        return {
            "format": RECORD_FORMAT,
            "key": self.key,
            "phase": self.phase,
            "reason": self.reason,
            "submitted_at": self.submitted_at,
            "attempt": self.attempt,
            "generation": self.generation,
            "ranks": {str(rank): [record.incarnation, record.base_step] for rank, record in self.ranks.items()},
            "training": books.to_json() if (books := self.training or self.loop) else None,
            "result": plain(self.result) if self.result else None,
        }


def plain(value: Any) -> Any:
    """A message as plain values, its fields by name; many times faster than `asdict`, since nothing is copied."""
    if isinstance(value, tuple):
        return [plain(one) for one in value]
    fields = getattr(value, "__dataclass_fields__", None)
    return value if fields is None else {name: plain(getattr(value, name)) for name in fields}


def _with_training(result: JobResult, training: Training, ranks: dict[Rank, RankRecord]) -> JobResult:
    """The result with what training came to."""
    rate, bound, fraction = training.throughput()
    ledger = training.ledger
    started, committed = training.started, training.committed
    return replace(
        result,
        epochs=ledger.epoch,
        metrics=training.evaluations.metrics,
        metrics_epoch=training.evaluations.metrics_epoch,
        best_epoch=training.evaluations.best_epoch,
        best_metrics=training.evaluations.best_metrics,
        samples_per_s=rate,
        bound_samples_per_s=bound,
        bound_fraction=fraction,
        dataset_size=ledger.extent.dataset_size,
        committed_samples=tuple(ledger.committed_samples(Epoch(epoch)) for epoch in range(ledger.num_begun)),
        dropped_samples=(ledger.dropped_size,) * ledger.num_begun,
        rounds=training.version,
        ranks=tuple(_rank_result(record) for record in ranks.values()),
        discarded_samples=training.discarded_samples,
        checkpoints=training.checkpoints.shown(training.evaluations.best_version),
        ended_early=training.ended_early,
        duration_s=committed.at_s - started.at_s if started and committed else 0.0,
    )


def _nothing_to_train(training: Training, resumed: str) -> str:
    if resumed:
        return f"the checkpoint {resumed} is of a training that is complete; give more epochs to go on with it"
    return "drop_last leaves nothing to train: the data set is shorter than one batch"


def _rank_result(record: RankRecord) -> RankResult:
    return RankResult(
        device=record.device,
        batches=record.base_step,
        ms_per_batch=record.compute_ms / record.base_step if record.base_step else 0.0,
        waited_s=record.waited_ms / 1000,
    )


def death_notice(record: RankRecord, event: RankExited) -> str:
    """How the rank's process ended, in words for the user."""
    code = event.exit_code
    how = f"was killed by signal {-code}" if code < 0 else f"left with exit code {code}"
    out_of_memory = " (often: out of memory)" if code == -9 else ""
    path = event.log_path or record.log_path
    log = f"; its log is {path}" if path else ""
    who = f"rank {record.rank} on {record.host} ({record.device})"
    if record.more_slots and event.member < len(record.slot_devices):
        who = f"member {event.member} ({record.slot_devices[event.member]}) of {who}"
    return f"{who} {how}{out_of_memory} at batch {record.local_step}{log}"
