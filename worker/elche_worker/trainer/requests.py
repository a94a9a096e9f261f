"""Requests of operators to a loop (pause, checkpoint, end), brought to all ranks at the same step.

They reach ranks at different moments. Each rank adds its own to the last bucket of gradients; when the sums have left
the device, all ranks read the same ones and act after the same step.
"""

from dataclasses import dataclass
from typing import Any

import torch

REQUEST_DELAY_STEPS = 2
"""Steps between a request and what all ranks do about it: by then it has left the device without a synchronisation."""


@dataclass(frozen=True, slots=True)
class Requests:
    """What at least one rank asks for, and all do after the same step."""

    cancel: bool = False
    checkpoint: bool = False
    pause: bool = False


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
        return Requests(*(bool(one) for one in sums.tolist()))


class Cancelled(SystemExit):
    """The loop was cancelled at the coordinator. Raised by `step` on every rank; ends the script unless caught."""


def failure_of(error: BaseException | None) -> BaseException | None:
    """The error that a script ended with; None for its cancellation and for a regular exit."""
    if isinstance(error, Cancelled) or (isinstance(error, SystemExit) and not error.code):
        return None
    return error
