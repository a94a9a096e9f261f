"""What watchers of a job are told, and how a job ended; declared once for coordinator and client.

Each adds by a subclass what it alone has: the coordinator a round as it is recorded, the client a job's state.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochReport:
    """One finished epoch. Delivered once per epoch and attempt, in order."""

    epoch: int
    """From 0."""
    attempt: int = 1
    """How often the job had begun by then, from 1: one that goes back to a checkpoint tells epochs again."""
    loss: float | None = None
    """Mean over batches; None where a loop has told of none."""
    scalars: Mapping[str, float] = field(default_factory=dict)
    """Means of what the job has recorded, by name."""
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
    """What the user's `evaluate` returned after an epoch."""

    epoch: int
    """The epoch that was over, from 0; of the final model, the one in which training ended."""
    attempt: int = 1
    """As in `EpochReport`."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    duration_s: float = 0.0
    is_final: bool = False
    """True if it is of the last model, which is the saved one unless a better one is restored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StallReport:
    """A rank makes no batch, for longer than its own history explains; or does again."""

    rank: int
    host: str = ""
    device: str = ""
    silent_s: float = 0.0
    usual_ms: float = 0.0
    """Time of its batches before; 0: it has made none."""
    is_over: bool = False
    stacks: str = ""
    """Python stacks of its threads; empty until its host has sent them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipReport:
    """A rank is lost and the others go on, or a rank has joined them."""

    rank: int
    text: str = ""
    """What happened to it."""
    num_ranks: int = 0
    """How many train now."""
    is_back: bool = False
    """True if the rank has joined; else it is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReport:
    """One committed round. Tuples are in rank order."""

    round: int
    version: int = 0
    """The version that it made."""
    rank_batches: tuple[int, ...] = ()
    rank_compute_ms: tuple[float, ...] = ()
    rank_waited_ms: tuple[float, ...] = ()
    """Time that it kept each rank from training."""
    sync_ms: float = 0.0
    """The averaging itself: shortest time from entry to result over ranks."""
    anchor: int = 0
    """El Che's anchor after it."""
    duration_s: float = 0.0
    """From the previous commit to this one."""
    samples: int = 0
    rank_sent_bytes: tuple[int, ...] = ()
    rank_losses: tuple[float, ...] = ()
    """Mean loss of each rank's batches in it; NaN where it is not known."""
    rank_samples: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint that is whole."""

    version: int
    path: str = ""
    """A folder on the host of the rank that wrote it, or a URL."""
    epoch: int = 0
    """Epochs complete."""
    global_step: int = 0
    """Batches committed over all ranks."""
    size_bytes: int = 0
    duration_s: float = 0.0
    """How long its rank took to write it; training went on meanwhile."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of the last evaluation before it."""
    is_best: bool = False
    """By the monitored metric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserEvent:
    """Something of a rank that is to be seen: by `record_event` of user code, or that its values were left out of a
    round.
    """

    rank: int
    text: str = ""
    num_dropped: int = 0
    """Events of the rank before it that were too many to be sent."""


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
    """How a job ended, and what it made."""

    error: str = ""
    """What went wrong and what to do; empty on success."""
    traceback: str = ""
    """The user's own, when user code raised."""
    invalid: bool = False
    """True if the job itself was not valid, as opposed to failing while it ran."""
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
    """What the ranks would reach without any communication."""
    bound_fraction: float = 0.0
    """Throughput after calibration as a part of the bound over the same time."""
    dataset_size: int = 0
    committed_samples: tuple[int, ...] = ()
    """Per epoch."""
    dropped_samples: tuple[int, ...] = ()
    """Per epoch."""
    discarded_samples: int = 0
    """Trained, but left out of the model: not finite, or outliers."""
    rounds: int = 0
    ranks: tuple[RankResult, ...] = ()
    """In rank order."""
    model: str = ""
    """The model file on the host of the rank that wrote it; empty when none was written."""
    model_is: str = ""
    """Which one the model is: "best of epoch N" or "last"; empty when the job has not come so far."""
    best_problem: str = ""
    """Why there is no file of the best model, and the model is the last one."""
    duration_s: float = 0.0
    """From the first batch to the last commit."""
    checkpoints: tuple[Checkpoint, ...] = ()
    """Those that are kept, oldest first."""
    ended_early: str = ""
    """Why training ended before its epochs did."""
