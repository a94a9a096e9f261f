"""The CUDA streams of a rank: one computes, one communicates, one copies batches; events order them (W2).

On the CPU there is nothing to order: `HostStreams` does nothing.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn


class Streams(Protocol):
    """Where work is queued. `HostStreams` and `CudaStreams` implement it."""

    def compute(self) -> AbstractContextManager[Any]:
        """Context in which work is queued on the stream that computes."""
        ...

    def communication(self) -> AbstractContextManager[Any]:
        """Context in which work is queued on the stream that communicates."""
        ...

    def copies(self) -> AbstractContextManager[Any]:
        """Context in which work is queued on the stream that copies batches."""
        ...

    def hand_over(self) -> None:
        """Later communication begins after everything queued to compute."""
        ...

    def take_back(self, *tensors: torch.Tensor) -> None:
        """Later computation begins after everything queued to communicate, and may read the tensors."""
        ...

    def finish_compute(self) -> None:
        """Waits on the host for everything queued to compute."""
        ...

    def finish_communication(self) -> None:
        """Waits on the host for everything queued to communicate, and what was handed over before."""
        ...

    def communicated(self) -> Any:
        """An event after everything queued to communicate; None where nothing is queued."""
        ...

    def copied(self) -> Any:
        """An event after everything queued among the copies."""
        ...

    def receive(self, event: Any, *tensors: torch.Tensor) -> None:
        """Later work of the current stream begins after the event, and may use the tensors."""
        ...

    def finish_copies(self) -> None:
        """Waits on the host for everything queued among the copies."""
        ...


class HostStreams:
    """For the CPU: every call has finished when it returns."""

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

    def finish_communication(self) -> None:
        return

    def communicated(self) -> Any:
        return None

    def copied(self) -> Any:
        return None

    def receive(self, event: Any, *tensors: torch.Tensor) -> None:
        return

    def finish_copies(self) -> None:
        return


class CudaStreams:
    """Three streams, none of them the default stream, which would synchronise with all others."""

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

    def finish_communication(self) -> None:
        self._communication.synchronize()

    def communicated(self) -> Any:
        return self._communication.record_event()

    def copied(self) -> Any:
        return self._copies.record_event()

    def receive(self, event: Any, *tensors: torch.Tensor) -> None:
        current = torch.cuda.current_stream()
        current.wait_event(event)
        _lend(tensors, current)

    def finish_copies(self) -> None:
        self._copies.synchronize()


def _lend(tensors: Iterable[torch.Tensor], stream: Any) -> None:
    """Keeps the allocator from reusing the tensors' memory before the stream has used them."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(stream)


def new_streams(device: torch.device) -> Streams:
    """The streams for a device."""
    return CudaStreams(device) if device.type == "cuda" else HostStreams()


def pin_accumulators(model: nn.Module) -> list[object]:
    """The autograd nodes that accumulate gradients, bound to the current stream as long as the list lives (W1)."""
    nodes: list[object] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            function = parameter.expand_as(parameter).grad_fn
            assert function is not None
            nodes.append(function.next_functions[0][0])
    return nodes
