"""The streams of one rank's device: one computes, one communicates, and each waits for the other by events (SPEC W2).

On a device that computes while the host waits, there is nothing to order: `HostStreams` does nothing.
"""

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

    def hand_over(self) -> None:
        """What communicates from now on begins after what has been queued to compute."""
        ...

    def take_back(self, *tensors: torch.Tensor) -> None:
        """What computes from now on begins after what has been queued to communicate, and may read the tensors."""
        ...

    def finish_compute(self) -> None:
        """The host waits for what has been queued to compute."""
        ...


class HostStreams:
    """For the CPU: everything is done when its call returns."""

    def compute(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def communication(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def hand_over(self) -> None:
        return

    def take_back(self, *tensors: torch.Tensor) -> None:
        return

    def finish_compute(self) -> None:
        return


class CudaStreams:
    """Two streams, neither of them the default one, which would wait for all others."""

    def __init__(self, device: torch.device) -> None:
        new: Any = torch.cuda.Stream  # untyped
        self._compute = new(device)
        self._communication = new(device)

    def compute(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._compute)

    def communication(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._communication)

    def hand_over(self) -> None:
        self._communication.wait_stream(self._compute)

    def take_back(self, *tensors: torch.Tensor) -> None:
        self._compute.wait_stream(self._communication)
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(self._compute)

    def finish_compute(self) -> None:
        self._compute.synchronize()


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
