"""What watchers of a job are told, and how a job ended."""

from dataclasses import dataclass, field
from enum import StrEnum

from elche_coordinator.core.messages.spec import RecordedRound


class Outcome(StrEnum):
    """How a job ends."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochReport:
    """One finished epoch; delivered once, in order."""

    epoch: int
    loss: float | None
    """Mean over batches; None where a loop has told of none."""
    scalars: dict[str, float]
    duration_s: float
    committed: int
    dropped: int
    rank_batches: tuple[int, ...]
    rank_samples_per_s: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationReport:
    """What `evaluate` returned."""

    epoch: int
    """The epoch that was over, or, of the final model, the one in which training ended."""
    metrics: dict[str, float]
    duration_s: float
    is_final: bool = False
    """Whether it is of the last model, which is the saved one unless a better one is restored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StallReport:
    """A rank makes no batch, for longer than its own history explains; or does again."""

    rank: int
    host: str
    device: str
    silent_s: float
    usual_ms: float
    """Time of its batches before; 0: it has made none."""
    is_over: bool = False
    stacks: str = ""
    """What its threads do, as Python stacks; empty until its host has told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReport:
    """One committed round; tuples are in rank order."""

    round: int
    version: int
    rank_batches: tuple[int, ...]
    rank_compute_ms: tuple[float, ...]
    rank_waited_ms: tuple[float, ...]
    sync_ms: float
    anchor: int
    duration_s: float
    samples: int
    rank_sent_bytes: tuple[int, ...] = ()
    recorded: RecordedRound = field(default_factory=lambda: RecordedRound(parts=()))
    rank_losses: tuple[float, ...] = ()
    """Mean loss of each rank's batches in it; NaN where it is not known."""
    rank_samples: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint that is whole."""

    version: int
    name: str
    path: str
    epoch: int
    """Epochs complete."""
    global_step: int
    size_bytes: int = 0
    duration_s: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the last evaluation before it."""
    is_best: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class UserEvent:
    """Something that user code wanted to be seen."""

    rank: int
    text: str
    num_dropped: int = 0
    """Events of the rank before it that were too many to be sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """One rank's part in an ended job."""

    device: str
    batches: int
    ms_per_batch: float
    waited_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """How a job ended, and what it made."""

    outcome: Outcome
    error: str = ""
    traceback: str = ""
    invalid: bool = False
    epochs: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    samples_per_s: float = 0.0
    bound_samples_per_s: float = 0.0
    bound_fraction: float = 0.0
    dataset_size: int = 0
    committed_samples: tuple[int, ...] = ()
    dropped_samples: tuple[int, ...] = ()
    rounds: int = 0
    ranks: tuple[RankResult, ...] = ()
    model: str = ""
    discarded_samples: int = 0
    """Trained, but not finite and so not in the model."""
    duration_s: float = 0.0
    checkpoints: tuple[Checkpoint, ...] = ()
    """Those that are kept, oldest first."""
    ended_early: str = ""
    """Why training ended before its epochs did."""
    metrics_epoch: int | None = None
    """Epochs complete at the evaluation that gave the metrics."""
    best_epoch: int | None = None
    """Epochs complete at the best evaluation by the monitored metric."""
    best_metrics: dict[str, float] = field(default_factory=dict)
    model_is: str = ""
    """Which one the model is: "best of epoch N" or "last"; empty when the job has not come so far."""
    best_problem: str = ""
    """Why there is no file of the best model, and the model is the last one."""
    failed_rank: int | None = None
    """The rank whose end, or whose error, failed the job; None where it was no rank's."""


Report = EpochReport | EvaluationReport | RoundReport | StallReport | Checkpoint | UserEvent | JobResult
