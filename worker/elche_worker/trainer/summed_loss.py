"""Finds losses that are a sum over a rank's part of a batch, divided by the samples of the whole batch.

On one device that is the mean. Of a part it is less, and since ranks' gradients are weighted by their samples once
more, the average is too short: with two equal ranks half of what one device has.
"""

from collections.abc import Iterator
from functools import wraps
from typing import Any

import torch

from elche.output import notice

WATCHED = 3
"""Backward passes that are looked at: who divides so does it each time."""
MAX_NODES = 6
"""Most operations before the end of the loss that are looked at."""
SUM = 2
"""`reduction="sum"` in what autograd keeps of a loss function (torch.nn._reduction.get_enum)."""


class SummedLoss:
    """Looks at the graph of the first losses of a loop whose ranks divide batches, and says once what it finds."""

    def __init__(self, *, tells: bool) -> None:
        self._num_left = WATCHED if tells else 0
        self._part, self._whole = 0, 0
        self._original: Any = None
        """The `Tensor.backward` of before, while it is replaced."""
        self._looking: Any = None
        """What replaces it."""

    def begin_batch(self, part: int, whole: int) -> None:
        """Called with the samples of this rank's part and of the whole batch that are given out."""
        self._part, self._whole = part, whole
        if self._num_left and self._original is None:
            original: Any = torch.Tensor.backward

            @wraps(original)
            def looking(loss: torch.Tensor, *given: Any, **named: Any) -> Any:
                if self._num_left > 0:
                    self._look(loss)
                return original(loss, *given, **named)

            self._original, self._looking = original, looking
            torch.Tensor.backward = looking  # type: ignore[method-assign, assignment]

    def close(self) -> None:
        """Puts the function of before back, unless another loop has replaced this one: it then only passes calls on."""
        self._num_left = 0
        if self._looking is not None and torch.Tensor.backward is self._looking:
            torch.Tensor.backward = self._original  # type: ignore[method-assign]

    def _look(self, loss: torch.Tensor) -> None:
        self._num_left -= 1
        divisors: list[float] = []
        for node in _nodes(loss.grad_fn):
            if node.name() == "DivBackward0":
                divisors += _number(getattr(node, "_saved_other", None))
            elif node.name() == "SumBackward0" or getattr(node, "_saved_reduction", None) == SUM:
                if self._whole in divisors and 0 < self._part < self._whole:
                    self._num_left = 0
                    notice(
                        f"the loss is a sum over this rank's {self._part} samples, divided by {self._whole}, the whole "
                        "batch: the average of the ranks' gradients is then too short. Divide by the samples of the "
                        "part (batch.size), or take the mean"
                    )
                break
        if not self._num_left:
            self.close()


def _number(saved: Any) -> list[float]:
    """The number by which an operation divides; none of a tensor on a device, for which the host would wait."""
    is_number = isinstance(saved, torch.Tensor) and saved.numel() == 1 and saved.device.type == "cpu"
    return [float(saved)] if is_number else []


def _nodes(node: Any) -> Iterator[Any]:
    """The last operations of a graph, from its end."""
    for _ in range(MAX_NODES):
        if node is None:
            return
        yield node
        node = node.next_functions[0][0] if node.next_functions else None
