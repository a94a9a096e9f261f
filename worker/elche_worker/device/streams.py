"""The CUDA streams of a rank, one each for computing, communicating and copying batches; events order them (W2)."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn


class DeviceStreams:
    """The queues of a rank's device. This one is for the CPU, where a call returns when all is done."""

    def compute(self) -> AbstractContextManager[Any]:
        """Context of the computing stream."""
        return nullcontext()

    def communication(self) -> AbstractContextManager[Any]:
        """Context of the communicating stream."""
        return nullcontext()

    def copies(self) -> AbstractContextManager[Any]:
        """Context of the stream that copies batches."""
        return nullcontext()

    def hand_over(self) -> None:
        """Has later communication wait for all queued computation."""

    def take_back(self, *tensors: torch.Tensor) -> None:
        """Has later computation wait for all queued communication, after which it may read the tensors."""

    def finish_compute(self) -> None:
        """Waits on the host for all queued computation."""

    def finish_communication(self) -> None:
        """Waits on the host for all queued communication, and the computation that was handed over before it."""

    def computed(self) -> Any:
        """An event after all queued computation, on which the host may wait; None on the CPU."""
        return None

    def communicated(self) -> Any:
        """An event after all queued communication; None on the CPU."""
        return None

    def copied(self) -> Any:
        """An event after all queued copies; None on the CPU."""
        return None

    def receive(self, event: Any, *tensors: torch.Tensor) -> None:
        """Has later work of the current stream wait for the event, after which it may use the tensors."""

    def finish_copies(self) -> None:
        """Waits on the host for all queued copies."""


class CudaStreams(DeviceStreams):
    """Three streams, none of them the default stream, which would synchronise with all others."""

    def __init__(self, device: torch.device) -> None:
        new: Any = torch.cuda.Stream  # untyped
        self._compute = new(device)
        self._communication = new(device)
        self._copies = new(device)
        # What the user's file has queued, such as tensors that it makes on the device when it is imported.
        self._compute.wait_stream(torch.cuda.current_stream(device))

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

    def computed(self) -> Any:
        new_event: Any = torch.cuda.Event  # untyped
        return self._compute.record_event(new_event(blocking=True))  # CUDA's default wait spins, which takes a core

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


def new_streams(device: torch.device) -> DeviceStreams:
    """The streams for a device."""
    return CudaStreams(device) if device.type == "cuda" else DeviceStreams()


def pin_accumulators(model: nn.Module) -> list[object]:
    """Creates the autograd nodes that accumulate gradients, on the current stream, and returns them (W1). Autograd
    makes a node at the first backward pass otherwise, on whatever stream is current then, and synchronises with that
    stream in every pass. The nodes must be kept alive: autograd itself holds weak references.
    """
    nodes: list[object] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            function = parameter.expand_as(parameter).grad_fn
            assert function is not None
            nodes.append(function.next_functions[0][0])
    return nodes
