"""Notes what a loop does with gradients besides its trainer: it clips or scales them, or averages them by
DistributedDataParallel. PyTorch has no hooks for that, so its functions are replaced by ones that note each call.
"""

import math
from collections.abc import Callable, Iterable
from functools import cache, wraps
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

from elche.errors import Misuse

INNER = "_clip_grads_with_norm_"
"""PyTorch's function that `clip_grad_norm_` calls: loops may have imported that one before."""
LIMITS = ("max_norm", "clip_value")
"""Names of the argument behind the parameters in PyTorch's functions."""
_clipped: set[int] = set()
"""Ids of the parameters whose gradients were clipped since the latest step."""
_scaled: "WeakSet[GradScaler]" = WeakSet()
"""Enabled scalers that have scaled a loss since the latest step."""
_unscaled: "WeakSet[Optimizer]" = WeakSet()
"""Optimizers whose gradients were unscaled since the latest step."""
_wrapping: "WeakSet[DistributedDataParallel]" = WeakSet()
"""Those that were called with gradients. A loop may build one before or after `Trainer.setup`, of the same module."""


@cache
def _watch() -> None:
    """Replaces PyTorch's functions, once in a process."""
    if hasattr(clip_grad, INNER):
        setattr(clip_grad, INNER, _noting_clipped(getattr(clip_grad, INNER)))
    # `clip_grad_value_` calls no other function: what it wraps is replaced, for loops that have imported it before.
    for cell in getattr(clip_grad.clip_grad_value_, "__closure__", None) or ():
        if callable(cell.cell_contents):
            cell.cell_contents = _noting_clipped(cell.cell_contents)
    _note_calls(GradScaler, "scale", _scaled, 0, GradScaler.is_enabled)
    _note_calls(GradScaler, "unscale_", _unscaled, 1, GradScaler.is_enabled)
    _note_calls(DistributedDataParallel, "forward", _wrapping, 0, lambda _: torch.is_grad_enabled())


def _noting_clipped(clip: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(clip)
    def noted(parameters: Any, *limits: Any, **named: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if all(map(math.isfinite, limits[:1] or [named[name] for name in LIMITS if name in named])):
            _clipped.update(map(id, parameters))  # an infinite one changes nothing
        return clip(parameters, *limits, **named)

    return noted


def _note_calls(kind: type, name: str, noted: "WeakSet[Any]", which: int, counts: Callable[[Any], bool]) -> None:
    """Has the method `name` of a class note one of its arguments in each call that counts, given its object."""
    method = getattr(kind, name)

    @wraps(method)
    def noting(*given: Any, **named: Any) -> Any:
        result = method(*given, **named)  # first: of arguments that are wrong Python says which
        if counts(given[0]):
            noted.add([*given, *named.values()][which])
        return result

    setattr(kind, name, noting)


def begin_noting() -> None:
    """Notes from now on; called when a loop begins."""
    _watch()
    _scaled.clear()
    _unscaled.clear()


def forget_noted() -> None:
    """Begins a new step."""
    _clipped.clear()
    _scaled.clear()
    _unscaled.clear()


def is_any_clipped(parameters: Iterable[torch.Tensor]) -> bool:
    """True if gradients of these parameters were clipped in this step."""
    return bool(_clipped) and any(id(one) in _clipped for one in parameters)


def check_not_unscaled(optimizers: Iterable[Optimizer]) -> None:
    """Raises `Misuse` if gradients that are to be averaged were unscaled before: a scaler looks for overflow as it
    unscales, so that the ranks without one would step with the average, which is not finite, and the others not at all.
    """
    if any(one in _unscaled for one in optimizers):
        raise Misuse(
            "scaler.unscale_(optimizer) is called before trainer.average_gradients(), so that each rank finds only its "
            "own overflow, and the others step with gradients that are not finite: call it after that, before clipping"
        )


def check_unscaled(optimizer: Optimizer) -> None:
    """Raises `Misuse` if gradients of this step are scaled, and the optimizer is not Accelerate's, which unscales."""
    if _scaled and getattr(optimizer, "scaler", None) is None:
        raise Misuse(
            "a GradScaler has scaled the loss of this step, and trainer.step() neither unscales gradients nor leaves "
            "out a step whose gradients are not finite: call trainer.average_gradients(), scaler.step(optimizer), "
            "scaler.update() and trainer.finish_step() instead, in this order"
        )


def check_not_wrapped(model: nn.Module) -> None:
    """Raises `Misuse` if the loop has called the model through one: ranks then count alike, whatever their samples."""
    if _wrapping and any(one is model for wrapped in _wrapping for one in wrapped.modules()):
        raise Misuse(
            "the model is called through DistributedDataParallel, which averages gradients itself, with the same "
            "weight for each rank: call trainer.model instead, and leave DistributedDataParallel out"
        )
