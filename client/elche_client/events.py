"""What a client hears about a job, as plain values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum


class JobState(StrEnum):
    """Where a job is in its life."""

    UNKNOWN = "unknown"  # a state that this client does not know yet
    QUEUED = "queued"
    STARTING = "starting"
    TRAINING = "training"
    PAUSED = "paused"
    FINISHING = "finishing"
    STOPPING = "stopping"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def has_ended(self) -> bool:
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """One rank at one moment."""

    rank: int
    device: str = ""
    state: str = ""
    ms_per_batch: float = 0.0  # recent compute time; 0 before the first batch
    round_batches: int = 0  # batches since the last committed round
    round_target: int = 0  # batches it is to make in the open round; 0 when no round is announced
    share_fraction: float = 0.0  # its part of the job's committed batches
    num_batches: int = 0
    waited_s: float = 0.0
    host: str = ""
    log_path: str = ""  # on its host
    callback_errors: int = 0  # how often the job's callbacks have raised there; its log shows what
    stalled_s: float = 0.0  # how long it has made no batch, when that is longer than its history explains


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """One job at one moment. `num_epochs` and `dataset_size` are 0 before the ranks have loaded the file."""

    job_id: str
    name: str = ""
    state: JobState = JobState.UNKNOWN
    reason: str = ""
    epoch: int = 0  # in progress, from 0
    num_epochs: int = 0
    dataset_size: int = 0
    epoch_committed: int = 0  # samples
    epoch_processed: int = 0  # samples, committed or not
    loss: float | None = None
    samples_per_s: float = 0.0
    anchor: int = 0  # batches of the slowest rank between averagings
    num_rounds: int = 0
    eta_s: float | None = None
    ranks: tuple[RankView, ...] = ()
    submitted_at: datetime | None = None
    pacing: str = ""
    backend: str = ""  # by which backend the ranks average, and why; empty before they meet
    checkpoints: tuple["Checkpoint", ...] = ()  # those that are kept, oldest first
    num_checkpoint_failures: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochReport:
    """One finished epoch."""

    epoch: int  # from 0
    loss: float | None = None  # where a loop has told of none
    scalars: Mapping[str, float] = field(default_factory=dict)
    duration_s: float = 0.0
    committed: int = 0  # samples
    dropped: int = 0  # samples
    rank_batches: tuple[int, ...] = ()
    rank_samples_per_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationReport:
    """What the user's `evaluate` returned after an epoch."""

    epoch: int  # from 0; of the final model, the epoch in which training ended
    metrics: Mapping[str, float] = field(default_factory=dict)
    duration_s: float = 0.0
    is_final: bool = False  # of the last model, which is the saved one unless a better one is restored


@dataclass(frozen=True, slots=True, kw_only=True)
class StallReport:
    """A rank makes no batch, for longer than its own history explains; or does again."""

    rank: int
    host: str = ""
    device: str = ""
    silent_s: float = 0.0
    usual_ms: float = 0.0  # time of its batches before; 0: it has made none
    is_over: bool = False
    stacks: str = ""  # Python stacks of its threads; empty until its host has told


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReport:
    """One committed round. Tuples are in rank order."""

    round: int
    version: int = 0
    rank_batches: tuple[int, ...] = ()
    rank_compute_ms: tuple[float, ...] = ()
    rank_waited_ms: tuple[float, ...] = ()
    sync_ms: float = 0.0
    anchor: int = 0
    duration_s: float = 0.0
    samples: int = 0
    rank_sent_bytes: tuple[int, ...] = ()
    rank_losses: tuple[float, ...] = ()  # means over each rank's batches in it; NaN where not known
    rank_samples: tuple[int, ...] = ()
    recorded: bytes = b""  # as it can be repeated: an `elche.v1.JobSpec` message with this round alone in `replay`


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint that is whole."""

    version: int
    path: str = ""  # a folder on the host of the rank that wrote it, or a URL
    epoch: int = 0  # epochs complete
    global_step: int = 0  # batches committed over all ranks
    size_bytes: int = 0
    duration_s: float = 0.0  # training went on meanwhile
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the last evaluation before it
    is_best: bool = False  # by the monitored metric


@dataclass(frozen=True, slots=True, kw_only=True)
class UserEvent:
    """Something that user code wanted to be seen, by `record_event`."""

    rank: int
    text: str = ""
    num_dropped: int = 0  # events of the rank before it that were too many to be sent


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """One rank's part in a job that has ended."""

    device: str = ""
    batches: int = 0
    ms_per_batch: float = 0.0
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """How a job ended."""

    state: JobState
    error: str = ""  # empty on success
    traceback: str = ""  # the user's own, when user code raised
    invalid: bool = False  # the job itself was not valid, as opposed to failing while it ran
    epochs: int = 0  # completed
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the last evaluation
    metrics_epoch: int | None = None  # epochs complete at that one
    best_epoch: int | None = None  # epochs complete at the best evaluation, by the monitored metric
    best_metrics: Mapping[str, float] = field(default_factory=dict)
    samples_per_s: float = 0.0
    bound_samples_per_s: float = 0.0  # what the ranks would reach without any communication
    bound_fraction: float = 0.0  # of the bound, after calibration
    dataset_size: int = 0
    committed_samples: tuple[int, ...] = ()  # per epoch
    dropped_samples: tuple[int, ...] = ()  # per epoch
    discarded_samples: int = 0  # trained, but not finite and so not in the model
    rounds: int = 0
    ranks: tuple[RankResult, ...] = ()
    model: str = ""  # path on the host of the rank that wrote it
    model_is: str = ""  # "best of epoch N" or "last"
    best_problem: str = ""  # why there is no file of the best model, and the model is the last one
    duration_s: float = 0.0
    checkpoints: tuple[Checkpoint, ...] = ()  # those that are kept, oldest first
    ended_early: str = ""  # why training ended before its epochs did


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """One line of a rank's log, as the rank has written it; or why there is no log of this rank."""

    rank: int
    text: str = ""
    error: str = ""


Event = JobView | RoundReport | EpochReport | EvaluationReport | StallReport | Checkpoint | UserEvent | JobResult
