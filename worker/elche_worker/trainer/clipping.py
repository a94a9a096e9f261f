"""Gradients that a loop clips before they are averaged: by the norm of each rank's own, not of their average."""

import math
from collections.abc import Callable, Iterable
from functools import cache, wraps
from typing import Any

import torch
from torch.nn.utils import clip_grad

INNER = "_clip_grads_with_norm_"
"""PyTorch's function that `clip_grad_norm_` calls: loops may have imported that one before."""
_clipped: set[int] = set()
"""Ids of the parameters whose gradients were clipped since the latest step."""


def _noting(clip: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(clip)
    def noted(parameters: Any, max_norm: float, *more: Any, **named: Any) -> Any:
        if math.isfinite(max_norm):  # with an infinite one it only computes the norm
            parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            _clipped.update(map(id, parameters))
        return clip(parameters, max_norm, *more, **named)

    return noted


@cache
def watch_clipping() -> None:
    """Notes from now on which gradients are clipped. PyTorch has no hook for that."""
    if hasattr(clip_grad, INNER):
        setattr(clip_grad, INNER, _noting(getattr(clip_grad, INNER)))


def is_any_clipped(parameters: Iterable[torch.Tensor]) -> bool:
    """True if gradients of these parameters were clipped in this step."""
    return bool(_clipped) and any(id(one) in _clipped for one in parameters)


def forget_clipped() -> None:
    """Begins a new step."""
    _clipped.clear()
