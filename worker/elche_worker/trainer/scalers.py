"""Losses that a GradScaler scales in a loop: their gradients are to be unscaled before an optimizer uses them."""

from collections.abc import Callable
from functools import wraps
from typing import Any
from weakref import WeakSet

from torch.amp import GradScaler
from torch.optim import Optimizer

from elche.errors import Misuse

_scaled: "WeakSet[GradScaler]" = WeakSet()
"""Those that have scaled a loss since the latest step."""


def _noting(scale: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(scale)
    def noted(self: GradScaler, outputs: Any) -> Any:
        if self.is_enabled():
            _scaled.add(self)
        return scale(self, outputs)

    return noted


def watch_scalers() -> None:
    """Notes from now on which scalers scale losses. PyTorch has no hook for that."""
    forget_scaled()
    if not hasattr(GradScaler.scale, "__wrapped__"):
        GradScaler.scale = _noting(GradScaler.scale)  # type: ignore[method-assign]


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
