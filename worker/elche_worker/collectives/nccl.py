"""An NCCL communicator whose operations can be waited for and aborted without ending the process.

torch's process group is made for programs that end when a peer does. Differences, and why:

- It carries values only, after the ranks have exchanged the round's header over gloo. An NCCL kernel spins on the
  device until all ranks have entered, so no rank waits in one for a slower rank.
- Its communicator is made with the group, not at the first collective: nothing can abort its making, so no rank may be
  in a round when a peer dies meanwhile.
- `Work.wait` returns at once, when the operation is queued. Here an operation has ended when its result is there.
- An aborted operation ends without an error, with undefined values in its memory. So `abort` sets a flag that `run`
  reads.
- torch's watchdog would end this process when an operation takes long, or a peer is gone. `SETTINGS` disable that: the
  coordinator knows who is gone, and has the others abandon the group.
"""

import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, Work

from elche_worker.collectives.operations import CollectiveFailed
from elche_worker.device.faults import Cause, fault_of

SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # `NoHandling`: the watchdog ends nothing
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # the monitor would end the process while the watchdog waits for the driver
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # it reads a key without a prefix, which would stay for later groups
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",  # else an error of any kernel ends the process, before its traceback is sent
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "0",  # else a group stands before there is a communicator
}
"""Variables that torch reads when a group is made (ProcessGroupNCCL.cpp, torch 2.13)."""
PATIENCE = timedelta(days=365)
"""Practically no timeout: an operation takes as long as its ranks do, and the coordinator knows who is gone."""


def keep_survivors_alive() -> None:
    """Sets `SETTINGS` for this process, before it makes its first group."""
    os.environ.update(SETTINGS)


class Communicator:
    """Connects ranks with one device each. The constructor waits for all of them and raises torch's `RuntimeError`."""

    def __init__(self, store: Store, position: int, size: int, device: torch.device) -> None:
        nccl: Any = dist.ProcessGroupNCCL  # not in every build
        options = nccl.Options()
        options._timeout = PATIENCE
        self._device = device
        self._is_aborted = threading.Event()
        with torch.cuda.device(device):
            self._group: Any = nccl(store, position, size, options)
            self._group.eager_connect_single_device(device)

    def run(self, begin: Callable[[Any], list[Work]]) -> None:
        """Runs operations that `begin` queues on the group; returns when they have ended on the device. Raises
        `CollectiveFailed` when they failed or were aborted: their memory is undefined then. Raises torch's error of a
        broken device.
        """
        new_event: Any = torch.cuda.Event  # untyped
        try:
            with torch.cuda.device(self._device):
                for work in begin(self._group):
                    work.wait()
                ended = new_event(blocking=True)  # CUDA's default wait spins, which would take a core of the host
                ended.record()
                ended.synchronize()
        except RuntimeError as error:
            if fault_of(error) is Cause.DEVICE:
                raise  # this rank's own device is broken: no other rank failed, so this is not a `CollectiveFailed`
            raise CollectiveFailed(f"a collective failed: {error}") from error
        if self._is_aborted.is_set():
            raise CollectiveFailed("a collective was aborted: its group is abandoned")

    def abort(self) -> None:
        """Ends the running operation and all later ones. May block as long as the driver does."""
        self._is_aborted.set()
        self._group.abort()
