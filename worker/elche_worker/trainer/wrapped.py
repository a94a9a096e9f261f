"""Models that a loop calls through DistributedDataParallel, which averages their gradients before the Trainer does."""

from collections.abc import Callable
from functools import wraps
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elche.errors import Misuse

_called: "WeakSet[DistributedDataParallel]" = WeakSet()
"""Those that were called with gradients."""


def watch_wrapped() -> None:
    """Notes from now on which are called. A loop may build one before or after `Trainer.setup`, of the same module."""
    if not hasattr(DistributedDataParallel.forward, "_notes_called"):
        DistributedDataParallel.forward = _noting(DistributedDataParallel.forward)  # type: ignore[method-assign]


def check_not_wrapped(model: nn.Module) -> None:
    """Raises `Misuse` if the loop has called the model through one: ranks then count alike, whatever their samples."""
    if _called and any(one is model for wrapped in _called for one in wrapped.modules()):
        raise Misuse(
            "the model is called through DistributedDataParallel, which averages gradients itself, with the same "
            "weight for each rank: call trainer.model instead, and leave DistributedDataParallel out"
        )


def _noting(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def noted(self: DistributedDataParallel, *inputs: Any, **named: Any) -> Any:
        if torch.is_grad_enabled():
            _called.add(self)
        return forward(self, *inputs, **named)

    noted._notes_called = True  # type: ignore[attr-defined]
    return noted
