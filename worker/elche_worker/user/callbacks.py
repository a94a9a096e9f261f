"""The arguments of a job's callbacks, and the handling of their errors."""

import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from elche.errors import Misuse
from elche.output import notice
from elche_worker.user.schedule import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochMetrics:
    """One finished epoch, over all ranks."""

    epoch: int
    """Counted from 0."""
    loss: float
    """Mean over batches."""
    scalars: dict[str, float]
    """Means of the values that `train_step` and `record_scalar` recorded."""
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
    """Attempt, from 1: a job that goes back to a checkpoint reports epochs again."""


class Rank(Protocol):
    """One rank, for its callbacks; `this_rank()` returns it where it is not an argument.

    Set learning rates in `epoch_fn` and `after_round`, which run on every rank, equally on all. Elsewhere the setters
    raise `Misuse`, since one rank would train at a different rate. Rates are stored in checkpoints and sent to ranks
    that join; schedules, which are functions, are not. A new process calls `epoch_fn` for the epoch in which it begins,
    so that schedules can be set again; rates are then left as they are if the function was called for that epoch
    before.
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
        """Number of batches that this rank has trained."""

    @property
    def version(self) -> int:
        """Version of the averaged model that it trains on."""

    @property
    def epoch(self) -> int:
        """Epoch of the batch that this rank has trained last; -1 before its first one. Ranks may be in different
        epochs, also in `after_round`. In an evaluation it is the epoch that is evaluated.
        """

    @property
    def progress(self) -> Progress:
        """The job's progress, as far as this rank knows it; in `after_round` that of the result, equal on all ranks."""

    @property
    def state(self) -> Mapping[str, Any]:
        """The objects that the job's `state(model)` has returned, by name."""

    @property
    def lr(self) -> float:
        """Present learning rate of the first parameter group; NaN for an optimizer that has its own."""

    def set_lr(self, lr: float) -> None:
        """Sets the learning rate of all parameter groups from the next batch on.

        Raises `Misuse` while a schedule sets the rate of each batch: end it with `set_schedule(None)`, or use
        `set_lr_scale`.
        """

    def scale_lr(self, factor: float) -> None:
        """Multiplies the learning rate of each parameter group, once. Raises `Misuse` as `set_lr` does."""

    def set_lr_scale(self, scale: float) -> None:
        """Sets a factor on all learning rates from the next batch on, with or without a schedule; 1 removes it."""

    def set_schedule(self, schedule: Callable[[Progress], float] | None) -> None:
        """Replaces the job's `schedule` or `scheduler`; with None rates are those of the optimizer, or of `set_lr`."""

    def set_scheduler(self, scheduler: Callable[[Optimizer], LRScheduler] | None) -> None:
        """Like `set_schedule`, with a function that builds a torch scheduler."""


_this_rank: Rank | None = None


def this_rank() -> Rank:
    """The rank of this process, for `train_step` and callbacks without it as an argument. Raises `Misuse` while no job
    is trained.
    """
    if _this_rank is None:
        raise Misuse("this_rank() is for functions of a TrainingJob while it trains: no job is trained here")
    return _this_rank


def be_this_rank(rank: Rank) -> None:
    """Makes `this_rank()` return this rank."""
    global _this_rank
    _this_rank = rank


class Callbacks:
    """Calls a job's callbacks. Their errors are logged and counted; training goes on."""

    def __init__(self, apart: Callable[[], AbstractContextManager[None]]) -> None:
        """`apart`: the context of callbacks that not every rank calls, which keeps random generators as they are."""
        self.num_errors = 0
        self._apart = apart
        self._are_on_every_rank = False
        """True if a callback that every rank calls is running."""

    def check_on_every_rank(self, what: str) -> None:
        """Raises `Misuse` unless a callback that every rank calls is running."""
        if not self._are_on_every_rank:
            raise Misuse(
                f"{what} is for epoch_fn and after_round, which run on every rank: elsewhere the ranks would differ"
            )

    def call(self, function: Callable[..., Any] | None, *arguments: Any, on_every_rank: bool = False) -> None:
        """Calls a callback, if it is set; `on_every_rank`: True if all ranks call it. What others draw does not change
        what training draws.
        """
        if function is None:
            return
        self._are_on_every_rank = on_every_rank
        try:
            with nullcontext() if on_every_rank else self._apart():
                function(*arguments)
        except Exception:
            self.num_errors += 1
            name = getattr(function, "__name__", type(function).__name__)
            notice(f"the callback {name} raised, and training goes on:\n{traceback.format_exc()}")
        finally:
            self._are_on_every_rank = False
