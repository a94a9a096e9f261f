"""The streams of one rank's device: one computes, one communicates, one brings batches; they wait for each other by
events (SPEC W2).

On a device that computes while the host waits, there is nothing to order: `HostStreams` does nothing.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn


class Streams(Protocol):
    """Where work is queued. `HostStreams` and `CudaStreams` are its two forms."""

    def compute(self) -> AbstractContextManager[Any]:
        """What is queued inside runs in order with the training."""
        ...

    def communication(self) -> AbstractContextManager[Any]:
        """What is queued inside runs beside the training."""
        ...

    def copies(self) -> AbstractContextManager[Any]:
        """What is queued inside runs beside both."""
        ...

    def hand_over(self) -> None:
        """What communicates from now on begins after what has been queued to compute."""
        ...

    def take_back(self, *tensors: torch.Tensor) -> None:
        """What computes from now on begins after what has been queued to communicate, and may read the tensors."""
        ...

    def finish_compute(self) -> None:
        """The host waits for what has been queued to compute."""
        ...

    def copied(self) -> Any:
        """An event: what has been queued among the copies is done."""
        ...

    def receive(self, event: Any, *tensors: torch.Tensor) -> None:
        """What the current stream does from now on begins after the event, and may use the tensors."""
        ...

    def finish_copies(self) -> None:
        """The host waits for what has been queued among the copies."""
        ...


class HostStreams:
    """For the CPU: everything is done when its call returns."""

    def compute(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def communication(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def copies(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def hand_over(self) -> None:
        return

    def take_back(self, *tensors: torch.Tensor) -> None:
        return

    def finish_compute(self) -> None:
        return

    def copied(self) -> Any:
        return None

    def receive(self, event: Any, *tensors: torch.Tensor) -> None:
        return

    def finish_copies(self) -> None:
        return


class CudaStreams:
    """Three streams, none of them the default one, which would wait for all others."""

    def __init__(self, device: torch.device) -> None:
        new: Any = torch.cuda.Stream  # untyped
        self._compute = new(device)
        self._communication = new(device)
        self._copies = new(device)

    def compute(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._compute)

    def communication(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._communication)

    def copies(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._copies)

    def hand_over(self) -> None:
        self._communication.wait_stream(self._compute)

    def take_back(self, *tensors: torch.Tensor) -> None:
        self._compute.wait_stream(self._communication)
        _lend(tensors, self._compute)

    def finish_compute(self) -> None:
        self._compute.synchronize()

    def copied(self) -> Any:
        return self._copies.record_event()

    def receive(self, event: Any, *tensors: torch.Tensor) -> None:
        current = torch.cuda.current_stream()
        current.wait_event(event)
        _lend(tensors, current)

    def finish_copies(self) -> None:
        self._copies.synchronize()


def _lend(tensors: Iterable[torch.Tensor], stream: Any) -> None:
    """Their memory is not given to others before the stream has come past what it has been given by then."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(stream)


def new_streams(device: torch.device) -> Streams:
    """The streams for a device."""
    return CudaStreams(device) if device.type == "cuda" else HostStreams()


def pin_accumulators(model: nn.Module) -> list[object]:
    """The nodes that add up gradients, bound to the current stream as long as the list lives (SPEC W1)."""
    nodes: list[object] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            function = parameter.expand_as(parameter).grad_fn
            assert function is not None
            nodes.append(function.next_functions[0][0])
    return nodes
