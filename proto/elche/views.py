"""Views of a job and its ranks at one moment, declared once for coordinator and client.

The coordinator's subclasses have further fields, for its page and metrics.
"""

from dataclasses import dataclass
from enum import StrEnum

from elche.reports import Checkpoint

EXITED = "exited"
"""State of a rank whose process has ended, or whose host is lost."""


class JobState(StrEnum):
    """State of a job."""

    UNKNOWN = "unknown"
    """A state that this client does not know yet."""
    QUEUED = "queued"
    STARTING = "starting"
    TRAINING = "training"
    WAITING = "waiting"
    """It has too few ranks, and goes on when there are more."""
    PAUSED = "paused"
    FINISHING = "finishing"
    STOPPING = "stopping"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def has_ended(self) -> bool:
        """True if the state is final."""
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """One rank at one moment."""

    rank: int
    device: str = ""
    state: str = ""
    ms_per_batch: float = 0.0
    """Recent time per batch, including the wait for its data; 0 before the first batch."""
    round_batches: int = 0
    """Batches since the last committed round."""
    round_target: int = 0
    """Its count of batches in the open round; 0 if no round is announced."""
    share_fraction: float = 0.0
    """Its fraction of the job's committed batches."""
    num_batches: int = 0
    waited_s: float = 0.0
    """Time that rounds kept it from training."""
    host: str = ""
    log_path: str = ""
    """Path of its log, on its host."""
    callback_errors: int = 0
    """Number of errors of the job's callbacks on it; its log has them."""
    stalled_s: float = 0.0
    """Seconds without a batch if it is stalled; else 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """One job at one moment. `num_epochs` and `dataset_size` are 0 before the ranks have loaded the file."""

    job_id: str
    name: str = ""
    state: str = ""
    reason: str = ""
    """The reason of its state, for people."""
    epoch: int = 0
    """The epoch in progress, from 0; for an ended job the number of complete ones."""
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
    """Estimated seconds to the end of training; None if unknown."""
    ranks: tuple[RankView, ...] = ()
    """Ranks in order; of very many only the first ones."""
    pacing: str = ""
    """The reason of the next round's plan, for people."""
    backend: str = ""
    """The backend and the reason of its choice; empty before the first group."""
    checkpoints: tuple[Checkpoint, ...] = ()
    """Kept checkpoints, oldest first."""
    num_checkpoint_failures: int = 0
    artifacts: str = ""
    """Where in the artifact store its model and logs are, or why not yet; empty: it has not ended, or there is none."""

    @property
    def num_ranks(self) -> int:
        """Number of `ranks` that have a process; once none has one, how many there were."""
        return sum(rank.state != EXITED for rank in self.ranks) or len(self.ranks)
