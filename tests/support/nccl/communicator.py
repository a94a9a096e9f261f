"""A communicator: the kernels queued on it run one after the other, and late; an abort ends them and leaves garbage."""

import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from support.late_streams import Latch, start_thread
from support.nccl import bootstrap, words

Plain = torch.Tensor
"""A tensor of the host in which a tensor of the simulated device has its values."""


@dataclass(slots=True)
class Pace:
    """When this process's kernels run."""

    may_run: Latch = field(default_factory=Latch)
    """Unless it is set, none does; where `kinds` says so, none of these kinds."""
    kinds: frozenset[str] = frozenset()
    delay_s: float = 0.0
    """What each takes."""
    held: list[str] = field(default_factory=list)
    """The kinds of the kernels that have waited since `hold`."""

    def hold(self, *kinds: str) -> None:
        self.kinds, self.held = frozenset(kinds), []
        self.may_run.clear()

    def wait(self, kind: str) -> None:
        if not self.kinds or kind in self.kinds:
            self.held.append(kind)  # by several threads, of which none may be missed
            self.may_run.wait()
        time.sleep(self.delay_s)


pace = Pace()
pace.may_run.set()


@dataclass(slots=True, kw_only=True)
class Kernel:
    """One collective on the device. `compute` returns what is to be written where."""

    kind: str
    compute: Callable[[Any], list[tuple[Plain, Plain]]]
    outputs: Sequence[Plain]
    seed: int
    scratch: Sequence[Plain] = ()
    """Outputs that are not inputs: a kernel writes into them as soon as it runs."""
    after: Sequence[Latch] = ()
    """What is queued before it on its stream."""
    ended: Latch = field(default_factory=Latch)
    """Its end event has come."""

    def begin(self) -> None:
        for output in self.scratch:
            poison(output, self.seed)


class Communicator:
    """`NCCLComm`."""

    def __init__(self, unique_id: bytes, rank: int, size: int) -> None:
        """Waits for all ranks. Raises `DistBackendError`."""
        self.rank = rank
        self.is_aborted = False
        self._gloo = bootstrap.init_rank(unique_id, rank, size)
        self._lock = threading.Lock()
        self._queued: queue.SimpleQueue[Kernel | None] = queue.SimpleQueue()
        self._running: list[Kernel] = []
        _alive.add(self)
        start_thread(self._run, ())

    def check(self) -> None:
        """`NCCLComm::getNcclComm`: raises where it was aborted. An aborted one stays in the group's map
        (`PG::abortCommsFromMap` says why), so that each later collective comes here.
        """
        if self.is_aborted:
            raise dist.DistBackendError(words.aborted(self.rank))

    def launch(self, kernel: Kernel) -> None:
        if not kernel.after:
            kernel.begin()
        with self._lock:
            self._running.append(kernel)
        self._queued.put(kernel)

    def abort(self) -> None:
        """`NCCLComm::abort`, that is `ncclCommAbort`: kernels end where they are, and their end events come. Nothing
        tells of it, neither here nor on other ranks, and what they were to write is what it happens to be.
        """
        with self._lock:
            self.is_aborted = True
            for kernel in self._running:
                for output in kernel.outputs:
                    poison(output, kernel.seed)
                kernel.ended.set()
            self._running.clear()
        self._queued.put(None)

    def finish(self) -> None:
        """`NCCLComm::finalize` of a blocking communicator: returns when all kernels have ended."""
        with self._lock:
            running = list(self._running)
        for kernel in running:
            kernel.ended.wait()

    def _run(self) -> None:
        while (kernel := self._queued.get()) is not None and not self.is_aborted:
            for before in kernel.after:
                before.wait()
            if kernel.after:
                kernel.begin()
            pace.wait(kernel.kind)
            try:
                values = kernel.compute(self._gloo)
            except RuntimeError:
                return  # a peer has gone, and the kernel spins until it is aborted, as do those behind it
            self._end(kernel, values)

    def _end(self, kernel: Kernel, values: list[tuple[Plain, Plain]]) -> None:
        with self._lock:
            if self.is_aborted:
                return
            for output, value in values:
                output.copy_(value)
            self._running.remove(kernel)
            kernel.ended.set()


_alive: weakref.WeakSet[Communicator] = weakref.WeakSet()
"""All of this process."""


def wait_until_idle() -> None:
    """Returns when none of this process's kernels runs that runs now."""
    for communicator in list(_alive):
        communicator.finish()


def poison(tensor: Plain, seed: int) -> None:
    """Arbitrary bits; where these are numbers of floating point, NaN in every other place."""
    with _disable_current_modes():  # it is the device that does this, whichever thread it is
        random = torch.Generator().manual_seed(seed)
        bits = torch.randint(0, 256, (tensor.nbytes,), generator=random, dtype=torch.uint8)
        values = bits.view(tensor.dtype).clone() if tensor.dtype is not torch.bool else bits > 127
        if tensor.is_floating_point():
            values[::2] = float("nan")
        tensor.copy_(values.view(tensor.shape))
