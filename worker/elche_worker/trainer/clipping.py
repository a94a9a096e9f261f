"""Gradients that a loop clips before they are averaged: each rank's own, not their average."""

import math
from collections.abc import Callable, Iterable
from functools import cache, wraps
from typing import Any

import torch
from torch.nn.utils import clip_grad

INNER = "_clip_grads_with_norm_"
"""PyTorch's function that `clip_grad_norm_` calls: loops may have imported that one before."""
LIMITS = ("max_norm", "clip_value")
"""Names of the argument behind the parameters in PyTorch's functions."""
_clipped: set[int] = set()
"""Ids of the parameters whose gradients were clipped since the latest step."""


def _noting(clip: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(clip)
    def noted(parameters: Any, *limits: Any, **named: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if all(map(math.isfinite, limits[:1] or [named[name] for name in LIMITS if name in named])):
            _clipped.update(map(id, parameters))  # an infinite one changes nothing
        return clip(parameters, *limits, **named)

    return noted


@cache
def watch_clipping() -> None:
    """Notes from now on which gradients are clipped. PyTorch has no hook for that."""
    if hasattr(clip_grad, INNER):
        setattr(clip_grad, INNER, _noting(getattr(clip_grad, INNER)))
    # `clip_grad_value_` calls no other function: what it wraps is replaced, for loops that have imported it before.
    for cell in getattr(clip_grad.clip_grad_value_, "__closure__", None) or ():
        if callable(cell.cell_contents):
            cell.cell_contents = _noting(cell.cell_contents)


def is_any_clipped(parameters: Iterable[torch.Tensor]) -> bool:
    """True if gradients of these parameters were clipped in this step."""
    return bool(_clipped) and any(id(one) in _clipped for one in parameters)


def forget_clipped() -> None:
    """Begins a new step."""
    _clipped.clear()
