"""Prefetches batches to the device, as many as fit into its memory (W10)."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import TensorDataset

from elche_worker.device.faults import is_out_of_memory
from elche_worker.device.streams import DeviceStreams
from elche_worker.device.transfer import num_bytes, tensors_in, to_device

HOST = torch.device("cpu")
MAX_DEPTH = 512
"""Most batches that are prefetched to the device, however small they are."""
USABLE_FRACTION = 0.9
"""Fraction of the device's memory that training and prefetched batches may use together. The rest is for the
allocator's fragmentation, and for libraries that allocate by themselves.
"""
RESIDENT_FRACTION = 0.25
"""Fraction of the device's free memory that a whole data set may use to be kept there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """The part of a device's memory that this process's allocator may use, in bytes."""

    free: int
    """Bytes that no process uses, and that the allocator may still reserve."""
    total: int
    """The device's memory, or less with a limit (`elche-worker --share`, `set_per_process_memory_fraction`)."""
    reserved: int
    """Bytes reserved by this process's allocator, in use or not."""
    allocated: int
    """Bytes allocated by this process's tensors."""
    peak: int
    """Most bytes allocated so far."""

    @classmethod
    def of(cls, device: torch.device) -> "DeviceMemory":
        """The present memory of a CUDA device. Does not synchronise."""
        (free, total), reserved = torch.cuda.mem_get_info(device), torch.cuda.memory_reserved(device)
        fraction: float = torch.cuda.get_per_process_memory_fraction(device)
        limit = int(total * fraction)
        return cls(
            free=max(0, min(free, limit - reserved)),
            total=limit,
            reserved=reserved,
            allocated=torch.cuda.memory_allocated(device),
            peak=torch.cuda.max_memory_allocated(device),
        )


def spare_bytes(memory: DeviceMemory, *, activation_bytes: int, waiting_bytes: int) -> int:
    """Bytes of the device's memory that training leaves at its peak; prefetched batches count as free."""
    spare = memory.free + memory.reserved - memory.allocated - (1 - USABLE_FRACTION) * memory.total
    return int(spare) + waiting_bytes - activation_bytes


def prefetch_depth(
    memory: DeviceMemory,
    *,
    activation_bytes: int | None,
    waiting_bytes: int,
    batch_bytes: int,
    set_aside_bytes: int = 0,
) -> int:
    """Number of batches that may wait on the device besides training's peak and `set_aside_bytes`; 0 before the peak is
    measured. `waiting_bytes` is the size of those that wait there now.
    """
    if activation_bytes is None or batch_bytes <= 0:
        return 0
    spare = spare_bytes(memory, activation_bytes=activation_bytes, waiting_bytes=waiting_bytes)
    return max(0, min(MAX_DEPTH, (spare - set_aside_bytes) // batch_bytes))


class Resident(TensorDataset):
    """A `TensorDataset` on the device: its tensors are copied again when the script has changed or replaced them, such
    as labels between two epochs.
    """

    def __init__(
        self, source: TensorDataset, copies_of: Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, ...]]
    ) -> None:
        self._source = source
        self._copies_of = copies_of
        self._copied: list[tuple[torch.Tensor, int]] = []
        """The tensors of which there are copies, and their version counters when they were copied."""
        self._copies: tuple[torch.Tensor, ...] = ()

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:  # type: ignore[override]  # the base class stores them
        """The copies, of the tensors as they are now."""
        now = [(one, 0 if one.is_inference() else one._version) for one in self._source.tensors]
        if len(now) != len(self._copied) or any(
            one is not other or version != copied
            for (one, version), (other, copied) in zip(now, self._copied, strict=True)
        ):
            self._copies = ()
            self._copies, self._copied = self._copies_of(self._source.tensors), now
        return self._copies


class DeviceTransfer:
    """Moves fetched batches to the device. This one is for devices to which they are copied when trained."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.set_aside_bytes = 0
        """Bytes of the device's memory that batches leave free for rounds, where there is that much."""
        self.spare_bytes: int | None = None
        """Bytes that training left free at the last `plan`; None before that is measured."""

    @property
    def room(self) -> int | None:
        """Number of further batches that may wait on the device; None when batches wait in host memory."""
        return None

    def stream(self) -> AbstractContextManager[Any]:
        """Context in which the fetching thread runs."""
        return nullcontext()

    def place(self, dataset: Any) -> Any:
        """The data set, on the device if it fits."""
        return dataset

    def move(self, data: Any) -> tuple[Any, Any]:
        """Returns the batch, on the device if there is room, and the event after which its copy is complete, if any."""
        return data, None

    def receive(self, data: Any, event: Any) -> Any:
        """The batch, on the device, usable by the stream that computes."""
        return to_device(data, self._device)

    def take_back(self, batches: list[tuple[Any, Any]]) -> list[Any]:
        """Moves batches that wait on the device, given with their events, to host memory, and lowers the depth. Called
        by the thread that receives.
        """
        return [data for data, _ in batches]

    def plan(self) -> None:
        """Called between batches when more are to come: measures training's memory, and adapts the depth."""


class CudaTransfer(DeviceTransfer):
    """Transfer for CUDA: copies on a separate stream while the device computes. Prefetches nothing until training's
    peak memory is measured.

    One thread moves and another receives; each writes only its own counters, so that no lock is needed.
    """

    def __init__(self, device: torch.device, streams: DeviceStreams) -> None:
        super().__init__(device)
        self._streams = streams
        self._depth = 0
        """Most batches that may wait on the device now."""
        self._max_depth = MAX_DEPTH
        """Most batches on the device; lowered after memory has run out."""
        self._activation_bytes: int | None = None
        """Most bytes that training has used in addition to tensors that stay; None before that is measured."""
        self._batch_bytes = 0
        """Size of the largest batch."""
        self._num_moved = self._num_received = 0
        self._moved_bytes = self._received_bytes = 0
        self._most_waiting_bytes = 0
        """Most bytes of batches that have waited so far: the measured peak may include them."""
        self._has_trained = False
        """True if a batch was trained since the last `plan`."""

    @property
    def room(self) -> int | None:
        return self._depth - (self._num_moved - self._num_received) if self._depth else None

    def stream(self) -> AbstractContextManager[Any]:
        return self._streams.copies()

    def place(self, dataset: Any) -> Any:
        if type(dataset) is not TensorDataset:
            return dataset
        if num_bytes(dataset.tensors) > RESIDENT_FRACTION * DeviceMemory.of(self._device).free:
            return dataset
        return Resident(dataset, self._copies_of)

    def _copies_of(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        self._streams.finish_compute()  # which may still read earlier copies, whose memory is used again
        with self.stream():
            copies = tuple(tensor.to(self._device) for tensor in tensors)
        self._streams.finish_copies()
        return copies

    def move(self, data: Any) -> tuple[Any, Any]:
        size_bytes = num_bytes(data)
        self._batch_bytes = max(self._batch_bytes, size_bytes)
        # a batch of a data set on the device takes its memory in any case
        is_there = any(tensor.is_cuda for tensor in tensors_in(data))
        if not is_there and (self.room or 0) <= 0:
            return data, None
        try:
            moved = to_device(data, self._device)
        except RuntimeError as error:
            if is_there or not is_out_of_memory(error):
                raise
            self._lower_depth(self._num_moved - self._num_received)  # another process may have taken memory
            return data, None
        self._num_moved += 1
        self._moved_bytes += size_bytes
        self._most_waiting_bytes = max(self._most_waiting_bytes, self._moved_bytes - self._received_bytes)
        return moved, self._streams.copied()

    def receive(self, data: Any, event: Any) -> Any:
        self._has_trained = True
        if event is None:
            return to_device(data, self._device)
        self._num_received += 1
        self._received_bytes += num_bytes(data)
        self._streams.receive(event, *tensors_in(data))
        return data

    def take_back(self, batches: list[tuple[Any, Any]]) -> list[Any]:
        self._lower_depth(len(batches))
        on_host = [to_device(self.receive(data, event), HOST) for data, event in batches]
        # `to_device` copies asynchronously: these batches would be read before they are complete.
        self._streams.finish_compute()
        return on_host

    def _lower_depth(self, num_waiting: int) -> None:
        """After memory has run out: half as many as wait now, and none until `plan` has measured what is free."""
        self._max_depth, self._depth = num_waiting // 2, 0

    def plan(self) -> None:
        memory, waiting_bytes = DeviceMemory.of(self._device), self._moved_bytes - self._received_bytes
        if self._has_trained:
            # The peak beyond what stays allocated between batches is what a step needs: activations, gradients, and the
            # optimizer's scratch memory. Batches that waited at the peak may be in it, and are no part of training.
            staying_bytes = memory.allocated - waiting_bytes
            needed_bytes = memory.peak - staying_bytes - self._most_waiting_bytes - self._batch_bytes
            self._activation_bytes = max(self._activation_bytes or 0, needed_bytes)
            self._has_trained = False
        if self._activation_bytes is not None:
            self.spare_bytes = spare_bytes(memory, activation_bytes=self._activation_bytes, waiting_bytes=waiting_bytes)
            if self.spare_bytes < self.set_aside_bytes:
                self.set_aside_bytes = 0
        depth = prefetch_depth(
            memory,
            activation_bytes=self._activation_bytes,
            waiting_bytes=waiting_bytes,
            batch_bytes=self._batch_bytes,
            set_aside_bytes=self.set_aside_bytes,
        )
        self._depth = min(depth, self._max_depth)


def new_transfer(device: torch.device, streams: DeviceStreams) -> DeviceTransfer:
    """The transfer for a device."""
    return CudaTransfer(device, streams) if device.type == "cuda" else DeviceTransfer(device)
