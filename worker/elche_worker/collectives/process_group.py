"""Collectives among the ranks themselves: over gloo in the host's memory, and over NCCL in that of the GPUs.

Ranks that average over NCCL also have a gloo group for values on the host, such as a round's header. They wait for each
other there, where a wait takes no device time and can be ended.
"""

import json
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, Store, Work

from elche.errors import InvalidJob
from elche_worker.collectives.nccl import PATIENCE, Communicator
from elche_worker.collectives.operations import CollectiveFailed, Collectives
from elche_worker.collectives.sockets import Address, ShutConnections, listening
from elche_worker.device.chunks import chunks
from elche_worker.device.faults import is_out_of_memory
from elche_worker.device.kinds import kind_of
from elche_worker.model.layout import CPU
from elche_worker.process.interfaces import listening_address

JOIN_TIMEOUT = timedelta(minutes=5)
"""Time in which all ranks of a group must connect."""
ATTEMPTS = 5
"""Tries to make gloo's device when something else in the process began to listen at the same moment."""
_new_device = threading.Lock()
"""Held while a gloo device is made: its socket is the one that listens afterwards and did not before."""


class ProcessGroupCollectives(Collectives):
    """Collectives on torch's process groups. `finish` does nothing: if any rank has the result, those without it can
    get it from that one in a later generation (protocol P18.2).
    """

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
        self.device = device if backend == "nccl" else CPU
        store = PrefixStore(f"{attempt}/{generation}/{member}", store)
        self._own: Address | None = None
        """Address on which gloo accepts this group's connections, and no other connections; None before it listens."""
        self._others: set[Address] = set()
        """The same of the other ranks."""
        self._shut = ShutConnections()
        try:
            self._on_host = self._new_gloo(PrefixStore("gloo", store), listening_address(peer, interface))
            self._on_device = (
                Communicator(PrefixStore("nccl", store), position, size, device) if backend == "nccl" else None
            )
        except (RuntimeError, OSError, InvalidJob) as error:
            if backend == "nccl" and is_out_of_memory(error):
                with torch.cuda.device(device):  # NCCL allocates by itself: the next attempt finds what was only cached
                    kind_of(device).empty_cache()
            raise CollectiveFailed(
                f"the ranks could not meet: {error}. Where ranks cannot reach each other, backend='cpu' averages "
                "through the coordinator"
            ) from error

    def all_gather(self, row: torch.Tensor) -> list[torch.Tensor]:
        self.sent_bytes += row.nbytes * (self.size - 1)
        rows = [torch.empty_like(row) for _ in range(self.size)]
        self._run(row, lambda group: [group.allgather([rows], [row])])
        return rows

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self.sent_bytes += 2 * tensor.nbytes * (self.size - 1) // self.size
        self._run(tensor, lambda group: [group.allreduce([part]) for part in self._parts(tensor)])

    def all_to_all(self, rows: torch.Tensor) -> torch.Tensor:
        self.sent_bytes += rows.nbytes * (self.size - 1) // self.size
        received, sent = torch.empty_like(rows), rows.contiguous()
        # Without sizes both tensors are cut into equal parts.
        self._run(rows, lambda group: [group.alltoall_base(received, sent, [], [])])
        return received

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        self.sent_bytes += tensor.nbytes if source == self.position else 0
        options = dist.BroadcastOptions()
        options.rootRank = source
        options.rootTensor = 0
        self._run(tensor, lambda group: [group.broadcast([part], options) for part in self._parts(tensor)])

    def _parts(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """The operands of a collective. A tensor on the device is cut into chunks: another rank may keep its values on
        the host and have one chunk at a time on its device, and all ranks must call with the same sizes.
        """
        return chunks(tensor) if self._is_there(tensor) else [tensor]

    def _is_there(self, tensor: torch.Tensor) -> bool:
        return self._on_device is not None and tensor.device.type != "cpu"

    def _run(self, tensor: torch.Tensor, begin: Callable[[Any], list[Work]]) -> None:
        """Runs an operation where its tensor is. Raises `CollectiveFailed`."""
        if self._on_device is not None and self._is_there(tensor):
            self._on_device.run(begin)
            return
        try:
            for work in begin(self._on_host):
                work.wait()
        except RuntimeError as error:
            raise CollectiveFailed(f"a collective failed: {error}") from error

    def abort(self) -> None:
        """Shuts this rank's gloo connections, which ends its operation within some 10 ms (gloo's own abort ends none),
        then aborts NCCL's communicator. Every rank must do so: the other ends are not woken.
        """
        # gloo first: NCCL's abort may block for as long as its driver does.
        if self._own is not None:
            self._shut.add({self._own}, self._others)
        if self._on_device is not None:
            self._on_device.abort()

    def _new_gloo(self, store: Store, host: str) -> Any:
        gloo: Any = ProcessGroupGloo  # its stub lacks most of it
        options = gloo._Options()
        device, self._own = _listening_device(host)
        options._devices = [device]
        options._timeout = JOIN_TIMEOUT
        store.set(f"listens/{self.position}", json.dumps(self._own))
        group = gloo(store, self.position, self.size, options)
        group._set_default_timeout(PATIENCE)  # from here on the coordinator decides who is gone, not a time limit
        for position in range(self.size):  # all were published before the group stood
            if position != self.position:
                host, port = json.loads(store.get(f"listens/{position}"))
                self._others.add((host, port))
        return group


def _listening_device(host: str) -> tuple[Any, Address]:
    """A new gloo device, and its address, which gloo does not tell: the process's new listening socket."""
    gloo: Any = ProcessGroupGloo
    for _ in range(ATTEMPTS):
        with _new_device:
            before = listening()
            device = gloo.create_device(hostname=host, lazy_init=False)
            new = [address for address in listening() - before if address[0] == host.partition("%")[0]]
        if len(new) == 1:
            return device, new[0]
    raise RuntimeError(f"gloo's listening socket on {host} cannot be told from others of this process: {new}")
