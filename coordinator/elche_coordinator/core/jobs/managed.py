"""The body of a job whose ranks elche starts: they load the user's file, form a process group, train, leave a model."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import assert_never

from elche_coordinator.core.jobs.deaths import Deaths
from elche_coordinator.core.jobs.duties import duty_of, has_batch_due
from elche_coordinator.core.jobs.final_model import FinalModel
from elche_coordinator.core.jobs.hangs import Duty
from elche_coordinator.core.jobs.job import Job
from elche_coordinator.core.jobs.links import LinkWatch
from elche_coordinator.core.jobs.membership import Membership
from elche_coordinator.core.jobs.notices import nothing_to_train, too_few_notice
from elche_coordinator.core.jobs.outcome import with_training
from elche_coordinator.core.jobs.stalls import StallWatch
from elche_coordinator.core.jobs.startup import Startup
from elche_coordinator.core.messages.commands import Publish
from elche_coordinator.core.messages.events import (
    BatchesTrained,
    BestKept,
    BodyEvent,
    CheckpointFailed,
    CheckpointSaved,
    EpochMetricsTaken,
    EvaluationDone,
    FinalStateSaved,
    GenerationAbandoned,
    GroupFormed,
    LeaveAsked,
    LinksProbed,
    LoopEpochEnded,
    LoopLeft,
    LoopProgressed,
    RankReady,
    ReserveRecalled,
    ResultReceived,
    RoundEntered,
    RoundFailed,
    SessionOpened,
)
from elche_coordinator.core.messages.ids import Attempt, GenerationId, Rank, RoundId
from elche_coordinator.core.messages.reports import Checkpoint, JobResult, MembershipReport, Outcome
from elche_coordinator.core.messages.spec import first_disagreement
from elche_coordinator.core.records.machine import Hold, JobPhase, JobTrigger, RankPhase, RankTrigger
from elche_coordinator.core.records.ranks import RankRecord, RankRecords, num_hosts, present, staying
from elche_coordinator.core.results.training import Training
from elche_coordinator.core.rounds.backends import Choice, choose_backend
from elche_coordinator.core.rounds.generation import Generation


class ManagedTraining:
    """Starts, groups and trains the ranks. There is no training and no generation until all are ready and agree."""

    def __init__(self, job: Job, past_attempts: int = 0, kept: Iterable[Checkpoint] = ()) -> None:
        """`kept`: the checkpoints of the attempt before."""
        self._job = job
        self._startup = Startup(past_attempts, list(kept))
        self._first_choice: Choice | None = None
        """By which backend the first ranks are to average, once they have agreed."""
        self.training: Training | None = None
        self.membership: Membership | None = None
        self.model = FinalModel(job.id, job.outbox)
        self._links = LinkWatch(job.id, job.outbox)

    @property
    def attempt(self) -> Attempt:
        """One more than that of the checkpoint that it goes on from; else 1."""
        return self._startup.attempt

    @property
    def generation(self) -> Generation | None:
        """The ranks that make rounds together; None before the first group stands."""
        return self.membership.standing if self.membership is not None else None

    @property
    def backend(self) -> Choice | None:
        """By which backend the ranks average, or will first; None before they have agreed."""
        return self.generation.backend if self.generation is not None else self._first_choice

    @property
    def generation_id(self) -> GenerationId:
        """The newest generation, which may be forming; 0 before there is any."""
        return self.membership.newest if self.membership is not None else GenerationId(0)

    @property
    def is_paused(self) -> bool:
        """Whether somebody has paused it."""
        return self.training is not None and Hold.ASKED in self.training.holds

    @property
    def is_waiting(self) -> bool:
        """Whether its ranks are too few to train."""
        return self.training is not None and Hold.TOO_FEW in self.training.holds

    def take_in(self, record: RankRecord, event: BodyEvent, now_s: float) -> None:
        """An event of a rank: of its start, of rounds, and of what was made of their results."""
        match event:
            case BatchesTrained() | RoundEntered() | ResultReceived() | RoundFailed() | ReserveRecalled():
                self._on_training(record, event, now_s)
            case RankReady():
                self._on_ready(record, event, now_s)
            case LeaveAsked():
                self.leave([record], now_s)
            case LinksProbed():
                if (apart := self._links.on_probed(record, event)) is not None:
                    self._leave_out(apart, now_s)
            case GroupFormed() | GenerationAbandoned():
                self._on_generation(record, event, now_s)
            case EvaluationDone() | CheckpointSaved() | CheckpointFailed() | EpochMetricsTaken():
                self._on_result_of_round(record, event, now_s)
            case FinalStateSaved():
                if self._job.phase is JobPhase.FINISHING:
                    self.model.on_saved(record, event)
                    self._finish()
                else:
                    self._job.refuse_now(event, "nobody was to write a final state")
            case BestKept():
                if self.training is not None and self.model.awaits_best_of(record):
                    self.model.on_best_kept(event, self.training)
                    self._finish()
                else:
                    self._job.refuse_now(event, f"rank {record.rank} was not to keep the best model")
            case SessionOpened():
                pass  # what it brings comes with `RankReady`
            case LoopProgressed() | LoopEpochEnded() | LoopLeft():
                self._job.refuse_now(event, "it is no loop of the user's own")
            case _:
                assert_never(event)

    # On the way to training

    def _on_ready(self, record: RankRecord, event: RankReady, now_s: float) -> None:
        """The rank has read the user's file. When all have, and agree, the group forms."""
        job = self._job
        record.life.advance(RankTrigger.LOADED)
        record.settings, record.device, record.build = event.settings, event.device, event.build
        record.links_address = event.links_address
        record.batch_size = event.batch_size or event.settings.batch_size
        if self.membership is not None:
            self._take_in(record)
            return
        self._startup.add(record.rank, event)
        if job.phase is not JobPhase.STARTING or job.num_in(RankPhase.STARTING):
            return
        problem = self._startup.problem(job.ranks) or self._begin_training(record)
        if problem is not None:
            job.fail(problem, invalid=True)
            return
        assert self.training is not None
        job.advance(JobTrigger.RANKS_READY, "its ranks meet")
        self.membership = Membership(job, self.training, self._choose_backend, self.attempt)
        self.membership.form(dict(job.ranks))
        job.watch_silence(now_s)

    def _choose_backend(self, members: RankRecords) -> Choice:
        """By which backend these ranks are to average."""
        assert self.training is not None
        assert self._first_choice is not None
        if self.training.settings.backend != "auto":
            return self._first_choice
        builds = {rank: record.build for rank, record in members.items() if record.build is not None}
        return choose_backend("auto", builds, num_hosts(members))

    def _take_in(self, record: RankRecord) -> None:
        """A rank that was started while others train is ready."""
        training, membership = self.training, self.membership
        assert training is not None
        assert membership is not None
        assert record.settings is not None
        problem = first_disagreement({Rank(-1): training.settings, record.rank: record.settings})
        if problem is not None:
            self._job.fail(f"rank {record.rank} was started again and is another: {problem}", invalid=True)
        else:
            membership.change_members()

    def _begin_training(self, record: RankRecord) -> str | None:
        """Makes the training with the settings on which all agree. Returns why that is impossible, if so."""
        job, settings = self._job, record.settings
        assert settings is not None
        try:
            builds = {rank: other.build for rank, other in job.ranks.items() if other.build is not None}
            self._first_choice = choose_backend(settings.backend, builds, num_hosts(job.ranks))
            training = Training(
                job.id,
                settings,
                job.ranks,
                job.outbox,
                attempt=self.attempt,
                resumed=self._startup.resumed,
                replay=job.spec.replay,
            )
        except ValueError as error:
            return str(error)
        training.checkpoints.adopt(self._startup.kept, training.version)
        self.training = training
        return nothing_to_train(job.spec.resume) if training.is_complete else None

    def _on_generation(self, record: RankRecord, event: GroupFormed | GenerationAbandoned, now_s: float) -> None:
        """A rank's group stands, or nothing of it runs any more."""
        job, membership = self._job, self.membership
        if membership is None or not job.is_open:
            job.refuse_now(event, "no group is to stand")
        elif isinstance(event, GroupFormed):
            membership.on_formed(record, event, now_s)
        else:
            self._go_on_or_fail(membership.on_abandoned(record, event, now_s))
            self.check_links(now_s)
        self._hold_or_go_on(now_s)

    def _go_on_or_fail(self, problem: str | None) -> None:
        """After rounds may have been committed: the job fails, comes to its end, or goes on."""
        job, training = self._job, self.training
        if problem is not None:
            job.fail(problem)
        elif training is not None and training.is_complete and job.phase is JobPhase.TRAINING:
            job.advance(JobTrigger.LAST_ROUND_COMMITTED, "writes its final state")

    # Training

    def _on_training(
        self,
        record: RankRecord,
        event: BatchesTrained | ReserveRecalled | RoundEntered | ResultReceived | RoundFailed,
        now_s: float,
    ) -> None:
        """Batches and rounds."""
        job, generation, training = self._job, self.generation, self.training
        version = training.version if training is not None else 0
        if generation is None or training is None or job.phase is not JobPhase.TRAINING:
            if not isinstance(event, BatchesTrained):  # which ranks tell until they leave
                job.refuse_now(event, "rounds are made only while it trains")
            return
        assert self.membership is not None
        problem: str | None = None
        match event:
            case BatchesTrained():
                generation.on_batches(record, event, now_s)
            case ReserveRecalled():
                generation.on_recalled(record, event, now_s)
                self.membership.take_over(now_s)  # which may have waited for that
            case RoundEntered():
                generation.on_entered(record, event, now_s)
            case ResultReceived():
                problem = generation.on_result(record, event, now_s)
            case RoundFailed():
                problem = generation.on_round_failed(record, event, now_s)
            case _:
                assert_never(event)
        if problem is None and generation.is_torn and generation.abandoned is None:
            problem = self.membership.give_up(now_s)
        elif problem is None and training.version > version and not training.is_complete:
            self.membership.on_committed(now_s)
        self._go_on_or_fail(problem)
        self._hold_or_go_on(now_s)

    def _on_result_of_round(
        self,
        record: RankRecord,
        event: EvaluationDone | CheckpointSaved | CheckpointFailed | EpochMetricsTaken,
        now_s: float,
    ) -> None:
        """Something that was to be made of a round's result is done; the job may have waited for it to finish."""
        training = self.training
        job = self._job
        if training is None or (isinstance(event, EvaluationDone) and not job.is_open):
            job.refuse_now(event, "its outcome is decided, or it has no training yet")
            return
        match event:
            case EvaluationDone():
                problem = training.on_evaluated(record, event)
                if problem is not None:
                    job.fail(problem)
            case CheckpointSaved():
                training.on_checkpoint_saved(record, event, now_s)
                if job.phase is JobPhase.TRAINING and not staying(job.ranks) and not training.checkpoints.is_awaited:
                    job.go_back(record, f"rank {record.rank} leaves {record.host}", now_s, is_death=False)
                    return
            case CheckpointFailed():
                training.on_checkpoint_failed(record, event)
            case EpochMetricsTaken():
                training.on_metrics_taken(record, event)
            case _:
                assert_never(event)
        self._finish()

    def request_checkpoint(self) -> None:
        """The next round that is announced becomes a checkpoint."""
        if self.training is not None:
            self.training.checkpoints.request()

    def pause(self, now_s: float, *, is_paused: bool) -> None:
        """Ranks stop after the open round, or go on."""
        if self.generation is None:
            return
        self._set_hold(Hold.ASKED, now_s, holds=is_paused)

    def _set_hold(self, hold: Hold, now_s: float, *, holds: bool) -> None:
        assert self.generation is not None
        self._job.silence.forgive()
        if holds:
            self.generation.pause(hold)
        else:
            self.generation.unpause(hold, now_s)

    def _hold_or_go_on(self, now_s: float) -> None:
        """Below its least number of ranks the job waits for others. Where nobody is to stay it does not: it goes back
        to a checkpoint, which takes a round.
        """
        training, job = self.training, self._job
        if training is None or self.generation is None or job.phase is not JobPhase.TRAINING or training.is_complete:
            return
        there = staying(training.members)
        is_short = 0 < len(there) < job.spec.min_ranks
        if is_short != self.is_waiting:
            self._set_hold(Hold.TOO_FEW, now_s, holds=is_short)
            self._tell_waiting(len(there), is_over=not is_short)

    def _tell_waiting(self, num_ranks: int, *, is_over: bool) -> None:
        job = self._job
        rank = next(rank for rank in map(Rank, count()) if is_over or rank not in staying(job.ranks))
        waits = f"the job {too_few_notice(num_ranks, job.spec.min_ranks)}"
        text = f"{num_ranks} ranks are there: the job goes on" if is_over else waits
        report = MembershipReport(rank=rank, text=text, num_ranks=num_ranks, is_back=is_over)
        job.outbox.add(Publish(job_id=job.id, report=report))

    def duty(self, record: RankRecord, stalls: StallWatch) -> Duty:
        """A batch, an evaluation, or to wait for others, such as in a round."""
        return duty_of(record, self.training, self.generation, stalls)

    def has_batch_due(self, record: RankRecord) -> bool:
        """Whether the rank trains, and neither waits for others nor does something else."""
        return has_batch_due(record, self.generation)

    def target(self, rank: Rank) -> int:
        """The step after which the rank joins the first open round; 0 without one."""
        return self.generation.target(rank) if self.generation is not None else 0

    @property
    def explanation(self) -> str:
        """How the next round was decided, in words for people; empty before there is any."""
        return self.generation.scheduler.reason if self.generation is not None else ""

    def position_in_round(
        self, record: RankRecord, generation: GenerationId, round_id: RoundId
    ) -> tuple[int, int] | None:
        """The rank's position among the members of an open round, and their number; None when it is no member."""
        opened = self.generation.open_round(round_id, generation) if self.generation is not None else None
        if opened is None or record.rank not in opened.targets:
            return None
        return list(opened.targets).index(record.rank), len(opened.targets)

    def is_evaluating(self, rank: Rank) -> bool:
        """Whether the rank has a part of an evaluation to make."""
        return self.training is not None and self.training.evaluations.has(rank)

    # Losing ranks

    def check_links(self, now_s: float) -> None:
        """Has ranks try their links that are in an averaging in which nothing moves, or cannot build a first group."""
        if (training := self.training) is not None and (group := self.membership) is not None:
            first = group.first_of_several_hosts or (group.forming if group.standing is None else None)
            self._links.check(group.standing, first, training.longest_averaging_ms, now_s)
            if group.standing is None:
                self._job.watch_silence(now_s)  # ranks that cannot meet say nothing

    def _leave_out(self, apart: Mapping[Rank, str], now_s: float) -> None:
        """These ranks have no way to others, and why: the first ones meet through the coordinator, if they may."""
        if self._links.is_of_group and (membership := self.membership) is not None:
            forming = membership.forming if self._links.is_of(membership.forming) else None
            has_relayed = bool(apart) and forming is not None and membership.relay(next(iter(apart.values())))
            if forming is not None and forming.failure and not has_relayed:
                self._go_on_or_fail(membership.try_others(forming, forming.failure, now_s))
            return
        for rank in filter(lambda rank: self.can_lose(self._job.ranks[rank]), apart):
            self._job.leave_out(self._job.ranks[rank], apart[rank], now_s)

    def blame(self, record: RankRecord, deaths: Deaths, now_s: float) -> str | None:
        """The rank has died: says so when it is one of several that have died on the same samples."""
        training, generation = self.training, self.generation
        if training is None or generation is None:
            return None
        trained = generation.should_work(record)
        return deaths.blame(record, training.ledger, training.settings, now_s, trained=trained)

    def can_lose(self, record: RankRecord) -> bool:
        """Whether somebody else has the model, and the user wants the job to go on."""
        training = self.training
        if training is None or self.membership is None or not self._job.is_open:
            return False
        if training.settings.on_rank_loss == "fail" or training.replay is not None:
            return False
        return any(training.has_model(one) for one in present(training.members).values() if one is not record)

    def lose(self, record: RankRecord, now_s: float) -> None:
        """The others go on without the rank."""
        assert self.training is not None
        assert self.membership is not None
        problem = self.training.lose(record)
        if problem is None and self._job.phase is not JobPhase.FINISHING:
            problem = self.membership.on_lost(record, now_s)
        self.model.lose(record)
        self._go_on_or_fail(problem)
        self._hold_or_go_on(now_s)
        self._finish()

    def leave(self, leaving: Sequence[RankRecord], now_s: float) -> None:
        """These ranks are to go once their work is committed. If nobody stays who has the model, the job goes back to a
        checkpoint that is made now.
        """
        if leaving:
            self._leave(leaving, now_s)
        self._hold_or_go_on(now_s)  # also when its least number has changed

    def _leave(self, leaving: Sequence[RankRecord], now_s: float) -> None:
        training, membership, job = self.training, self.membership, self._job
        if job.phase is JobPhase.STARTING and self.goes_back(is_violent=True):
            job.go_back(leaving[0], f"rank {leaving[0].rank} is to leave {leaving[0].host}", now_s, is_death=False)
        if training is None or membership is None or job.phase not in (JobPhase.GROUPING, JobPhase.TRAINING):
            return
        if training.replay is not None:
            return
        for record in leaving:
            record.is_leaving = True
            if not training.has_model(record) and record.is_present:
                job.let_go(record)  # a newcomer: others do without it at once
                self.lose(record, now_s)
        if any(map(training.has_model, staying(training.members).values())):
            self._go_on_or_fail(membership.on_leaving(now_s))
        else:
            training.checkpoints.request()

    def stay(self, records: Sequence[RankRecord], now_s: float) -> None:
        """They need not leave after all."""
        for record in records:
            record.is_leaving = False
        if self.membership is not None:
            self._go_on_or_fail(self.membership.on_leaving(now_s))
        self._hold_or_go_on(now_s)

    def goes_back(self, *, is_violent: bool) -> bool:
        """Whether the job begins anew from its newest checkpoint when nobody is left who has the model. A process that
        ends by itself would do so again.
        """
        settings = [record.settings for record in self._job.ranks.values() if record.settings is not None]
        wanted = [self._job.spec.on_rank_loss, *(one.on_rank_loss for one in settings)]
        return is_violent and not self._job.spec.replay and "fail" not in wanted

    @property
    def resume_point(self) -> str:
        """The checkpoint, or the folder of checkpoints, from which the job would begin anew; empty: from its start.

        The newest checkpoint in the folder may be newer than any that the coordinator knows. Of a complete training
        that would leave nothing to train, so then an older one is named.
        """
        training, before = self.training, self._job.spec.resume
        if training is None or not training.checkpoints.kept:
            return before
        if training.is_complete:
            older = training.checkpoints.newest_before(training.version)
            return older.path if older is not None else before
        return training.checkpoints.kept[-1].path.rpartition("/")[0]

    @property
    def has_saved(self) -> bool:
        """Whether this attempt has come to a checkpoint."""
        return self.training is not None and self.training.checkpoints.saved_at_s is not None

    def anew(self) -> "ManagedTraining":
        """The body of the job's next attempt."""
        kept = self._startup.kept if self.training is None else self.training.checkpoints.kept
        return ManagedTraining(self._job, self.attempt, kept)

    # End

    def on_session_lost(self, record: RankRecord) -> None:
        """The process may still run: its agent is asked to end it, and reports when it has."""
        if not (self._job.phase is JobPhase.STOPPING or record.is_stopped or record.phase is RankPhase.EXITED):
            self._job.stop(record)

    def on_deadline(self) -> None:
        """Processes that have not left in time are ended."""
        for record in self._job.ranks.values():
            if record.phase is not RankPhase.EXITED:
                self._job.stop(record)

    def _finish(self) -> None:
        training, job = self.training, self._job
        if job.phase is JobPhase.FINISHING and training is not None and self.model.complete(training):
            job.decide(Outcome.SUCCEEDED, "all samples are committed")

    def work_done(self) -> dict[Rank, int]:
        """Committed batches of each rank."""
        return {rank: record.num_batches for rank, record in self._job.ranks.items()}

    def complete(self, result: JobResult) -> JobResult:
        """The result with what training came to."""
        return with_training(result, self.training, self.model, self._job.ranks) if self.training else result
