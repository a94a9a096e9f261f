"""Losses that a GradScaler scales in a loop: their gradients are to be unscaled before an optimizer uses them."""

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any
from weakref import WeakSet

from torch.amp import GradScaler
from torch.optim import Optimizer

from elche.errors import Misuse

_scaled: "WeakSet[GradScaler]" = WeakSet()
"""Those that have scaled a loss since the latest step."""
_unscaled: "WeakSet[Optimizer]" = WeakSet()
"""Those whose gradients were unscaled since the latest step."""


def _noting(method: Callable[..., Any], note: Callable[[GradScaler, Any], None]) -> Callable[..., Any]:
    """The method of a scaler, which notes each call of one that is enabled."""

    @wraps(method)
    def noted(self: GradScaler, given: Any) -> Any:
        if self.is_enabled():
            note(self, given)
        return method(self, given)

    return noted


def watch_scalers() -> None:
    """Notes from now on which scalers scale losses and unscale gradients. PyTorch has no hook for that."""
    forget_scaled()
    if not hasattr(GradScaler.scale, "__wrapped__"):
        scale = _noting(GradScaler.scale, lambda scaler, _: _scaled.add(scaler))
        GradScaler.scale = scale  # type: ignore[method-assign]
        unscale = _noting(GradScaler.unscale_, lambda _, optimizer: _unscaled.add(optimizer))
        GradScaler.unscale_ = unscale  # type: ignore[method-assign]


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


def forget_scaled() -> None:
    """Begins a new step."""
    _scaled.clear()
    _unscaled.clear()
