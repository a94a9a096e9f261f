"""Learning rates by position: functions of progress, and torch's schedulers evaluated without being stepped."""

import math
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, lr_scheduler

from elche.errors import InvalidJob, Misuse
from elche.extent import Extent
from elche_worker.user.schedule import LearningRates, Progress


def new_optimizer(lr: float | torch.Tensor = 0.1) -> SGD:
    return SGD([{"params": nn.Linear(2, 2).parameters()}, {"params": nn.Linear(1, 1).parameters(), "lr": 1.0}], lr=lr)


def at(step: int, *, total: int = 100) -> Progress:
    return Progress(samples=step * 8, total_samples=total * 8, batch_size=8)


def rates(optimizer: SGD) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def test_a_function_of_progress_scales_every_group() -> None:
    optimizer = new_optimizer()
    by_progress = LearningRates([optimizer], schedule=lambda progress: 1 - progress.fraction)
    by_progress.set(at(25))
    assert rates(optimizer) == pytest.approx([0.075, 0.75])
    by_progress.scale = 2.0
    by_progress.set(at(50))
    assert rates(optimizer) == pytest.approx([0.1, 1.0])
    by_progress.factor = 0.1
    by_progress.set(at(75))
    assert rates(optimizer) == pytest.approx([0.005, 0.05]), "a callback's factor, beside the schedule"


def test_progress_counts_samples_in_batches_of_the_job() -> None:
    progress = Progress(samples=100, total_samples=1000, batch_size=32)
    assert (progress.step, progress.total_steps, progress.fraction) == (3, 32, 0.1)


@pytest.mark.parametrize(
    "build",
    [
        lambda optimizer: lr_scheduler.StepLR(optimizer, 10, gamma=0.5),
        lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [5, 30], gamma=0.1),
        lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.97),
        lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 60, eta_min=0.01),
        lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 7, T_mult=2),
        lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, [0.1, 0.2], step_size_up=4, cycle_momentum=False),
        lambda optimizer: lr_scheduler.LinearLR(optimizer, 0.1, total_iters=20),
        lambda optimizer: lr_scheduler.ConstantLR(optimizer, 0.3, total_iters=7),
        lambda optimizer: lr_scheduler.PolynomialLR(optimizer, 40, power=2.0),
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=[0.5, 2.0], total_steps=60),
        lambda optimizer: lr_scheduler.SequentialLR(
            optimizer,
            [lr_scheduler.LinearLR(optimizer, 0.01, total_iters=10), lr_scheduler.CosineAnnealingLR(optimizer, 50)],
            milestones=[10],
        ),
        # the second one sets the rates from which torch steps the first one on
        lambda optimizer: lr_scheduler.SequentialLR(
            optimizer,
            [lr_scheduler.LinearLR(optimizer, 0.1), lr_scheduler.OneCycleLR(optimizer, [0.5, 2.0], total_steps=60)],
            milestones=[5],
        ),
    ],
)
def test_torch_schedulers_give_what_they_give_when_they_are_stepped(build: object) -> None:
    stepped_optimizer, optimizer = new_optimizer(), new_optimizer()
    stepped = build(stepped_optimizer)  # type: ignore[operator]
    by_scheduler = LearningRates([optimizer], scheduler=build)  # type: ignore[arg-type]
    for step in range(55):
        by_scheduler.set(at(step))
        assert rates(optimizer) == pytest.approx(rates(stepped_optimizer), rel=1e-6), step
        stepped_optimizer.step()
        stepped.step()
    by_scheduler.set(at(3))  # it does not matter where it was before
    early = rates(optimizer)
    again_optimizer = new_optimizer()
    again = LearningRates([again_optimizer], scheduler=build)  # type: ignore[arg-type]
    again.set(at(3))
    assert early == pytest.approx(rates(again_optimizer))


@pytest.mark.parametrize(
    ("build", "course"),
    [
        (lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=3), 3),
        (lambda optimizer: lr_scheduler.StepLR(optimizer, 2), 2),
        (lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [1, 2]), 2),
        (lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=3), 3),
        (
            lambda optimizer: lr_scheduler.SequentialLR(
                optimizer,
                [lr_scheduler.LinearLR(optimizer), lr_scheduler.CosineAnnealingLR(optimizer, 2)],
                milestones=[1],
            ),
            2,
        ),
        (lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=30), 0),
        (lambda optimizer: lr_scheduler.LinearLR(optimizer, total_iters=3), 0),  # a warm-up of three batches
    ],
)
def test_a_scheduler_that_seems_to_count_epochs_is_told_otherwise(build: Callable[..., Any], course: int) -> None:
    """`CosineAnnealingLR(optimizer, T_max=EPOCHS)` went up and down every few batches, in silence."""
    extent = Extent(dataset_size=100, batch_size=10, epochs=3)
    said = LearningRates([SGD([nn.Parameter(torch.zeros(1))], lr=0.1)], scheduler=build).epochs_notice(extent)
    assert (f"is {course} steps, and the job has 3 epochs: elche counts batches" in said) == bool(course)
    assert ("multiply by the 10 batches of one" in said) == bool(course)
    assert bool(said) == bool(course)


def test_after_its_last_step_one_cycle_stays_where_it_is() -> None:
    """Stepped by hand it raises there; a job may be longer."""
    optimizer = new_optimizer()
    cycle = LearningRates([optimizer], scheduler=lambda one: lr_scheduler.OneCycleLR(one, [0.5, 2.0], total_steps=60))
    cycle.set(at(60))
    last = rates(optimizer)
    for step in (61, 90):
        cycle.set(at(step))
        assert rates(optimizer) == last


class WarmUp(lr_scheduler.CosineAnnealingLR):
    """Its own rates, beside a closed form that is not theirs."""

    def get_lr(self) -> list[float | torch.Tensor]:
        return [0.0 for _ in self.base_lrs] if self.last_epoch < 10 else super().get_lr()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lr_scheduler.ReduceLROnPlateau, "ReduceLROnPlateau, which follows a metric.* or a loop of your own"),
        (
            lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda step: 0.9),
            "MultiplicativeLR, whose rates follow from its steps",
        ),
        (lambda optimizer: "cosine", "str, which is no LRScheduler"),
        (lambda optimizer: WarmUp(optimizer, T_max=100), "WarmUp, whose rates follow from its steps"),
    ],
)
def test_a_scheduler_that_cannot_be_placed_is_refused(build: object, message: str) -> None:
    with pytest.raises(InvalidJob, match=message):
        LearningRates([new_optimizer()], scheduler=build)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_torchs", [False, True])
def test_a_schedule_that_counts_its_calls_is_refused(*, is_torchs: bool) -> None:
    calls = count()

    def decayed(_: object) -> float:
        return 0.9 ** next(calls)

    given: dict[str, Any] = {"schedule": decayed}
    if is_torchs:
        given = {"scheduler": lambda optimizer: lr_scheduler.LambdaLR(optimizer, decayed)}
    by_calls = LearningRates([new_optimizer()], **given)
    with pytest.raises(InvalidJob, match=r"counts its own calls: .* from its argument alone"):
        by_calls.set(at(0))


@pytest.mark.parametrize("factor", [math.nan, math.inf, -0.1])
def test_a_schedule_whose_rates_are_not_finite_or_below_0_is_refused_at_any_batch(factor: float) -> None:
    """With a rate below 0 training went uphill, in silence."""
    rates = LearningRates([new_optimizer()], schedule=lambda progress: factor if progress.step == 7 else 0.1)
    rates.set(at(0))
    with pytest.raises(InvalidJob, match="for batch 7 of 100: they must be finite, and not below 0"):
        rates.set(at(7))


def test_a_rounding_error_below_0_is_a_rate_of_0() -> None:
    optimizer = new_optimizer()
    LearningRates([optimizer], schedule=lambda progress: 1 - sum([0.1] * 3) / 0.3).set(at(0))
    assert rates(optimizer) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("build", "is_told"),
    [
        (lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9), True),
        (lambda optimizer: lr_scheduler.PolynomialLR(optimizer, 10), True),
        (lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.99), False),
        (lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 500), False),  # two whole cycles
        (lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 200)), False),
    ],
)
def test_a_scheduler_whose_rates_are_soon_next_to_nothing_is_told_of(
    build: Callable[..., Any], *, is_told: bool
) -> None:
    """`ExponentialLR(optimizer, 0.9)` of a script that steps it after each epoch left the model as it began."""
    extent = Extent(dataset_size=1_000, batch_size=10, epochs=10)
    said = LearningRates([SGD([nn.Parameter(torch.zeros(1))], lr=0.1)], scheduler=build).epochs_notice(extent)
    assert ("next to nothing from the middle of the job on" in said) == is_told
    assert bool(said) == is_told


def test_a_scheduler_with_rates_below_0_is_refused_before_training() -> None:
    """CycleGAN's rule, which counts epochs."""
    rates = LearningRates(
        [new_optimizer()],
        scheduler=lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 - max(0, epoch - 9) / 6),
    )
    with pytest.raises(InvalidJob, match="for batch 125 of 1000: they must be finite, and not below 0"):
        rates.epochs_notice(Extent(dataset_size=1_000, batch_size=10, epochs=10))


def test_a_learning_rate_in_a_tensor_is_changed_in_place() -> None:
    rate = torch.tensor(0.1)
    optimizer = SGD(nn.Linear(1, 1).parameters(), lr=rate)
    held = optimizer.param_groups[0]["lr"]
    LearningRates([optimizer], schedule=lambda progress: 0.5).set(at(0))
    assert optimizer.param_groups[0]["lr"] is held
    assert float(held) == pytest.approx(0.05)


# What callbacks set


def test_a_rate_that_is_set_holds_at_once_and_scales_go_with_it() -> None:
    optimizer = new_optimizer()
    by_callbacks = LearningRates([optimizer])
    by_callbacks.set_lr(0.4)
    assert rates(optimizer) == pytest.approx([0.4, 0.4])
    by_callbacks.set_lr_scale(0.5)
    assert rates(optimizer) == pytest.approx([0.2, 0.2])
    by_callbacks.set_lr(0.3)
    assert rates(optimizer) == pytest.approx([0.3, 0.3]), "what is set is the rate, whatever the scale"
    by_callbacks.scale_lr(2.0)
    assert rates(optimizer) == pytest.approx([0.6, 0.6])
    by_callbacks.set_lr_scale(1.0)
    assert rates(optimizer) == pytest.approx([1.2, 1.2]), "without the scale"


def test_scaling_once_keeps_what_groups_differ_by() -> None:
    optimizer = new_optimizer()
    LearningRates([optimizer]).scale_lr(0.5)
    assert rates(optimizer) == pytest.approx([0.05, 0.5])


def test_a_scale_persists_with_a_schedule_and_a_schedule_is_replaced() -> None:
    optimizer = new_optimizer()
    by_callbacks = LearningRates([optimizer], schedule=lambda progress: 1 - progress.fraction)
    by_callbacks.set_lr_scale(2.0)
    for step in (0, 25, 50):
        by_callbacks.set(at(step))
        assert rates(optimizer)[0] == pytest.approx(0.2 * (1 - step / 100))
    by_callbacks.set_scheduler(lambda optimizer: lr_scheduler.StepLR(optimizer, 10, gamma=0.1))
    by_callbacks.set(at(10))
    assert rates(optimizer) == pytest.approx([0.02, 0.2])
    by_callbacks.set_scheduler(lambda optimizer: lr_scheduler.StepLR(optimizer, 10, gamma=0.5))
    by_callbacks.set(at(20))
    assert rates(optimizer) == pytest.approx([0.05, 0.5]), "from the optimizer's own rates, not from the last ones"
    by_callbacks.set_schedule(None)
    assert by_callbacks.is_constant
    assert rates(optimizer) == pytest.approx([0.2, 2.0])


@pytest.mark.parametrize("name", ["set_lr", "scale_lr"])
def test_a_rate_that_the_schedule_would_undo_is_refused(name: str) -> None:
    by_schedule = LearningRates([new_optimizer()], schedule=lambda progress: 0.5)
    with pytest.raises(Misuse, match=rf"{name} has no effect while a schedule.*set_lr_scale"):
        getattr(by_schedule, name)(0.1)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), "fast", None])
def test_a_rate_that_is_none_is_refused(value: object) -> None:
    optimizer = new_optimizer()
    for set_it in (LearningRates([optimizer]).set_lr, LearningRates([optimizer]).set_lr_scale):
        with pytest.raises(ValueError, match="must be a number of at least 0"):
            set_it(value)  # type: ignore[arg-type]
    assert rates(optimizer) == [0.1, 1.0]


def test_what_was_set_goes_on_after_a_checkpoint_and_the_rest_is_the_file_s() -> None:
    before = LearningRates([new_optimizer()])
    before.set_lr_scale(0.5)
    optimizer = new_optimizer(lr=0.3)
    LearningRates([optimizer]).restore(before.to_json())
    assert rates(optimizer) == pytest.approx([0.15, 0.5])
    before.set_lr(0.2)
    optimizer = new_optimizer(lr=0.3)
    LearningRates([optimizer]).restore(before.to_json())
    assert rates(optimizer) == pytest.approx([0.2, 0.2])


class OwnRate(torch.optim.SGD):
    """As Hugging Face's Adafactor, whose `lr` is None while it sets its own rates, or with no such option."""

    def __init__(self, parameters: Any, *, is_none: bool) -> None:
        super().__init__(parameters, lr=0.5)
        for group in self.param_groups:
            if is_none:
                group["lr"] = None
            else:
                del group["lr"]


@pytest.mark.parametrize("is_none", [True, False])
def test_an_optimizer_that_has_no_rate_keeps_its_own_and_takes_no_schedule(is_none: bool) -> None:
    own = OwnRate([torch.zeros(1, requires_grad=True)], is_none=is_none)
    rates = LearningRates([own])
    before = dict(own.param_groups[0])
    rates.reset()
    rates.restore(rates.to_json())
    assert own.param_groups[0] == before
    for act in (
        lambda: LearningRates([own], schedule=lambda progress: 1.0),
        lambda: LearningRates([own], scheduler=lambda one: lr_scheduler.LambdaLR(one, lambda step: 1.0)),
        lambda: rates.set_lr(0.1),
        lambda: rates.set_lr_scale(2.0),
    ):
        with pytest.raises(InvalidJob, match="no effect on OwnRate, which has groups of parameters without a rate"):
            act()
