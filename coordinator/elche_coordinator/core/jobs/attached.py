"""A loop of the user's own as the coordinator sees it: it decides by itself what it trains, and says how far it is."""

from dataclasses import asdict, dataclass, field, replace

from elche_coordinator.core.messages.commands import Publish, SendPauseLoop, SendSaveCheckpoint
from elche_coordinator.core.messages.events import (
    BatchesTrained,
    CheckpointSaved,
    EvaluationDone,
    LoopEpochEnded,
    LoopProgressed,
)
from elche_coordinator.core.messages.ids import JobId, Rank
from elche_coordinator.core.messages.reports import Checkpoint, EpochReport, EvaluationReport, JobResult, RankResult
from elche_coordinator.core.records.outbox import Outbox
from elche_coordinator.core.records.ranks import RankRecord
from elche_coordinator.core.results.tally import EpochTally

MAX_EPOCHS_OPEN = 4
"""Epochs that may have ended on some ranks and not yet on others; of more, the oldest are told as they are."""
MAX_EPOCHS_TOLD = 10_000
"""Whose sizes the result has: a loop may make very many."""
MAX_CHECKPOINTS = 100
"""The newest ones that are remembered; the loop itself removes what it does not keep."""


@dataclass(slots=True)
class Loop:
    """The figures of one loop."""

    job_id: JobId
    policy: str
    ranks: dict[Rank, RankRecord]
    outbox: Outbox
    began_s: float
    latest_s: float = 0.0
    """When a rank has last said how far it is."""
    is_paused: bool = False
    has_joined: set[Rank] = field(default_factory=set)
    """Ranks that have opened their session."""
    progress: LoopProgressed | None = None
    """The newest, of rank 0."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the last evaluation."""
    checkpoints: list[Checkpoint] = field(default_factory=list)
    num_checkpoint_failures: int = 0
    saved_at_s: float | None = None
    num_epochs: int = 0
    """That have ended here."""
    epoch_sizes: list[int] = field(default_factory=list)
    """Samples of all ranks in each of the newest of them."""
    _tallies: dict[int, tuple[EpochTally, set[Rank]]] = field(default_factory=dict)
    """Epoch to its sums, the ranks that have ended it, and how long the slowest took."""

    @property
    def num_samples(self) -> int:
        """Trained by all ranks, as far as they have said."""
        return sum(record.num_samples for record in self.ranks.values())

    @property
    def loss(self) -> float | None:
        """Mean over ranks of what they have last said."""
        losses = [one.loss for one in self.ranks.values() if one.loss is not None]
        return sum(losses) / len(losses) if losses else None

    @property
    def duration_s(self) -> float:
        """From its beginning to what ranks have last said."""
        return max(0.0, self.latest_s - self.began_s)

    @property
    def samples_per_s(self) -> float:
        """Of all ranks, since it began."""
        return self.num_samples / self.duration_s if self.duration_s else 0.0

    def note_batches(self, record: RankRecord, event: BatchesTrained, now_s: float) -> None:
        """Progress of one rank."""
        self.latest_s = now_s
        if event.gauges is not None:
            record.gauges = event.gauges
        if event.loss_count:
            record.loss = event.loss_sum / event.loss_count
        if event.local_step > record.local_step:
            record.compute_ms += sum(event.batch_ms)
        record.note_batches(event.local_step, event.batch_ms, now_s)
        record.base_step = max(record.base_step, event.local_step)
        record.num_samples = max(record.num_samples, event.num_processed)
        if record.local_step:
            record.batch_size = max(1, round(record.num_samples / record.local_step))
        record.data_wait_ms = max(record.data_wait_ms, event.data_wait_ms)
        record.waited_ms = max(record.waited_ms, event.waited_ms)

    def note_progress(self, record: RankRecord, event: LoopProgressed) -> None:
        """How far the loop is. Old news changes nothing."""
        if self.progress is None or event.num_steps >= self.progress.num_steps:
            self.progress = event

    def note_epoch_ended(self, record: RankRecord, event: LoopEpochEnded) -> None:
        """One rank has ended an epoch; when all have, it is told, in order."""
        epoch = event.work.epoch
        tally, ended = self._tallies.setdefault(epoch, (EpochTally(), set()))
        if record.rank in ended:
            return
        tally.add(record.rank, event.work)
        ended.add(record.rank)
        tally.duration_s = max(tally.duration_s, event.duration_s)
        while self._tallies:
            oldest = min(self._tallies)
            if len(self._tallies[oldest][1]) < len(self.ranks) and len(self._tallies) <= MAX_EPOCHS_OPEN:
                return
            self._tell_epoch(oldest)

    def _tell_epoch(self, epoch: int) -> None:
        tally, _ = self._tallies.pop(epoch)
        num_samples = sum(tally.rank_samples.values())
        self.num_epochs += 1
        self.epoch_sizes = [*self.epoch_sizes, num_samples][-MAX_EPOCHS_TOLD:]
        report: EpochReport = tally.report(epoch=epoch, ranks=list(self.ranks), committed=num_samples, dropped=0)
        self.outbox.change()
        self.outbox.add(Publish(job_id=self.job_id, report=report))

    def note_evaluated(self, event: EvaluationDone) -> None:
        """The loop has evaluated, its own way."""
        self.metrics = {name: total / count for name, (total, count) in event.sums.items() if count}
        report = EvaluationReport(epoch=event.epoch, metrics=self.metrics, duration_s=event.duration_ms / 1000)
        self.outbox.change()
        self.outbox.add(Publish(job_id=self.job_id, report=report))

    def note_checkpoint_saved(self, event: CheckpointSaved, now_s: float) -> None:
        """A checkpoint is whole."""
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
        self.outbox.change()
        self.outbox.add(Publish(job_id=self.job_id, report=saved))

    def request_checkpoint(self) -> None:
        """A client wants a checkpoint; rank 0 brings it to the others."""
        self.outbox.add(SendSaveCheckpoint(**self.ranks[Rank(0)].address(self.job_id)))

    def pause(self, *, is_paused: bool) -> None:
        """A client wants the loop to stop after one of its next steps, or to go on."""
        self.is_paused = is_paused
        for record in self.ranks.values():
            self.outbox.add(SendPauseLoop(**record.address(self.job_id), is_paused=is_paused))

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
            ranks=tuple(_rank_result(record) for record in self.ranks.values()),
            duration_s=self.duration_s,
            checkpoints=tuple(self.checkpoints),
        )

    def to_json(self) -> dict[str, object]:
        """What a later run of the coordinator needs to know of it."""
        return {"checkpoints": [asdict(one) for one in self.checkpoints]}


def _rank_result(record: RankRecord) -> RankResult:
    return RankResult(
        device=record.device,
        batches=record.local_step,
        ms_per_batch=record.compute_ms / record.local_step if record.local_step else 0.0,
        waited_s=record.waited_ms / 1000,
    )
