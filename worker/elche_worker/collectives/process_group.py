"""Collectives among the ranks themselves: over gloo in the host's memory, or over NCCL in that of the GPUs."""

import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, Store, Work

from elche_worker.collectives.operations import CollectiveFailed

JOIN_TIMEOUT = timedelta(minutes=5)


class ProcessGroupCollectives:
    """Collectives on a torch process group. `finish` does nothing: one rank with the result is enough."""

    def __init__(
        self,
        store: Store,
        *,
        backend: str,
        attempt: int,
        generation: int,
        position: int,
        size: int,
        peer: str,
        device: torch.device,
        member: int = 0,
    ) -> None:
        """`member` is the process's position in its replica group; processes of equal position are connected."""
        self.position = position
        self.size = size
        self.attempt = attempt
        self.generation = generation
        self._is_nccl = backend == "nccl"
        self.device = device if self._is_nccl else torch.device("cpu")
        self.sent_bytes = 0
        """Payload sent so far, assuming ring algorithms."""
        store = PrefixStore(f"{attempt}/{generation}/{member}", store)
        try:
            new = _new_nccl if self._is_nccl else _new_gloo
            self._group = new(store, position, size, peer)
        except RuntimeError as error:
            raise CollectiveFailed(
                f"the ranks could not meet: {error}. Where ranks cannot reach each other, backend='cpu' averages "
                "through the coordinator"
            ) from error

    def begin(self, round_id: int) -> None:
        return

    def all_gather(self, row: torch.Tensor) -> list[torch.Tensor]:
        self.sent_bytes += row.nbytes * (self.size - 1)
        row = row.to(self.device)
        rows = [torch.empty_like(row) for _ in range(self.size)]
        _finish(self._group.allgather([rows], [row]))
        return rows

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self.sent_bytes += 2 * tensor.nbytes * (self.size - 1) // self.size
        _finish(self._group.allreduce([tensor]))

    def all_to_all(self, rows: torch.Tensor) -> torch.Tensor:
        self.sent_bytes += rows.nbytes * (self.size - 1) // self.size
        received = torch.empty_like(rows)
        _finish(self._group.alltoall_base(received, rows.contiguous(), [], []))
        return received

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        self.sent_bytes += tensor.nbytes if source == self.position else 0
        options = dist.BroadcastOptions()
        options.rootRank = source
        options.rootTensor = 0
        _finish(self._group.broadcast([tensor], options))

    def finish(self) -> None:
        return

    def abort(self) -> bool:
        if self._is_nccl:
            self._group.abort()
        return self._is_nccl  # gloo's abort ends nothing; nor does the device wait for gloo


def _new_gloo(store: Store, position: int, size: int, peer: str) -> Any:
    gloo: Any = ProcessGroupGloo  # its stub lacks most of it
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=_own_address(peer), lazy_init=False)]
    options._timeout = JOIN_TIMEOUT
    return gloo(store, position, size, options)


def _new_nccl(store: Store, position: int, size: int, peer: str) -> Any:
    nccl: Any = dist.ProcessGroupNCCL  # not in every build
    options = nccl.Options()
    options._timeout = JOIN_TIMEOUT
    return nccl(store, position, size, options)


def _finish(work: Work) -> None:
    """Waits for the operation; with NCCL only the current stream waits."""
    try:
        work.wait()
    except RuntimeError as error:
        raise CollectiveFailed(f"a collective failed: {error}") from error


def _own_address(peer: str) -> str:
    """This host's address on the route to the coordinator. Sends nothing."""
    host, _, port = peer.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))
        return str(probe.getsockname()[0])
