"""A user-owned loop as a job: the script decides what it trains, and reports."""

from dataclasses import replace

from elche.sums import added
from elche_coordinator.core.life.hangs import Duty
from elche_coordinator.core.life.job import Job
from elche_coordinator.core.loops.regrouping import Regrouping
from elche_coordinator.core.messages.commands import SendPauseLoop, SendSaveCheckpoint
from elche_coordinator.core.messages.events import (
    BatchesTrained,
    CheckpointFailed,
    CheckpointSaved,
    EvaluationDone,
    JobSubmitted,
    LoopAttached,
    LoopEpochEnded,
    LoopProgressed,
    WorkEvent,
)
from elche_coordinator.core.messages.ids import Attempt, GenerationId, Rank
from elche_coordinator.core.messages.reports import Checkpoint, EpochReport, EvaluationReport, JobResult
from elche_coordinator.core.records.ranks import RankRecord
from elche_coordinator.core.results.checkpoints import failure_report
from elche_coordinator.core.results.tally import EpochTally, rank_result

MAX_EPOCHS_OPEN = 4
"""Most epochs that have ended on some ranks only; with more, the oldest is reported as it is."""
MAX_EPOCHS_TOLD = 10_000
"""Newest epochs whose sizes the result contains, since a loop may make very many."""
MAX_CHECKPOINTS = 100
"""Newest checkpoints that are remembered; the loop itself removes older ones."""


class Loop(Job):
    """A job without leases and rounds, whose ranks run the user's script. A rank that hangs is shown as stalled."""

    attempt = Attempt(1)
    is_paused = False

    def __init__(self, event: JobSubmitted | LoopAttached, now_s: float) -> None:
        super().__init__(event)
        self.policy = ""
        """Description of how its steps are split among ranks."""
        self.latest_s = now_s
        """Time of the last progress report of any rank."""
        self.progress: LoopProgressed | None = None
        """The newest progress, of rank 0."""
        self.metrics: dict[str, float] = {}
        """Metrics of the last evaluation."""
        self.checkpoints: list[Checkpoint] = []
        """Complete checkpoints, oldest first, each path once; at most `MAX_CHECKPOINTS`."""
        self.num_checkpoint_failures = 0
        self._is_checkpoint_failing = False
        """True if one could not be written since the newest that is complete."""
        self.saved_at_s: float | None = None
        """Time at which the newest checkpoint was complete."""
        self.num_epochs = 0
        """Number of epochs that have ended on all ranks."""
        self._last_epoch = -1
        """The highest number of an ended epoch."""
        self.epoch_sizes: list[int] = []
        """Samples of all ranks in each of the newest ended epochs."""
        self._began_s = now_s
        """Time at which the coordinator has heard of the loop."""
        self._tallies: dict[int, tuple[EpochTally, set[Rank]]] = {}
        """By epoch: its sums, and the ranks that have finished it."""
        self._late: dict[Rank, int] = {}
        """The newest epoch that was reported without each of these ranks: what they say up to it is ignored."""
        self._num_done: dict[int, int] = {}
        """Samples of these epochs, as reported by ranks that have finished them, including those of dead ranks."""
        self._groups = Regrouping(self.ranks, self.outbox)

    def has_batch_due(self, record: RankRecord) -> bool:
        """True unless the loop is paused: a step is expected, since other work of the user's code is unknown."""
        return not self.is_paused

    def duties(self) -> dict[Rank, Duty]:
        """Each rank's duty: a step, unless the loop is paused."""
        stalls, is_paused = self.silence.stalls, self.is_paused
        return {
            one.rank: Duty(is_busy=True, stall_s=None if is_paused else stalls.patience_s(one))
            for one in self._groups.members
        }

    def on_hung(self, record: RankRecord, duty: Duty, why: str, now_s: float) -> None:
        """Does nothing: the rank is shown as stalled, and the user's process is not ended."""

    def on_work(self, record: RankRecord, event: WorkEvent, now_s: float) -> None:
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
                self._on_checkpoint_failed(record, event)
            case _:
                self.refuse_now(event, "it is a loop of the user's own")

    @property
    def generation_id(self) -> GenerationId:
        """The present group of its ranks; 0 is the one that the script has made."""
        return self._groups.generation_id

    @property
    def num_samples(self) -> int:
        """Samples trained by all ranks, as reported."""
        return sum(record.num_samples for record in self.ranks.values())

    @property
    def loss(self) -> float | None:
        """Mean over ranks of their last reported losses."""
        losses = [one.loss for one in self.ranks.values() if one.loss is not None]
        return added(losses) / len(losses) if losses else None

    @property
    def duration_s(self) -> float:
        """Seconds from its beginning to the last report of a rank."""
        return max(0.0, self.latest_s - self._began_s)

    @property
    def samples_per_s(self) -> float:
        """Samples per second of all ranks since it began."""
        return self.num_samples / self.duration_s if self.duration_s else 0.0

    def _on_batches(self, record: RankRecord, event: BatchesTrained, now_s: float) -> None:
        """Handles one rank's progress."""
        self.latest_s = now_s
        if event.gauges is not None:
            record.gauges = event.gauges
        if event.loss_count:
            record.loss = event.loss_sum / event.loss_count
        # Before the record has the new step: a report that comes twice must not count twice.
        if event.local_step > record.local_step:
            record.compute_ms += added(event.batch_ms)
            self._groups.on_batches()
        record.on_batches(event.local_step, event.batch_ms, now_s)
        # No round commits in a loop of the user's own: what is made counts at once.
        record.base_step = max(record.base_step, event.local_step)
        record.num_samples = max(record.num_samples, event.num_processed)
        if record.local_step:
            record.batch_size = max(1, round(record.num_samples / record.local_step))
        record.data_wait_ms = max(record.data_wait_ms, event.data_wait_ms)
        record.waited_ms = max(record.waited_ms, event.waited_ms)

    def _on_progress(self, event: LoopProgressed) -> None:
        """Records the loop's progress. Ignores stale reports."""
        if self.progress is None or event.num_steps >= self.progress.num_steps:
            self.progress = event

    def _on_epoch_ended(self, record: RankRecord, event: LoopEpochEnded) -> None:
        """Handles the end of an epoch on one rank. Epochs that all ranks have ended are reported, in order."""
        epoch, late = event.work.epoch, self._late.get(record.rank, -1)
        if epoch >= late:
            self._late.pop(record.rank, None)
        if epoch <= late:
            return
        tally, ended = self._tallies.setdefault(epoch, (EpochTally(), set()))
        if record.rank in ended:
            return
        tally.add(record.rank, event.work)
        ended.add(record.rank)
        tally.duration_s = max(tally.duration_s, event.duration_s)
        self._num_done[epoch] = max(self._num_done.get(epoch, 0), event.num_done)
        self._report_epochs()

    def _report_epochs(self) -> None:
        """Reports the epochs that all present ranks have ended, in order."""
        while self._tallies:
            oldest = min(self._tallies)
            if len(self._tallies) <= MAX_EPOCHS_OPEN and self._is_open(self._tallies[oldest][1]):
                return
            self._report_epoch(oldest)

    def _is_open(self, ended: set[Rank]) -> bool:
        """True if a present rank has not ended the epoch."""
        if len(ended) < self.roster.num_living:  # looking at each takes long in a loop of thousands
            return True
        return any(record.rank not in ended for record in self._groups.members)

    def _report_epoch(self, epoch: int) -> None:
        """Reports an epoch, without the part of ranks that have not ended it."""
        tally, ended = self._tallies.pop(epoch)
        for record in self._groups.members:
            if record.rank not in ended:
                self._late[record.rank] = max(epoch, self._late.get(record.rank, epoch))
        num_samples = self._num_done.pop(epoch, 0) or sum(tally.rank_samples.values())
        self.num_epochs, self._last_epoch = self.num_epochs + 1, max(self._last_epoch, epoch)
        self.epoch_sizes = [*self.epoch_sizes, num_samples][-MAX_EPOCHS_TOLD:]
        report: EpochReport = tally.report(epoch=epoch, ranks=list(self.ranks), committed=num_samples, dropped=0)
        self.outbox.publish(report)

    def _on_evaluated(self, event: EvaluationDone) -> None:
        """Records an evaluation of the loop."""
        self.metrics = {name: total / count for name, (total, count) in event.sums.items() if count}
        report = EvaluationReport(epoch=event.epoch, metrics=self.metrics, duration_s=event.duration_ms / 1000)
        self.outbox.publish(report)

    def _on_checkpoint_failed(self, record: RankRecord, event: CheckpointFailed) -> None:
        self.num_checkpoint_failures += 1
        if not self._is_checkpoint_failing and self.result is None:  # nothing follows the result
            self.outbox.publish(failure_report(event, record.host))
        self._is_checkpoint_failing = True

    def _on_checkpoint_saved(self, event: CheckpointSaved, now_s: float) -> None:
        """Records a complete checkpoint."""
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
        self._is_checkpoint_failing = False
        self.outbox.publish(saved)

    def save(self) -> None:
        """Asks the first rank for a checkpoint; it tells the others."""
        for record in self._groups.members[:1]:
            self.outbox.add(SendSaveCheckpoint(**record.address))

    def hold(self, now_s: float, *, is_paused: bool) -> None:
        """Has the loop stop after one of its next steps, or go on."""
        self.is_paused = is_paused
        for record in self.ranks.values():
            self.outbox.add(SendPauseLoop(**record.address, is_paused=is_paused))

    def work_done(self) -> dict[Rank, int]:
        """Samples of each rank, if ranks report them; else its batches."""
        if self.num_samples:
            return {rank: record.num_samples for rank, record in self.ranks.items()}
        return {rank: record.base_step for rank, record in self.ranks.items()}

    def end_if_gone(self) -> None:
        """Ends the loop as any job, and drops what it knows of epochs that not all ranks have ended."""
        super().end_if_gone()
        if self.result is not None:
            self._tallies.clear()

    def complete(self, result: JobResult) -> JobResult:
        """Adds the loop's figures to the result."""
        return replace(
            result,
            epochs=self._num_epochs_of_all(),
            metrics=self.metrics,
            samples_per_s=self.samples_per_s,
            dataset_size=self.progress.epoch_size if self.progress else 0,
            committed_samples=tuple(self.epoch_sizes),
            dropped_samples=(0,) * len(self.epoch_sizes),
            rounds=self.progress.num_steps if self.progress else 0,
            ranks=tuple(map(rank_result, self.ranks.values())),
            duration_s=self.duration_s,
            checkpoints=tuple(self.checkpoints),
        )

    def _num_epochs_of_all(self) -> int:
        """Number of ended epochs, with those before the checkpoint at which the loop was resumed. Only where the script
        has said how many there are, and so has the trainer number them: others may number theirs from 1.
        """
        most = self.progress.num_epochs if self.progress else 0
        return max(self.num_epochs, min(self._last_epoch + 1, most))
