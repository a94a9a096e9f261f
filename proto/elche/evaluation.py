"""Common rules of evaluations: the bound on summed tensors, and messages on metrics that are missing or not finite."""

from collections.abc import Iterable, Mapping
from math import isfinite

MAX_SUM_BYTES = 1 << 20
"""Most bytes of all tensors that one evaluation sums; each value takes 8."""


def missing_metric(monitor: str, metrics: Iterable[str]) -> str:
    """The message for an evaluation whose metrics lack the monitored one."""
    known = ", ".join(sorted(metrics)) or "none"
    return (
        f"the evaluation gives no metric {monitor!r}, which monitor names; it gives {known}: name one of these, or let "
        "the evaluation return it"
    )


def note_finite(metrics: Mapping[str, float], last: Mapping[str, int], num_epochs: int) -> dict[str, int]:
    """The number of epochs after which each metric was last finite, updated by this evaluation after `num_epochs`;
    without metrics that never were.
    """
    epochs = {name: num_epochs if isfinite(value) else last.get(name) for name, value in metrics.items()}
    return {name: epoch for name, epoch in epochs.items() if epoch is not None}


def spoilt_metric(metrics: Mapping[str, float], last: Mapping[str, int], monitor: str | None) -> str:
    """The failure's text if a metric of the final evaluation is not finite but was before; else empty. `last` is the
    result of `note_finite`.
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
    """A warning on metrics of the final evaluation that were never finite; empty if all are finite."""
    names = [name for name, value in metrics.items() if not isfinite(value)]
    return f"never a finite number: {', '.join(names)}" if names else ""
