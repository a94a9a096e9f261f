"""Reports to a job's watchers, and a job's result, declared once for coordinator and client.

Each adds fields of its own by subclasses: the coordinator a round's recording, the client a job's state.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochReport:
    """One finished epoch. Delivered once per epoch and attempt, in order."""

    epoch: int
    """From 0."""
    attempt: int = 1
    """Attempt, from 1: a job that goes back to a checkpoint reports epochs again."""
    loss: float | None = None
    """Mean over batches; None if a loop has reported none."""
    scalars: Mapping[str, float] = field(default_factory=dict)
    """Means of recorded values, by name."""
    duration_s: float = 0.0
    committed: int = 0
    """Samples."""
    dropped: int = 0
    """Samples left out by `drop_last`."""
    rank_batches: tuple[int, ...] = ()
    """In rank order, as is the next."""
    rank_samples_per_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationReport:
    """Metrics of an evaluation after an epoch."""

    epoch: int
    """The evaluated epoch, from 0; for the final model the one in which training ended."""
    attempt: int = 1
    """As in `EpochReport`."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    duration_s: float = 0.0
    is_final: bool = False
    """True for the last model, which is the saved one unless a better one is restored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StallReport:
    """A rank is stalled: it makes no batch for longer than its own history allows. Or it makes batches again."""

    rank: int
    host: str = ""
    device: str = ""
    silent_s: float = 0.0
    usual_ms: float = 0.0
    """Its usual time per batch; 0: it has made none."""
    is_over: bool = False
    stacks: str = ""
    """Python stacks of its threads; empty before its host has sent them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipReport:
    """A rank is lost and the others go on, or a rank has joined them."""

    rank: int
    text: str = ""
    """Description of the event."""
    num_ranks: int = 0
    """Number of ranks that train now."""
    is_back: bool = False
    """True if the rank has joined; else it is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReport:
    """One committed round. Tuples are in rank order."""

    round: int
    version: int = 0
    """Version of its result."""
    rank_batches: tuple[int, ...] = ()
    rank_compute_ms: tuple[float, ...] = ()
    rank_waited_ms: tuple[float, ...] = ()
    """Time for which it kept each rank from training."""
    sync_ms: float = 0.0
    """Duration of the averaging itself: the shortest time from entry to result."""
    anchor: int = 0
    """El Che's anchor after it."""
    duration_s: float = 0.0
    """Seconds from the previous commit to this one."""
    samples: int = 0
    rank_sent_bytes: tuple[int, ...] = ()
    rank_losses: tuple[float, ...] = ()
    """Mean loss of each rank's batches in it; NaN if unknown."""
    rank_samples: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint."""

    version: int
    path: str = ""
    """A folder on the host of the rank that wrote it, or a URL."""
    epoch: int = 0
    """Epochs complete."""
    global_step: int = 0
    """Batches committed over all ranks."""
    size_bytes: int = 0
    duration_s: float = 0.0
    """Seconds that its rank took to write it, while training went on."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of the last evaluation before it."""
    is_best: bool = False
    """By the monitored metric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserEvent:
    """An event of a rank: of `record_event` in user code, or that its values were left out of a round."""

    rank: int
    text: str = ""
    num_dropped: int = 0
    """Number of earlier events of the rank that were dropped by the rate limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """One rank's part in a job that has ended."""

    device: str = ""
    batches: int = 0
    ms_per_batch: float = 0.0
    waited_s: float = 0.0
    """Time that rounds kept it from training."""
    samples: int = 0
    """Committed; 0 when unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """The result of a job."""

    error: str = ""
    """The error and its remedy; empty on success."""
    traceback: str = ""
    """The user's own, when user code raised."""
    invalid: bool = False
    """True if the job was invalid, as opposed to failing while it ran."""
    epochs: int = 0
    """Completed."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of the last evaluation."""
    metrics_epoch: int | None = None
    """Epochs complete at that evaluation; None without one."""
    best_epoch: int | None = None
    """Epochs complete at the best evaluation by the monitored metric; None without one."""
    best_metrics: Mapping[str, float] = field(default_factory=dict)
    samples_per_s: float = 0.0
    bound_samples_per_s: float = 0.0
    """Samples per second that the ranks would reach without any waits."""
    bound_fraction: float = 0.0
    """Throughput since calibration as a fraction of the bound in the same time."""
    dataset_size: int = 0
    committed_samples: tuple[int, ...] = ()
    """Per epoch."""
    dropped_samples: tuple[int, ...] = ()
    """Per epoch."""
    discarded_samples: int = 0
    """Samples that were trained but left out of the model: not finite, or outliers."""
    rounds: int = 0
    ranks: tuple[RankResult, ...] = ()
    """In rank order."""
    model: str = ""
    """The model file on the host of the rank that wrote it; empty when none was written."""
    model_is: str = ""
    """Which model it is: "best of epoch N" or "last"; empty if there is none yet."""
    best_problem: str = ""
    """The reason why there is no file of the best model, so that the model is the last one."""
    duration_s: float = 0.0
    """From the first batch to the last commit."""
    checkpoints: tuple[Checkpoint, ...] = ()
    """Kept checkpoints, oldest first."""
    ended_early: str = ""
    """The reason why training ended before its last epoch."""
