"""Learning rates by how far a job is: the same whatever the number of ranks, and after a restart."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR, ReduceLROnPlateau, SequentialLR

from elche.errors import InvalidJob
from elche_worker.scalars import number_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a job is, over all ranks."""

    samples: int
    """Samples trained."""
    total_samples: int
    batch_size: int

    @property
    def step(self) -> int:
        """Batches trained, of the job's batch size."""
        return self.samples // self.batch_size

    @property
    def total_steps(self) -> int:
        """Batches of the whole job."""
        return -(-self.total_samples // self.batch_size)

    @property
    def fraction(self) -> float:
        """Part of the job that is done, from 0 to 1."""
        return min(1.0, self.samples / self.total_samples)


class LearningRates:
    """Sets the learning rates of optimizers before each batch: base rate times factor times scale."""

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        *,
        schedule: Callable[[Progress], float] | None = None,
        scheduler: Callable[[Any], LRScheduler] | None = None,
    ) -> None:
        self.scale = 1.0
        """Of all rates, by `lr_scale_ratio`."""
        self.factor = 1.0
        """Of all rates, by the job's callbacks."""
        self._last = 1.0
        """Scale and factor that the rates have."""
        self._optimizers = optimizers
        self._bases = [float(group["lr"]) for group in self._groups]
        self._schedule = schedule
        self._schedulers = [_built(scheduler, optimizer) for optimizer in optimizers] if scheduler else []

    @property
    def _groups(self) -> list[dict[str, Any]]:
        """As they are now: loading an optimizer's state makes new ones."""
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    @property
    def is_constant(self) -> bool:
        """Whether rates stay as the optimizer was built with."""
        return self._schedule is None and not self._schedulers and self.scale * self.factor == self._last == 1

    def set(self, progress: Progress) -> None:
        """Sets the rates for the next batch."""
        self._last = self.scale * self.factor
        self._put([rate * self._last for rate in self._rates(progress)])

    def reset(self) -> None:
        """Sets the rates that the optimizers were built with, after a checkpoint has brought others."""
        self._put(self._bases)

    def _put(self, rates: list[float]) -> None:
        for group, rate in zip(self._groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _rates(self, progress: Progress) -> list[float]:
        if self._schedulers:
            return [rate for one in self._schedulers for rate in rates_at(one, progress.step)]
        returned = self._schedule(progress) if self._schedule else 1.0
        factor = number_of(returned)
        if factor is None:
            raise InvalidJob(f"schedule() must return a number, the factor of the rates, not {type(returned).__name__}")
        return [base * factor for base in self._bases]


def _built(scheduler: Callable[[Any], LRScheduler], optimizer: Optimizer) -> LRScheduler:
    built = scheduler(optimizer)
    if isinstance(built, ReduceLROnPlateau) or not isinstance(built, LRScheduler):
        what = (
            "follows a metric, not the job's position" if isinstance(built, ReduceLROnPlateau) else "is no LRScheduler"
        )
        raise InvalidJob(
            f"scheduler() returned a {type(built).__name__}, which {what}; use schedule, or another scheduler"
        )
    rates_at(built, 0)
    return built


def rates_at(scheduler: LRScheduler, step: int) -> list[float]:
    """The scheduler's learning rates at a step, by its closed form. Raises `InvalidJob` for one that has none."""
    if isinstance(scheduler, SequentialLR):
        milestones: list[int] = scheduler._milestones
        index = bisect_right(milestones, step)
        children: list[LRScheduler] = scheduler._schedulers
        return rates_at(children[index], step - milestones[index - 1] if index else step)
    if isinstance(scheduler, OneCycleLR):
        step = min(step, scheduler.total_steps)
    scheduler.last_epoch = step
    scheduler._get_lr_called_within_step = True  # else it warns, as if a user had called it
    if isinstance(scheduler, LambdaLR | OneCycleLR):
        return [float(rate) for rate in scheduler.get_lr()]
    closed_form = getattr(scheduler, "_get_closed_form_lr", None)
    if closed_form is None:
        raise InvalidJob(
            f"scheduler() returned a {type(scheduler).__name__}, whose rates follow from its steps alone; "
            "elche takes rates at a position: use LambdaLR, or schedule"
        )
    return [float(rate) for rate in closed_form()]
