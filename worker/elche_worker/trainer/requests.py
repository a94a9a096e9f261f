"""Consensus on operators' requests to a loop (pause, checkpoint, end), so that all ranks act after the same step.

Requests reach ranks at different moments. Each rank adds its own to the last bucket of gradients; when the sums have
left the device, all ranks read the same ones and act after the same step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

NUM_MARKS = 4
"""Numbers that are summed behind the requests: a rank has a 1 at the index that follows from its batches and optimizer.
If more than one sum is not 0, ranks differ; this holds in any dtype and for any number of ranks."""
REQUEST_DELAY_STEPS = 2
"""Steps between a request and the ranks' action: by then its sum has left the device without a synchronisation."""


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests of at least one rank, on which all act after the same step."""

    cancel: bool = False
    checkpoint: bool = False
    pause: bool = False
    compare: bool = False
    """True if the script has saved a checkpoint, so that the ranks' models are to be compared."""
    calls_differ: bool = False
    """True if ranks differ in the number of batches taken, or in the optimizer stepped."""


class RequestConsensus:
    """Takes in each step's requests, summed over all ranks, and returns them `REQUEST_DELAY_STEPS` later."""

    NUM_REQUESTS = 4

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._coming: list[tuple[torch.Tensor, Any]] = []

    def put(self, sums: torch.Tensor) -> None:
        """Adds the requests of a step, summed over all ranks."""
        if not (self._is_cuda and sums.is_cuda):
            self._coming.append((sums, None))
            return
        copied = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
        copied.copy_(sums, non_blocking=True)
        new_event: Any = torch.cuda.Event  # untyped
        event = new_event(blocking=True)  # else a wait for it would spin, which takes a core
        event.record()
        self._coming.append((copied, event))

    def take(self) -> Requests:
        """Removes and returns the requests that are due after this step."""
        if len(self._coming) <= REQUEST_DELAY_STEPS:
            return Requests()
        sums, event = self._coming.pop(0)
        if event is not None:
            event.synchronize()
        values = sums.tolist()
        cancel, checkpoint, pause, compare = (bool(one) for one in values[: self.NUM_REQUESTS])
        return Requests(
            cancel=cancel, checkpoint=checkpoint, pause=pause, compare=compare, calls_differ=marks_differ(values)
        )


def mark(num_batches: int, optimizer: int) -> list[float]:
    """This rank's mark: a 1 at the index given by its number of batches and of the optimizer that it steps."""
    place = (num_batches + 2 * optimizer) % NUM_MARKS
    return [float(place == one) for one in range(NUM_MARKS)]


def marks_differ(sums: Sequence[float]) -> bool:
    """True if the summed marks, which follow the requests, show that ranks differ."""
    return sum(bool(one) for one in sums[RequestConsensus.NUM_REQUESTS :]) > 1


class Cancelled(SystemExit):
    """The loop was cancelled at the coordinator. Raised by `step` on every rank; ends the script unless caught."""


def failure_of(error: BaseException | None) -> BaseException | None:
    """The error with which a script ended; None if it was cancelled or exited regularly."""
    if isinstance(error, Cancelled) or (isinstance(error, SystemExit) and not error.code):
        return None
    return error
