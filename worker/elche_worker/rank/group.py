"""The process group of one generation, and collectives that can be waited for without being stuck in them."""

import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, Store, Work

JOIN_TIMEOUT = timedelta(minutes=5)

Wait = Callable[[threading.Event], None]
"""Waits for an event, or raises when there is a reason to leave."""


class GroupFailed(Exception):
    """A collective did not finish: a peer is gone, or cannot be reached."""


class Group:
    """Ranks that average together, over gloo. `sent_bytes` counts what this rank sends."""

    def __init__(self, store: Store, *, attempt: int, generation: int, position: int, size: int, peer: str) -> None:
        self.position = position
        self.size = size
        self.attempt = attempt
        self.generation = generation
        self.sent_bytes = 0
        """Payload sent so far, for the usual ring algorithms."""
        self._group = None if size == 1 else _new_group(store, f"{attempt}/{generation}", position, size, peer)

    def all_gather(self, row: torch.Tensor, wait: Wait) -> list[torch.Tensor]:
        """Every member's row, in order of position. Raises `GroupFailed`."""
        if self._group is None:
            return [row]
        self.sent_bytes += row.nbytes * (self.size - 1)
        rows = [torch.empty_like(row) for _ in range(self.size)]
        _finish(self._group.allgather([rows], [row]), wait)
        return rows

    def all_reduce(self, tensor: torch.Tensor, wait: Wait) -> None:
        """Sums the tensor over all members, in place. Raises `GroupFailed`."""
        if self._group is not None:
            self.sent_bytes += 2 * tensor.nbytes * (self.size - 1) // self.size
            _finish(self._group.allreduce([tensor]), wait)

    def all_to_all(self, rows: torch.Tensor, wait: Wait) -> torch.Tensor:
        """Sends row i to position i; returns the rows that came, in order of position. Raises `GroupFailed`."""
        if self._group is None:
            return rows
        self.sent_bytes += rows.nbytes * (self.size - 1) // self.size
        received = torch.empty_like(rows)
        _finish(self._group.alltoall_base(received, rows.contiguous(), [], []), wait)
        return received

    def broadcast(self, tensor: torch.Tensor, source: int, wait: Wait) -> None:
        """Copies the tensor from the source's position to all, in place. Raises `GroupFailed`."""
        if self._group is None:
            return
        self.sent_bytes += tensor.nbytes if source == self.position else 0
        options = dist.BroadcastOptions()
        options.rootRank = source
        options.rootTensor = 0
        _finish(self._group.broadcast([tensor], options), wait)


def _new_group(store: Store, prefix: str, position: int, size: int, peer: str) -> Any:
    gloo: Any = ProcessGroupGloo  # its stub lacks most of it
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=_own_address(peer), lazy_init=False)]
    options._timeout = JOIN_TIMEOUT
    try:
        return gloo(PrefixStore(prefix, store), position, size, options)
    except RuntimeError as error:
        raise GroupFailed(f"the ranks could not meet: {error}") from error


def _finish(work: Work, wait: Wait) -> None:
    """Waits on an event that the work sets, so that the waiter can also leave for other reasons."""
    done = threading.Event()
    work.get_future().add_done_callback(lambda _: done.set())
    wait(done)
    try:
        work.wait()
    except RuntimeError as error:
        raise GroupFailed(f"a collective failed: {error}") from error


def _own_address(peer: str) -> str:
    """This host's address on the way to the coordinator. Nothing is sent."""
    host, _, port = peer.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))
        return str(probe.getsockname()[0])
