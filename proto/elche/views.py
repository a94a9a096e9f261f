"""A job and its ranks at one moment, as people see them; declared once for coordinator and client.

The coordinator's own views are subclasses that have more, for its page and its metrics.
"""

from dataclasses import dataclass
from enum import StrEnum

from elche.reports import Checkpoint


class JobState(StrEnum):
    """Where a job is in its life."""

    UNKNOWN = "unknown"
    """A state that this client does not know yet."""
    QUEUED = "queued"
    STARTING = "starting"
    TRAINING = "training"
    WAITING = "waiting"
    """It has too few ranks, and trains when there are more."""
    PAUSED = "paused"
    FINISHING = "finishing"
    STOPPING = "stopping"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def has_ended(self) -> bool:
        """True if nothing follows."""
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """One rank at one moment."""

    rank: int
    device: str = ""
    state: str = ""
    ms_per_batch: float = 0.0
    """Recent time per batch, with the wait for its data; 0 before the first batch."""
    round_batches: int = 0
    """Batches since the last committed round."""
    round_target: int = 0
    """Batches it is to make in the open round; 0 when no round is announced."""
    share_fraction: float = 0.0
    """Its fraction of the job's committed batches."""
    num_batches: int = 0
    waited_s: float = 0.0
    """Time that rounds kept it from training."""
    host: str = ""
    log_path: str = ""
    """Path of its log, on its host."""
    callback_errors: int = 0
    """How often the job's callbacks have raised there; its log shows what."""
    stalled_s: float = 0.0
    """Seconds without a batch, when these are more than the rank's own history explains; else 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """One job at one moment. `num_epochs` and `dataset_size` are 0 before the ranks have loaded the file."""

    job_id: str
    name: str = ""
    state: str = ""
    reason: str = ""
    """Why it is there, in words for people."""
    epoch: int = 0
    """The epoch in progress, from 0; of a job that has ended, how many are complete."""
    num_epochs: int = 0
    dataset_size: int = 0
    epoch_committed: int = 0
    """Samples of the epoch in progress."""
    epoch_processed: int = 0
    """Samples of it that are trained, committed or not."""
    loss: float | None = None
    """Mean training loss of the last reported batches; None before the first."""
    samples_per_s: float = 0.0
    anchor: int = 0
    """Batches of the slowest rank between averagings."""
    num_rounds: int = 0
    eta_s: float | None = None
    """Estimated seconds to the end of training; None when not known."""
    ranks: tuple[RankView, ...] = ()
    """In order; of a job of very many, the first ones."""
    pacing: str = ""
    """How the next round was decided, in words for people."""
    backend: str = ""
    """By which backend the ranks average, and why; empty before they meet."""
    checkpoints: tuple[Checkpoint, ...] = ()
    """Those that are kept, oldest first."""
    num_checkpoint_failures: int = 0
    artifacts: str = ""
    """Where in the artifact store its model and logs are, or why not yet; empty: it has not ended, or there is none."""
