"""What callbacks of a job get to see, and what happens when one raises."""

import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from elche.errors import Misuse
from elche_worker.user.schedule import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochMetrics:
    """One finished epoch, over all ranks."""

    epoch: int
    """From 0."""
    loss: float
    """Mean over batches."""
    scalars: dict[str, float]
    """Means of what `train_step` and `record_scalar` recorded."""
    metrics: dict[str, float]
    """Of the epoch's evaluation; empty without one."""
    duration_s: float
    samples: int
    samples_per_s: float
    rank_batches: tuple[int, ...] = ()
    """Batches that each rank made, in rank order."""


class Rank(Protocol):
    """One rank as its callbacks see it; `this_rank()` gives it where it is not handed over.

    Learning rates are set in `epoch_fn` and `after_round`, which run on every rank: set the same on all. Elsewhere that
    raises `Misuse`, since one rank would train at another rate than the others. What is set is part of checkpoints and
    holds after a resume, but for functions: `epoch_fn` is called anew for the epoch in which training goes on, and may
    set these again.
    """

    lr_factor: float
    """All learning rates are multiplied by it, also those of a schedule; may be set, as `set_lr_scale` does."""

    @property
    def model(self) -> nn.Module: ...
    @property
    def rank(self) -> int: ...
    @property
    def device(self) -> str: ...
    @property
    def local_step(self) -> int:
        """Batches that this rank has made."""
        ...

    @property
    def version(self) -> int:
        """Of the averaged model that it trains on."""
        ...

    @property
    def epoch(self) -> int: ...
    @property
    def lr(self) -> float:
        """Of the first parameter group, now."""
        ...

    def set_lr(self, lr: float) -> None:
        """Sets the learning rate of all parameter groups from the next batch on. Raises `Misuse` while a schedule
        says the rate of each batch: `set_schedule(None)` ends that, and `set_lr_scale` goes with it.
        """
        ...

    def scale_lr(self, factor: float) -> None:
        """Multiplies the learning rate of each parameter group, once; as `set_lr` otherwise."""
        ...

    def set_lr_scale(self, scale: float) -> None:
        """Multiplies all learning rates by it from the next batch on, with a schedule and without; 1 takes it away."""
        ...

    def set_schedule(self, schedule: Callable[[Progress], float] | None) -> None:
        """Takes the place of the job's `schedule` or `scheduler`; None: rates stay as the optimizer was built with, or
        `set_lr` has set them.
        """
        ...

    def set_scheduler(self, scheduler: Callable[[Optimizer], LRScheduler] | None) -> None:
        """As `set_schedule`, with a function that builds a torch scheduler, as the job's `scheduler` does."""
        ...


_this_rank: Rank | None = None


def this_rank() -> Rank:
    """The rank that this process trains, for `train_step` and for callbacks that it is not handed to.

    Raises `Misuse` where no job is trained.
    """
    if _this_rank is None:
        raise Misuse("this_rank() is for functions of a TrainingJob while it trains: here is no rank")
    return _this_rank


def be_this_rank(rank: Rank) -> None:
    """From now on this process is the rank."""
    global _this_rank
    _this_rank = rank


class Callbacks:
    """Calls a job's callbacks. What they raise is shown in the rank's log and counted; training goes on."""

    def __init__(self) -> None:
        self.num_errors = 0
        self._are_on_every_rank = False
        """Whether one is being called that every rank calls."""

    def check_on_every_rank(self, what: str) -> None:
        """Raises `Misuse` for what may be done only where every rank does it."""
        if not self._are_on_every_rank:
            raise Misuse(
                f"{what} is for epoch_fn and after_round, which run on every rank: here the ranks would come to differ"
            )

    def call(self, function: Callable[..., Any] | None, *arguments: Any, on_every_rank: bool = False) -> None:
        """Calls it, if there is one; `on_every_rank` says that every rank does."""
        if function is None:
            return
        self._are_on_every_rank = on_every_rank
        try:
            function(*arguments)
        except Exception:
            self.num_errors += 1
            name = getattr(function, "__name__", type(function).__name__)
            print(f"the callback {name} raised, and training goes on:\n{traceback.format_exc()}", file=sys.stderr)
        finally:
            self._are_on_every_rank = False
