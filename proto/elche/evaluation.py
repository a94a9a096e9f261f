"""What all programs say alike of an evaluation: the limit of what is summed, and metrics that are no numbers."""

from collections.abc import Iterable, Mapping
from math import isfinite

MAX_SUM_BYTES = 1 << 20
"""Limit of the tensors that one evaluation sums, all together; each value takes 8 bytes."""


def missing_metric(monitor: str, metrics: Iterable[str]) -> str:
    """An evaluation has given these metrics, and the monitored one is not among them."""
    known = ", ".join(sorted(metrics)) or "none"
    return (
        f"the evaluation gives no metric {monitor!r}, which monitor names; it gives {known}: name one of these, or let "
        "the evaluation return it"
    )


def note_finite(metrics: Mapping[str, float], last: Mapping[str, int], num_epochs: int) -> dict[str, int]:
    """After how many epochs each metric was last a finite number, with this evaluation after `num_epochs`; metrics that
    never were are left out.
    """
    epochs = {name: num_epochs if isfinite(value) else last.get(name) for name, value in metrics.items()}
    return {name: epoch for name, epoch in epochs.items() if epoch is not None}


def spoilt_metric(metrics: Mapping[str, float], last: Mapping[str, int], monitor: str | None) -> str:
    """Why a training whose final evaluation gave these metrics has failed: one was a finite number before, and is none
    now. Empty if there is no such one. `last` is that of `note_finite`.
    """
    spoilt = [name for name, value in metrics.items() if not isfinite(value) and name in last]
    if not spoilt:
        return ""
    name = monitor if monitor in spoilt else spoilt[0]
    return (
        f"{name} is {metrics[name]} in the final evaluation, and was last a finite number after epoch {last[name]}: "
        "lower the learning rate or set max_grad_norm, and resume from a checkpoint of that epoch or of one before it"
    )


def never_finite(metrics: Mapping[str, float]) -> str:
    """One line on metrics of the final evaluation that are no finite numbers, where `spoilt_metric` has none of them;
    empty if all are finite.
    """
    names = [name for name, value in metrics.items() if not isfinite(value)]
    return f"never a finite number: {', '.join(names)}" if names else ""
