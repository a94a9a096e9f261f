"""What a job's callbacks get, and what happens when one raises."""

import sys
import traceback
from collections.abc import Callable, Mapping
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
    """Counted from 0."""
    loss: float
    """Mean over batches."""
    scalars: dict[str, float]
    """Means of what `train_step` and `record_scalar` recorded."""
    metrics: dict[str, float]
    """Metrics of the epoch's evaluation; empty without one."""
    duration_s: float
    samples: int
    samples_per_s: float
    rank_batches: tuple[int, ...] = ()
    """Batches of each rank, in rank order."""
    rank_samples_per_s: tuple[float, ...] = ()
    """Samples per second of each rank, in rank order."""
    attempt: int = 1
    """How often the job had begun by then, from 1: one that goes back to a checkpoint tells epochs again."""


class Rank(Protocol):
    """One rank as its callbacks see it; `this_rank()` gives it where it is not handed over.

    Learning rates are set in `epoch_fn` and `after_round`, which run on every rank: set the same on all. Elsewhere that
    raises `Misuse`, since one rank would train at another rate than the others. What is set is part of checkpoints and
    goes to ranks that join, but for functions. A process calls `epoch_fn` for the epoch in which it begins, too, and it
    may set these again; rates stay, where it had been called for this epoch before.
    """

    lr_factor: float
    """Factor of all learning rates, also those of a schedule; setting it is `set_lr_scale`."""

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
        """Version of the averaged model that it trains on."""
        ...

    @property
    def epoch(self) -> int: ...
    @property
    def state(self) -> Mapping[str, Any]:
        """What the job's `state(model)` has given, by name."""
        ...

    @property
    def lr(self) -> float:
        """Present learning rate of the first parameter group."""
        ...

    def set_lr(self, lr: float) -> None:
        """Sets the learning rate of all parameter groups from the next batch on.

        Raises `Misuse` while a schedule sets the rate of each batch: end it with `set_schedule(None)`, or use
        `set_lr_scale`.
        """
        ...

    def scale_lr(self, factor: float) -> None:
        """Multiplies the learning rate of each parameter group, once. Raises `Misuse` as `set_lr` does."""
        ...

    def set_lr_scale(self, scale: float) -> None:
        """Sets a factor of all learning rates from the next batch on, with or without a schedule; 1 removes it."""
        ...

    def set_schedule(self, schedule: Callable[[Progress], float] | None) -> None:
        """Replaces the job's `schedule` or `scheduler`; with None rates stay as the optimizer was built, or as `set_lr`
        has set them.
        """
        ...

    def set_scheduler(self, scheduler: Callable[[Optimizer], LRScheduler] | None) -> None:
        """Like `set_schedule`, with a function that builds a torch scheduler."""
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
    """Makes `this_rank()` return this rank."""
    global _this_rank
    _this_rank = rank


class Callbacks:
    """Calls a job's callbacks. Errors that they raise are logged and counted; training goes on."""

    def __init__(self) -> None:
        self.num_errors = 0
        self._are_on_every_rank = False
        """True if a callback that every rank calls is running."""

    def check_on_every_rank(self, what: str) -> None:
        """Raises `Misuse` unless a callback that every rank calls is running."""
        if not self._are_on_every_rank:
            raise Misuse(
                f"{what} is for epoch_fn and after_round, which run on every rank: here the ranks would come to differ"
            )

    def call(self, function: Callable[..., Any] | None, *arguments: Any, on_every_rank: bool = False) -> None:
        """Calls a callback, if it is set; `on_every_rank`: every rank calls it."""
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
