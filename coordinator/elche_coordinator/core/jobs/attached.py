"""A job whose processes the user has started: a loop of their own, which decides what it trains, and reports."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import assert_never

from elche_coordinator.core.jobs.deaths import Deaths
from elche_coordinator.core.jobs.hangs import Duty
from elche_coordinator.core.jobs.job import Job
from elche_coordinator.core.jobs.regrouping import Regrouping
from elche_coordinator.core.jobs.stalls import StallWatch
from elche_coordinator.core.messages.commands import Publish, SendPauseLoop, SendSaveCheckpoint
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
    LoopAttached,
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
from elche_coordinator.core.messages.ids import AgentId, Attempt, GenerationId, Incarnation, Rank
from elche_coordinator.core.messages.reports import (
    Checkpoint,
    EpochReport,
    EvaluationReport,
    JobResult,
    Outcome,
    RankResult,
)
from elche_coordinator.core.records.machine import JobPhase, JobTrigger, RankPhase, RankTrigger
from elche_coordinator.core.records.ranks import RankRecord
from elche_coordinator.core.results.tally import EpochTally

MAX_EPOCHS_OPEN = 4
"""Epochs that may have ended on some ranks and not yet on others; with more, the oldest is reported as it is."""
MAX_EPOCHS_TOLD = 10_000
"""Newest epochs whose sizes the result has: a loop may make very many."""
MAX_CHECKPOINTS = 100
"""The newest ones that are remembered; the loop itself removes what it does not keep."""


JOIN_GRACE_S = 60.0
"""Time in which all ranks of a new loop must have connected."""


class AttachedLoop:
    """The body of a job without agent, slots, leases and rounds: its ranks train already."""

    attempt = Attempt(1)

    def __init__(
        self, job: Job, event: LoopAttached, next_incarnation: Callable[[], Incarnation], now_s: float
    ) -> None:
        self.policy = event.policy
        self.latest_s = now_s
        """When a rank has last reported progress."""
        self.is_paused = False
        self.progress: LoopProgressed | None = None
        """The newest, of rank 0."""
        self.metrics: dict[str, float] = {}
        """Of the last evaluation."""
        self.checkpoints: list[Checkpoint] = []
        self.num_checkpoint_failures = 0
        self.saved_at_s: float | None = None
        self.num_epochs = 0
        """That have ended here."""
        self.epoch_sizes: list[int] = []
        """Samples of all ranks in each of the newest of them."""
        self._began_s = now_s
        self._joined: set[Rank] = set()
        """Ranks that have opened their session."""
        self._tallies: dict[int, tuple[EpochTally, set[Rank]]] = {}
        """For each epoch: its sums, and the ranks that have finished it."""
        self._num_done: dict[int, int] = {}
        """Samples of these epochs, as ranks that have finished them say; those of dead ranks are among them."""
        self._job = job
        self._can_regroup = event.can_regroup
        self._groups = Regrouping(job)
        self._start(event, next_incarnation)

    def _start(self, event: LoopAttached, next_incarnation: Callable[[], Incarnation]) -> None:
        """The ranks train already: the job skips the phases of placing and grouping."""
        job = self._job
        for trigger in (JobTrigger.PLACED, JobTrigger.RANKS_READY, JobTrigger.GROUP_FORMED):
            job.advance(trigger, "trains, in a loop of its own")
        for index, (host, device) in enumerate(event.ranks):
            record = RankRecord(
                rank=Rank(index),
                incarnation=next_incarnation(),
                agent_id=AgentId(""),
                slot=0,
                host=host,
                device=device,
                life=job.new_life(),
            )
            record.life.advance(RankTrigger.LOADED)
            record.life.advance(RankTrigger.GROUPED)
            job.ranks[record.rank] = record
        job.set_deadline(JOIN_GRACE_S)

    def take_in(self, record: RankRecord, event: BodyEvent, now_s: float) -> None:
        """What a rank reports of its loop."""
        match event:
            case BatchesTrained():
                self._on_batches(record, event, now_s)
            case LoopProgressed():
                self._on_progress(event)
            case LoopEpochEnded():
                self._on_epoch_ended(record, event)
            case EvaluationDone():
                self._on_evaluated(event)
            case CheckpointSaved():
                self._on_checkpoint_saved(event, now_s)
            case CheckpointFailed():
                self.num_checkpoint_failures += 1
            case SessionOpened():
                self._joined.add(record.rank)
            case LoopLeft():
                self._on_left(record)
            case GenerationAbandoned() if self._can_regroup:
                self._groups.on_abandoned(record, event)
            case (
                RoundEntered()
                | ReserveRecalled()
                | ResultReceived()
                | RoundFailed()
                | RankReady()
                | GroupFormed()
                | GenerationAbandoned()
                | LinksProbed()
                | LeaveAsked()
                | EpochMetricsTaken()
                | FinalStateSaved()
                | BestKept()
            ):
                self._job.refuse_now(event, "it is a loop of the user's own")
            case _:
                assert_never(event)

    @property
    def generation_id(self) -> GenerationId:
        """The group of its ranks: 0 is the one that the script has made."""
        return self._groups.generation_id

    @property
    def num_samples(self) -> int:
        """Trained by all ranks, as reported."""
        return sum(record.num_samples for record in self._job.ranks.values())

    @property
    def loss(self) -> float | None:
        """Mean over ranks of their last reported losses."""
        losses = [one.loss for one in self._job.ranks.values() if one.loss is not None]
        return sum(losses) / len(losses) if losses else None

    @property
    def duration_s(self) -> float:
        """From its beginning to the last report of a rank."""
        return max(0.0, self.latest_s - self._began_s)

    @property
    def samples_per_s(self) -> float:
        """Of all ranks, since it began."""
        return self.num_samples / self.duration_s if self.duration_s else 0.0

    def _on_batches(self, record: RankRecord, event: BatchesTrained, now_s: float) -> None:
        """Progress of one rank."""
        self.latest_s = now_s
        if event.gauges is not None:
            record.gauges = event.gauges
        if event.loss_count:
            record.loss = event.loss_sum / event.loss_count
        if event.local_step > record.local_step:
            record.compute_ms += sum(event.batch_ms)
            self._groups.on_batches()
        record.on_batches(event.local_step, event.batch_ms, now_s)
        record.base_step = max(record.base_step, event.local_step)
        record.num_samples = max(record.num_samples, event.num_processed)
        if record.local_step:
            record.batch_size = max(1, round(record.num_samples / record.local_step))
        record.data_wait_ms = max(record.data_wait_ms, event.data_wait_ms)
        record.waited_ms = max(record.waited_ms, event.waited_ms)

    def _on_progress(self, event: LoopProgressed) -> None:
        """How far the loop is. Old news changes nothing."""
        if self.progress is None or event.num_steps >= self.progress.num_steps:
            self.progress = event

    def _on_epoch_ended(self, record: RankRecord, event: LoopEpochEnded) -> None:
        """One rank has ended an epoch. Epochs that all have ended are reported, in order."""
        epoch = event.work.epoch
        tally, ended = self._tallies.setdefault(epoch, (EpochTally(), set()))
        if record.rank in ended:
            return
        tally.add(record.rank, event.work)
        ended.add(record.rank)
        tally.duration_s = max(tally.duration_s, event.duration_s)
        self._num_done[epoch] = max(self._num_done.get(epoch, 0), event.num_done)
        self._tell_epochs()

    def _tell_epochs(self) -> None:
        """Reports the epochs that all who are there have ended, in order."""
        while self._tallies:
            oldest = min(self._tallies)
            ended = self._tallies[oldest][1]
            is_open = any(record.rank not in ended for record in self._groups.members)
            if is_open and len(self._tallies) <= MAX_EPOCHS_OPEN:
                return
            self._tell_epoch(oldest)

    def _tell_epoch(self, epoch: int) -> None:
        tally, _ = self._tallies.pop(epoch)
        num_samples = self._num_done.pop(epoch, 0) or sum(tally.rank_samples.values())
        self.num_epochs += 1
        self.epoch_sizes = [*self.epoch_sizes, num_samples][-MAX_EPOCHS_TOLD:]
        report: EpochReport = tally.report(epoch=epoch, ranks=list(self._job.ranks), committed=num_samples, dropped=0)
        self._job.outbox.add(Publish(job_id=self._job.id, report=report))

    def _on_evaluated(self, event: EvaluationDone) -> None:
        """The loop has evaluated, its own way."""
        self.metrics = {name: total / count for name, (total, count) in event.sums.items() if count}
        report = EvaluationReport(epoch=event.epoch, metrics=self.metrics, duration_s=event.duration_ms / 1000)
        self._job.outbox.add(Publish(job_id=self._job.id, report=report))

    def _on_checkpoint_saved(self, event: CheckpointSaved, now_s: float) -> None:
        """A checkpoint is written completely."""
        saved = Checkpoint(
            version=event.version,
            name=event.path.rpartition("/")[2],
            path=event.path,
            epoch=self.progress.epoch if self.progress else 0,
            global_step=event.version,
            size_bytes=event.size_bytes,
            duration_s=event.duration_s,
            metrics=self.metrics,
        )
        self.checkpoints = [*(one for one in self.checkpoints if one.path != saved.path), saved][-MAX_CHECKPOINTS:]
        self.saved_at_s = now_s
        self._job.outbox.add(Publish(job_id=self._job.id, report=saved))

    def request_checkpoint(self) -> None:
        """A client wants a checkpoint; the first rank brings it to the others."""
        for record in self._groups.members[:1]:
            self._job.outbox.add(SendSaveCheckpoint(**record.address(self._job.id)))

    def pause(self, now_s: float, *, is_paused: bool) -> None:
        """A client wants the loop to stop after one of its next steps, or to go on."""
        self.is_paused = is_paused
        for record in self._job.ranks.values():
            self._job.outbox.add(SendPauseLoop(**record.address(self._job.id), is_paused=is_paused))

    def duty(self, record: RankRecord, stalls: StallWatch) -> Duty:
        """Its steps, unless it is paused."""
        return Duty(is_busy=True, stall_s=None if self.is_paused else stalls.patience_s(record))

    def has_batch_due(self, record: RankRecord) -> bool:
        """Its next step: what else the user's code does is not known."""
        return not self.is_paused

    def _on_left(self, record: RankRecord) -> None:
        """The rank has come to its end. When all have, the job has succeeded."""
        job = self._job
        record.life.advance(RankTrigger.EXITED)
        self._tell_epochs()
        self._groups.on_left(record)
        if job.num_in(RankPhase.EXITED) == len(job.ranks) and job.is_open:
            job.decide(Outcome.SUCCEEDED, "the loop has come to its end")
        job.end_if_gone()

    def on_session_lost(self, record: RankRecord) -> None:
        """No agent watches the process: it counts as gone, and the others go on without it where they can."""
        if record.phase is RankPhase.EXITED:
            return
        where = f"rank {record.rank} on {record.host} ({record.device})"
        notice = f"{where} disconnected without reporting an exit, at batch {record.local_step}"
        others = [one for one in self._groups.members if one is not record]
        if self._can_regroup and others and self._job.is_open:
            self._job.note_gone(record)
            self._groups.on_lost()
            self._job.tell_lost(record, notice)
            self._tell_epochs()
        else:
            self._lose(record, notice)

    def on_deadline(self) -> None:
        """While the loop trains: ranks that have not connected count as gone; at its end: all that have not left."""
        is_training = self._job.phase is JobPhase.TRAINING
        for record in self._job.ranks.values():
            if record.phase is RankPhase.EXITED or (is_training and record.rank in self._joined):
                continue
            where = f"rank {record.rank} on {record.host}"
            notice = f"{where} never connected: it cannot reach the coordinator, or is gone"
            self._lose(record, notice if is_training else "")

    def _lose(self, record: RankRecord, notice: str) -> None:
        self._job.note_gone(record)
        if self._job.is_open:
            self._job.fail(notice, record=record)
        self._job.end_if_gone()

    def can_lose(self, record: RankRecord) -> bool:
        """No process that the user has started is ended here: one that hangs is shown as stalled."""
        return False

    def check_links(self, now_s: float) -> None:
        """Its ranks are not watched."""

    def blame(self, record: RankRecord, deaths: Deaths, now_s: float) -> str | None:
        """Nobody knows what a loop of the user's own trains."""
        return None

    def lose(self, record: RankRecord, now_s: float) -> None:
        """Never called."""

    def leave(self, leaving: Sequence[RankRecord], now_s: float) -> None:
        """No host has any of its ranks."""

    def stay(self, records: Sequence[RankRecord], now_s: float) -> None:
        """No host has any of its ranks."""

    def goes_back(self, *, is_violent: bool) -> bool:
        """Nobody but the user can start the script again."""
        return False

    resume_point = ""
    has_saved = False

    def anew(self) -> "AttachedLoop":
        """Never called."""
        return self

    def work_done(self) -> dict[Rank, int]:
        """Samples of each rank, where ranks say how many; else batches, of which all ranks have as many."""
        if self.num_samples:
            return {rank: record.num_samples for rank, record in self._job.ranks.items()}
        return {rank: record.base_step for rank, record in self._job.ranks.items()}

    def complete(self, result: JobResult) -> JobResult:
        """The result with what the loop came to."""
        return replace(
            result,
            epochs=self.num_epochs,
            metrics=self.metrics,
            samples_per_s=self.samples_per_s,
            dataset_size=self.progress.epoch_size if self.progress else 0,
            committed_samples=tuple(self.epoch_sizes),
            dropped_samples=(0,) * len(self.epoch_sizes),
            rounds=self.progress.num_steps if self.progress else 0,
            ranks=tuple(_rank_result(record) for record in self._job.ranks.values()),
            duration_s=self.duration_s,
            checkpoints=tuple(self.checkpoints),
        )


def _rank_result(record: RankRecord) -> RankResult:
    return RankResult(
        device=record.device,
        batches=record.local_step,
        ms_per_batch=record.compute_ms / record.local_step if record.local_step else 0.0,
        waited_s=record.waited_ms / 1000,
        samples=record.num_samples,
    )
