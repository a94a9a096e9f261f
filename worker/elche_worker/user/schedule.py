"""Learning rates as a function of the job's progress, independent of the number of ranks and of restarts."""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingWarmRestarts,
    CyclicLR,
    LambdaLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from elche.errors import InvalidJob, Misuse
from elche.extent import Extent
from elche_worker.user.scalars import number_of

ROUNDING = 1e-9
"""Rates that are below 0 by no more are taken as 0."""

OVER = 1e-4
"""A scheduler's course is over where its rates are at most this fraction of the first batches'."""

COURSES = ("T_max", "total_steps", "step_size")
"""Attributes of torch's schedulers with the number of steps after which they are over, or reduce the rate again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Progress of a job, over all ranks."""

    samples: int
    """Samples trained."""
    total_samples: int
    batch_size: int

    @property
    def step(self) -> int:
        """Batches trained, in units of the job's batch size."""
        return self.samples // self.batch_size

    @property
    def total_steps(self) -> int:
        """Batches of the whole job."""
        return -(-self.total_samples // self.batch_size)

    @property
    def fraction(self) -> float:
        """Completed fraction of the job, from 0 to 1."""
        return min(1.0, self.samples / self.total_samples)


class LearningRates:
    """Sets the learning rates of optimizers before each batch: base rate * factor * scale."""

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        *,
        schedule: Callable[[Progress], float] | None = None,
        scheduler: Callable[[Any], LRScheduler] | None = None,
    ) -> None:
        self.epoch = -1
        """The last epoch for which `epoch_fn` has acted on these rates: here, or on the rank or in the checkpoint from
        which they come; -1: none.
        """
        self._scale = 1.0
        self._factor = 1.0
        self._optimizers = optimizers
        self._bases = [rate_of(group) for group in self._groups]
        """Rate of each parameter group before factor and scale; NaN for one without, whose optimizer has its own."""
        self._were_set = False
        """True if callbacks have set the base rates."""
        self._schedule = schedule
        self._is_tried = False
        """True if the first rates of the present schedule or scheduler were checked."""
        self._schedulers: list[LRScheduler] = []
        if schedule is not None:
            self._check_rates("the schedule")
        if scheduler is not None:
            self.set_scheduler(scheduler)

    @property
    def _groups(self) -> list[dict[str, Any]]:
        """The present parameter groups; loading an optimizer's state replaces them."""
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    @property
    def is_constant(self) -> bool:
        """True if rates are independent of the progress, so that they need not be set before each batch."""
        return self._schedule is None and not self._schedulers

    @property
    def scale(self) -> float:
        """Factor on all rates, of the setting `lr_scale_ratio`."""
        return self._scale

    @scale.setter
    def scale(self, scale: float) -> None:
        if scale != self._scale:  # otherwise rates that user code has set in the optimizer itself would be lost
            self._check_rates("lr_scale_ratio")
            self._scale = scale
            self.reset()

    @property
    def factor(self) -> float:
        """Factor on all rates, set by the job's callbacks."""
        return self._factor

    @factor.setter
    def factor(self, factor: float) -> None:
        if factor != self._factor:
            self._check_rates("set_lr_scale")
            self._factor = factor
            self.reset()

    def set(self, progress: Progress) -> None:
        """Sets the rates for the next batch. Raises `InvalidJob` for rates that are not finite or are below 0, and the
        first time as `_try` does.
        """
        rates = self._rates(progress)
        if not self.is_constant:
            self._check_values(rates, progress)
            if not self._is_tried:
                self._try(rates, progress)
            rates = [max(rate, 0.0) for rate in rates]  # rounding errors
        self._put([rate * self.scale * self.factor for rate in rates])

    def _check_values(self, rates: list[float], progress: Progress) -> None:
        """Raises `InvalidJob` if rates are not finite or are below 0, with which training would go uphill."""
        if not all(-ROUNDING <= rate < math.inf for rate in rates):
            step, total = progress.step, progress.total_steps
            raise InvalidJob(
                f"the schedule gives the learning rates {rates} for batch {step} of {total}: they must be finite, and "
                "not below 0. It is asked with the number of batches of all ranks, not of epochs"
            )

    def _try(self, rates: list[float], progress: Progress) -> None:
        """Raises `InvalidJob` if the first rates differ when asked for again, as of a schedule that counts calls."""
        if rates != self._rates(progress):
            raise InvalidJob(
                "the schedule gives another rate when it is asked for the same batch again, as one that counts its own "
                "calls: each rank asks for its own batches, not for all. Compute the rate from its argument alone"
            )
        self._is_tried = True

    def reset(self) -> None:
        """Sets rates that do not depend on the progress; the others are set with the next batch."""
        self._put([base * self.scale * self.factor for base in self._bases])

    # Setters for callbacks

    def set_lr(self, lr: float) -> None:
        """Sets the rate of every parameter group, factors included."""
        self._check_unscheduled("set_lr")
        # With a factor of 0 the rate is 0, whatever is set.
        self._set_bases([_checked("the learning rate", lr) / ((self.scale * self.factor) or 1.0)] * len(self._bases))

    def scale_lr(self, factor: float) -> None:
        """Multiplies the rate of every parameter group, once."""
        self._check_unscheduled("scale_lr")
        self._set_bases([base * _checked("the factor", factor) for base in self._bases])

    def set_lr_scale(self, scale: float) -> None:
        """Sets the factor on all rates."""
        self.factor = _checked("the scale", scale)

    def set_schedule(self, schedule: Callable[[Progress], float] | None) -> None:
        """Replaces the schedule or scheduler."""
        if schedule is not None:
            self._check_rates("set_schedule")
        self._schedule, self._schedulers, self._is_tried = schedule, [], False
        self.reset()

    def set_scheduler(self, scheduler: Callable[[Any], LRScheduler] | None) -> None:
        """Replaces the schedule or scheduler. Raises `InvalidJob` for a scheduler that cannot be used."""
        if scheduler is not None:
            self._check_rates("the scheduler")
        self._put(self._bases)  # a scheduler takes the present rates as its base
        for group in self._groups:
            group.pop("initial_lr", None)
        built = [_built(scheduler, optimizer) for optimizer in self._optimizers] if scheduler else []
        self._schedule, self._schedulers, self._is_tried = None, built, False
        self.reset()

    def epochs_notice(self, extent: Extent) -> str:
        """A warning on a scheduler whose course is over within as many batches as the job has epochs, or whose rates
        are next to nothing from the middle of the job on, as of a script that steps it after each epoch; "" if there is
        none. Raises `InvalidJob` for a scheduler with rates below 0.
        """
        num_epochs, total_steps = extent.num_epochs, -(-extent.total_samples // extent.batch_size)
        advice = (
            f"elche counts batches of all ranks, of which there are {total_steps}, not epochs. If epochs are meant, "
            f"multiply by the {-(-total_steps // (num_epochs or 1))} batches of one"
        )
        for built in self._schedulers:
            one: Any = built._schedulers[-1] if isinstance(built, SequentialLR) else built
            course = next((int(getattr(one, name)) for name in COURSES if hasattr(one, name)), 0)
            if isinstance(one, MultiStepLR):
                course = max(one.milestones, default=0)
            if 0 < course <= num_epochs < total_steps / 2:
                return (
                    f"the course of scheduler()'s {type(one).__name__} is {course} steps, and the job has {num_epochs} "
                    f"epochs: {advice}"
                )
        if not self._schedulers or num_epochs >= total_steps / 2:
            return ""
        early, late = 0.0, 0.0
        for step in range(0, total_steps, max(1, total_steps // 8)):
            size = extent.batch_size
            progress = Progress(samples=step * size, total_samples=extent.total_samples, batch_size=size)
            rates = self._rates(progress)
            self._check_values(rates, progress)
            if step < total_steps // 2:
                early = max(early, *rates)
            else:
                late = max(late, *rates)
        if late > OVER * early:
            return ""
        return f"scheduler()'s rates are next to nothing from the middle of the job on ({late:.2g}): {advice}"

    def to_json(self) -> dict[str, Any]:
        """The rates and factors that callbacks have set, as plain values for a checkpoint."""
        return {"factor": self.factor, "bases": self._bases if self._were_set else None, "epoch": self.epoch}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores a result of `to_json`; rates that callbacks have not set follow the job's file."""
        self.factor, self.epoch = state["factor"], state.get("epoch", -1)
        bases = state["bases"]
        if bases is not None and len(bases) == len(self._bases):
            self._set_bases([float(base) for base in bases])

    def _check_rates(self, what: str) -> None:
        """Raises `InvalidJob` if a parameter group has no rate that can be set."""
        for optimizer in self._optimizers:
            if any(math.isnan(rate_of(group)) for group in optimizer.param_groups):
                raise InvalidJob(
                    f"{what} has no effect on {type(optimizer).__name__}, which has groups of parameters without a "
                    "rate (lr): give it one, or leave the rates to it"
                )

    def _set_bases(self, bases: list[float]) -> None:
        self._check_rates("a rate")
        self._bases, self._were_set = bases, True
        self.reset()

    def _check_unscheduled(self, what: str) -> None:
        if not self.is_constant:
            raise Misuse(
                f"{what} has no effect while a schedule sets the rate of each batch: use set_lr_scale, which acts on "
                "it too, or end it first with set_schedule(None)"
            )

    def _put(self, rates: list[float]) -> None:
        for group, rate in zip(self._groups, rates, strict=True):
            if math.isnan(rate):
                continue
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


def rate_of(group: Mapping[str, Any]) -> float:
    """The learning rate of a parameter group; NaN for one without, as Adafactor's that sets its own."""
    rate = group.get("lr")
    return math.nan if rate is None else float(rate)


def _checked(what: str, value: float) -> float:
    number = number_of(value)
    if number is None or not 0 <= number < math.inf:
        raise ValueError(f"{what} must be a number of at least 0, not {value!r}")
    return number


def _built(scheduler: Callable[[Any], LRScheduler], optimizer: Optimizer) -> LRScheduler:
    built = scheduler(optimizer)
    if isinstance(built, ReduceLROnPlateau):
        raise InvalidJob(
            "scheduler() returned a ReduceLROnPlateau, which follows a metric, not the job's position; use schedule, "
            "another scheduler, or a loop of your own, where it works (docs/tutorials/loop.md)"
        )
    if not isinstance(built, LRScheduler):
        raise InvalidJob(
            f"scheduler() returned a {type(built).__name__}, which is no LRScheduler; use schedule, or a scheduler"
        )
    if isinstance(built, SequentialLR):
        # torch steps the first one on from these, which one after it may have set (OneCycleLR).
        first: Any = built._schedulers[0]
        if not isinstance(first, LambdaLR):
            first.base_lrs = [group["initial_lr"] for group in optimizer.param_groups]
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
        # It raises beyond its end.
        step = min(step, scheduler.total_steps)
    if isinstance(scheduler, CosineAnnealingWarmRestarts):
        scheduler.step(step)  # to a position
        return [float(rate) for rate in scheduler.get_last_lr()]
    scheduler.last_epoch = step
    scheduler._get_lr_called_within_step = True  # otherwise it warns about a call by the user
    if isinstance(scheduler, LambdaLR | OneCycleLR | CyclicLR):
        return [float(rate) for rate in scheduler.get_lr()]
    closed_form = _closed_form_of(scheduler)
    if closed_form is None:
        raise InvalidJob(
            f"scheduler() returned a {type(scheduler).__name__}, whose rates follow from its steps alone; "
            "elche takes rates at a position: use LambdaLR, or schedule"
        )
    return [float(rate) for rate in closed_form()]


def _closed_form_of(scheduler: LRScheduler) -> Callable[[], list[Any]] | None:
    """The scheduler's method of rates at a position; None if it has none, or inherits one beside a `get_lr` of its
    own, whose rates are others.
    """
    kinds = type(scheduler).__mro__
    first = next((kind for kind in kinds if "get_lr" in vars(kind) or "_get_closed_form_lr" in vars(kind)), kinds[0])
    return getattr(scheduler, "_get_closed_form_lr", None) if "_get_closed_form_lr" in vars(first) else None
