"""How the ranks of a communicator meet: the unique id, and `ncclCommInitRank`.

As in NCCL, rank 0 says in the id, which PyTorch hands to the others through its store, where ranks find each other; all
else goes past that store. With NCCL that is an address (`bootstrapCreateRoot`), here a file of this host.
"""

import json
import socket
import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from support.nccl import words

UNIQUE_ID_BYTES = 128
"""`NCCL_UNIQUE_ID_BYTES`."""
NO_BOUND = timedelta(days=365)
HOST = "127.0.0.1"


def own_card(rank: int) -> str:
    """The GPU of this process, by its address on the bus (`busId` of `ncclPeerInfo`)."""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


card_of: Callable[[int], str] = own_card
"""The GPU of a rank. Tests whose ranks are threads of one process give each another."""


def new_unique_id() -> bytes:
    """`ncclGetUniqueId`, which rank 0 calls."""
    return tempfile.mktemp(prefix="nccl-").encode().ljust(UNIQUE_ID_BYTES, b"\0")


def init_rank(unique_id: bytes, rank: int, size: int) -> Any:
    """`ncclCommInitRank`: waits, without bound and whoever aborts what, until all ranks have called it.

    `NCCLComm::create` has no handle before it returns, and `PG::initNCCLComm` puts the communicator among those that
    `PG::abortComms` knows only after that: nothing ends this wait. Returns gloo's group, over which the values go.
    """
    new_root: Any = dist.FileStore  # type: ignore[attr-defined]
    root: Store = new_root(unique_id.rstrip(b"\0").decode(), size)
    root.set_timeout(NO_BOUND)
    root.set(f"peer/{rank}", json.dumps([socket.gethostname(), card_of(rank)]))
    peers = [json.loads(root.get(f"peer/{peer}")) for peer in range(size)]
    _check_cards(rank, peers)
    return _new_gloo(PrefixStore("gloo", root), rank, size)


def _check_cards(rank: int, peers: list[list[str]]) -> None:
    """`initTransportsRank` of init.cc: no two ranks on one GPU of one host."""
    for other, peer in enumerate(peers):
        if other != rank and peer == peers[rank]:
            raise dist.DistBackendError(words.duplicate(rank, other, peer[1]))


def _new_gloo(store: Any, rank: int, size: int) -> Any:
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=HOST, lazy_init=False)]
    options._timeout = NO_BOUND
    return gloo(store, rank, size, options)
