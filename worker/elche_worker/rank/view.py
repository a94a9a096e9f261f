"""The view of a rank that callbacks receive."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from elche_worker.model.own_state import OwnState
from elche_worker.user.callbacks import Callbacks
from elche_worker.user.schedule import LearningRates, Progress, rate_of


class Viewed(Protocol):
    """The attributes of a rank that a view reads."""

    @property
    def model(self) -> torch.nn.Module: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def optimizers(self) -> Sequence[Optimizer]: ...
    @property
    def local_step(self) -> int: ...
    @property
    def version(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def progress(self) -> Progress: ...
    @property
    def own_state(self) -> OwnState: ...


class View:
    """An `elche_worker.user.callbacks.Rank`. Callbacks that every rank calls, and no others, may set learning rates."""

    def __init__(self, rank: int, replica: Viewed, rates: LearningRates, callbacks: Callbacks) -> None:
        self._rank = rank
        self._replica = replica
        self._rates = rates
        self._callbacks = callbacks

    @property
    def model(self) -> torch.nn.Module:
        return self._replica.model

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def device(self) -> str:
        return str(self._replica.device)

    @property
    def local_step(self) -> int:
        return self._replica.local_step

    @property
    def version(self) -> int:
        return self._replica.version

    @property
    def epoch(self) -> int:
        return self._replica.epoch

    @property
    def progress(self) -> Progress:
        return self._replica.progress

    @property
    def state(self) -> Mapping[str, Any]:
        return self._replica.own_state.objects

    @property
    def lr(self) -> float:
        return rate_of(self._replica.optimizers[0].param_groups[0])

    @property
    def lr_factor(self) -> float:
        return self._rates.factor

    @lr_factor.setter
    def lr_factor(self, factor: float) -> None:
        self._checked("lr_factor").set_lr_scale(factor)

    def set_lr(self, lr: float) -> None:
        self._checked("set_lr").set_lr(lr)

    def scale_lr(self, factor: float) -> None:
        self._checked("scale_lr").scale_lr(factor)

    def set_lr_scale(self, scale: float) -> None:
        self._checked("set_lr_scale").set_lr_scale(scale)

    def set_schedule(self, schedule: Callable[[Progress], float] | None) -> None:
        self._checked("set_schedule").set_schedule(schedule)

    def set_scheduler(self, scheduler: Callable[[Optimizer], LRScheduler] | None) -> None:
        self._checked("set_scheduler").set_scheduler(scheduler)

    def _checked(self, what: str) -> LearningRates:
        self._callbacks.check_on_every_rank(what)
        return self._rates
