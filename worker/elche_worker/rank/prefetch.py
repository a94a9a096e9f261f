"""Batches on the device before they are needed, as many as its memory has room for (SPEC W10)."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch.utils.data import TensorDataset

from elche_worker.rank.transfer import num_bytes, tensors_in, to_device

MAX_DEPTH = 512
USABLE_FRACTION = 0.9
"""Of the device's memory that training and prefetched batches may have together."""
RESIDENT_FRACTION = 0.25
"""Of the device's free memory that a whole data set may take to be kept there."""


def prefetch_depth(*, usable_bytes: float, peak_bytes: int | None, batch_bytes: int) -> int:
    """Batches that fit beside what training needs at its peak; none before that is measured."""
    if peak_bytes is None or batch_bytes <= 0:
        return 0
    return max(0, min(MAX_DEPTH, int((usable_bytes - peak_bytes) // batch_bytes)))


class Mover(Protocol):
    """Brings fetched batches to where they are trained. `HostMover` and `DeviceMover` are its forms."""

    def stream(self) -> AbstractContextManager[Any]:
        """What the fetching thread runs in."""
        ...

    def place(self, dataset: Any) -> Any:
        """The data set, on the device where it fits."""
        ...

    def move(self, data: Any, num_waiting: int) -> tuple[Any, Any]:
        """A batch, on the device if there is room beside those that wait, and an event that it waits for, if any."""
        ...

    def receive(self, data: Any, event: Any) -> Any:
        """The batch, on the device, for the stream that computes."""
        ...

    def measure(self) -> None:
        """Training has run for a while: what it needs is known."""
        ...


class HostMover:
    """For a device that computes in the host's memory, or gets its batches when it needs them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stream(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def place(self, dataset: Any) -> Any:
        return dataset

    def move(self, data: Any, num_waiting: int) -> tuple[Any, Any]:
        return data, None

    def receive(self, data: Any, event: Any) -> Any:
        return to_device(data, self._device)

    def measure(self) -> None:
        return


class DeviceMover:
    """For CUDA: copies on a stream of its own, while the device computes. Nothing is prefetched before the peak of
    training is measured.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        new_stream: Any = torch.cuda.Stream  # untyped
        self._stream = new_stream(device)
        self._peak_bytes: int | None = None

    def stream(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream)

    def place(self, dataset: Any) -> Any:
        if type(dataset) is not TensorDataset:
            return dataset
        free_bytes, _ = torch.cuda.mem_get_info(self._device)
        if num_bytes(dataset.tensors) > RESIDENT_FRACTION * free_bytes:
            return dataset
        with self.stream():
            placed = TensorDataset(*(tensor.to(self._device) for tensor in dataset.tensors))
        self._stream.synchronize()
        return placed

    def move(self, data: Any, num_waiting: int) -> tuple[Any, Any]:
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        own_bytes = torch.cuda.memory_reserved(self._device)
        usable_bytes = min(USABLE_FRACTION * total_bytes, free_bytes + own_bytes)
        depth = prefetch_depth(usable_bytes=usable_bytes, peak_bytes=self._peak_bytes, batch_bytes=num_bytes(data))
        is_there = any(tensor.is_cuda for tensor in tensors_in(data))
        if num_waiting >= depth and not is_there:
            return data, None
        new_event: Any = torch.cuda.Event  # untyped
        event = new_event()
        moved = to_device(data, self._device)
        event.record(self._stream)
        return moved, event

    def receive(self, data: Any, event: Any) -> Any:
        if event is None:
            return to_device(data, self._device)
        compute = torch.cuda.current_stream(self._device)
        compute.wait_event(event)
        for tensor in tensors_in(data):
            if tensor.is_cuda:
                tensor.record_stream(compute)
        return data

    def measure(self) -> None:
        if self._peak_bytes is None:
            self._peak_bytes = torch.cuda.max_memory_allocated(self._device)


def new_mover(device: torch.device) -> Mover:
    """The mover for a device."""
    return DeviceMover(device) if device.type == "cuda" else HostMover(device)
