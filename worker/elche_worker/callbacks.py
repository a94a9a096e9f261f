"""What callbacks of a job get to see, and what happens when one raises."""

import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochMetrics:
    """One finished epoch, over all ranks."""

    epoch: int
    """From 0."""
    loss: float
    """Mean over batches."""
    scalars: dict[str, float]
    """Means of what `train_step` and `record_scalar` recorded."""
    metrics: dict[str, float]
    """Of the epoch's evaluation; empty without one."""
    duration_s: float
    samples: int
    samples_per_s: float
    rank_batches: tuple[int, ...] = ()
    """Batches that each rank made, in rank order."""


class Rank(Protocol):
    """One rank as its callbacks see it."""

    lr_factor: float
    """All learning rates are multiplied by it; may be set."""

    @property
    def model(self) -> nn.Module: ...
    @property
    def rank(self) -> int: ...
    @property
    def device(self) -> str: ...
    @property
    def local_step(self) -> int:
        """Batches that this rank has made."""
        ...

    @property
    def version(self) -> int:
        """Of the averaged model that it trains on."""
        ...

    @property
    def epoch(self) -> int: ...
    @property
    def lr(self) -> float:
        """Of the first parameter group, now."""
        ...


class Callbacks:
    """Calls a job's callbacks. What they raise is shown in the rank's log and counted; training goes on."""

    def __init__(self) -> None:
        self.num_errors = 0

    def call(self, function: Callable[..., Any] | None, *arguments: Any) -> None:
        """Calls it, if there is one."""
        if function is None:
            return
        try:
            function(*arguments)
        except Exception:
            self.num_errors += 1
            name = getattr(function, "__name__", type(function).__name__)
            print(f"the callback {name} raised, and training goes on:\n{traceback.format_exc()}", file=sys.stderr)
