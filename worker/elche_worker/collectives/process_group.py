"""Collectives among the ranks themselves: over gloo in the host's memory, or over NCCL in that of the GPUs."""

import json
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, Store, Work

from elche.errors import InvalidJob
from elche_worker.collectives.operations import CollectiveFailed
from elche_worker.collectives.sockets import Address, listening, shut_connections
from elche_worker.process.interfaces import listening_address

JOIN_TIMEOUT = timedelta(minutes=5)
ATTEMPTS = 5
"""How often gloo's device is made anew when something else in the process began to listen at the same moment."""
_new_device = threading.Lock()


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
        interface: str = "",
    ) -> None:
        """`member` is the process's position in its replica group; processes of equal position are connected.
        gloo listens on this host's address of the interface, or on the route to `peer`; NCCL chooses by itself.
        """
        self.position = position
        self.size = size
        self.attempt = attempt
        self.generation = generation
        self._is_nccl = backend == "nccl"
        self.device = device if self._is_nccl else torch.device("cpu")
        self.sent_bytes = 0
        """Payload sent so far, assuming ring algorithms."""
        store = PrefixStore(f"{attempt}/{generation}/{member}", store)
        self._own: Address | None = None
        """Where gloo accepts the connections of this group, and no others."""
        self._others: set[Address] = set()
        """The same of the other ranks."""
        try:
            here = "" if self._is_nccl else listening_address(peer, interface)
            self._group = self._new_nccl(store) if self._is_nccl else self._new_gloo(store, here)
        except (RuntimeError, InvalidJob) as error:
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

    def abort(self) -> None:
        """Over gloo, shuts the group's own connections, which ends the own operation within some 10 ms; gloo's abort
        ends none. Each rank shuts its own: one that waits for another pair of ranks is not woken.

        Over NCCL, aborts the communicator. That this ends an operation that waits for a rank which is gone has not
        been tried on several GPUs.
        """
        if self._is_nccl:
            self._group.abort()
        elif self._own is not None:
            shut_connections({self._own}, self._others)

    def _new_gloo(self, store: Store, host: str) -> Any:
        gloo: Any = ProcessGroupGloo  # its stub lacks most of it
        options = gloo._Options()
        device, self._own = _listening_device(host)
        options._devices = [device]
        options._timeout = JOIN_TIMEOUT
        store.set(f"listens/{self.position}", json.dumps(self._own))
        group = gloo(store, self.position, self.size, options)
        for position in range(self.size):  # all have said so before the group stood
            if position != self.position:
                host, port = json.loads(store.get(f"listens/{position}"))
                self._others.add((host, port))
        return group

    def _new_nccl(self, store: Store) -> Any:
        nccl: Any = dist.ProcessGroupNCCL  # not in every build
        options = nccl.Options()
        options._timeout = JOIN_TIMEOUT
        with torch.cuda.device(self.device):
            return nccl(store, self.position, self.size, options)


def _listening_device(host: str) -> tuple[Any, Address]:
    """A new device of gloo, and where it listens, which gloo does not say."""
    gloo: Any = ProcessGroupGloo
    for _ in range(ATTEMPTS):
        with _new_device:
            before = listening()
            device = gloo.create_device(hostname=host, lazy_init=False)
            new = [address for address in listening() - before if address[0] == host.partition("%")[0]]
        if len(new) == 1:
            return device, new[0]
    raise RuntimeError(f"gloo's listening socket on {host} cannot be told from others of this process: {new}")


def _finish(work: Work) -> None:
    """Waits for the operation; with NCCL only the current stream waits."""
    try:
        work.wait()
    except RuntimeError as error:
        raise CollectiveFailed(f"a collective failed: {error}") from error
