"""Requests of operators to a loop (pause, checkpoint, end), brought to all ranks at the same step.

They reach ranks at different moments. Each rank adds its own to the last bucket of gradients; when the sums have left
the device, all ranks read the same ones and act after the same step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

NUM_MARKS = 4
"""Numbers that travel behind the requests: a one in the place that follows from the rank's batches and optimizer. Ranks
that have parted have ones in several places, in any dtype and whatever their number."""
REQUEST_DELAY_STEPS = 2
"""Steps between a request and what all ranks do about it: by then it has left the device without a synchronisation."""


@dataclass(frozen=True, slots=True)
class Requests:
    """What at least one rank asks for, and all do after the same step."""

    cancel: bool = False
    checkpoint: bool = False
    pause: bool = False
    parted: bool = False
    """True if ranks have taken another number of batches than others, or stepped another optimizer."""


class RequestConsensus:
    """Takes in each step's requests, summed over all ranks, and returns them `REQUEST_DELAY_STEPS` later."""

    NUM_REQUESTS = 3

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
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._coming.append((copied, event))

    def take(self) -> Requests:
        """The requests that are due after this step."""
        if len(self._coming) <= REQUEST_DELAY_STEPS:
            return Requests()
        sums, event = self._coming.pop(0)
        if event is not None:
            event.synchronize()
        told = sums.tolist()
        cancel, checkpoint, pause = (bool(one) for one in told[: self.NUM_REQUESTS])
        return Requests(cancel=cancel, checkpoint=checkpoint, pause=pause, parted=have_parted(told))


def mark(num_batches: int, optimizer: int) -> list[float]:
    """This rank's place, by the batches that it has taken and the number of the optimizer that it steps."""
    place = (num_batches + 2 * optimizer) % NUM_MARKS
    return [float(place == one) for one in range(NUM_MARKS)]


def have_parted(sums: Sequence[float]) -> bool:
    """True if sums of requests and marks are of ranks that have parted."""
    return sum(bool(one) for one in sums[RequestConsensus.NUM_REQUESTS :]) > 1


class Cancelled(SystemExit):
    """The loop was cancelled at the coordinator. Raised by `step` on every rank; ends the script unless caught."""


def failure_of(error: BaseException | None) -> BaseException | None:
    """The error that a script ended with; None for its cancellation and for a regular exit."""
    if isinstance(error, Cancelled) or (isinstance(error, SystemExit) and not error.code):
        return None
    return error
