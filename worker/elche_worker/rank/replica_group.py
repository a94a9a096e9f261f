"""The processes of one replica group among themselves: the leader's word, what they exchange, and how one that fails
tells why.

A group shares one model (`fully_shard`) and is one rank: its leader, at position 0, speaks with the coordinator, and
the others do what it tells them, in its order. They find each other through the coordinator's store, with the
leader's secret, and talk over loopback: a group lies on one host.
"""

import json
import os
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import grpc
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from elche_worker.collectives.operations import GroupFailed
from elche_worker.collectives.store import CoordinatorStore
from elche_worker.rank.acts import NUM_NUMBERS, Act, decode, encode
from elche_worker.session.launch import Launch

MEMBER_SEED = 7919
"""Between the random numbers of two processes of a group."""
PATIENCE = timedelta(days=365)
"""A member waits for the next act as long as the job does: it may be paused. If the leader ends, so does the member."""


class Members(Protocol):
    """A rank's processes. `Single` and `Meeting` are its forms."""

    position: int
    """0 leads."""
    size: int

    def tell(self, act: Act) -> None:
        """The leader tells the others what it is about to do itself."""
        ...

    def exchange(self, value: Any) -> list[Any]:
        """Every member's value (what JSON can hold), in order of position. All call it."""
        ...


class Single:
    """A rank of one process."""

    position, size = 0, 1

    def tell(self, act: Act) -> None:
        return

    def exchange(self, value: Any) -> list[Any]:
        return [value]


class Meeting:
    """The processes of a replica group. Making it waits until all are there; it makes torch's default process group."""

    def __init__(self, launch: Launch, channel: grpc.Channel) -> None:
        from elche_worker.collectives.world import World  # only groups need it

        self.position = launch.member
        self.size = launch.group_size
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback())
        backend = "cpu:gloo,cuda:nccl" if launch.device.startswith("cuda") else "gloo"
        self._store = CoordinatorStore(channel, launch.secret)  # torch calls this object, and does not keep it
        store = PrefixStore(f"members/{launch.rank}/{launch.incarnation}", self._store)
        dist.init_process_group(backend, store=store, rank=self.position, world_size=self.size)
        self._group: Any = dist.new_group(backend="gloo", timeout=PATIENCE)
        self._world = World(self._group, torch.device("cpu"))
        self.checkpoints: Any = dist.new_group(backend="gloo", timeout=PATIENCE)
        """A group of the same processes for the thread that writes checkpoints."""

    def tell(self, act: Act) -> None:
        numbers, raw = encode(act)
        dist.broadcast(numbers, group=self._group, group_src=0)
        if raw:
            dist.broadcast(torch.frombuffer(bytearray(raw), dtype=torch.uint8), group=self._group, group_src=0)

    def hear(self) -> Act:
        """The leader's next word; waits for it. Raises `GroupFailed` when the leader is gone."""
        numbers = torch.empty(NUM_NUMBERS, dtype=torch.int64)
        try:
            dist.broadcast(numbers, group=self._group, group_src=0)
        except RuntimeError:
            raise GroupFailed("the leader of the group has left") from None
        raw = torch.empty(int(numbers[-1]), dtype=torch.uint8)
        if raw.numel():
            dist.broadcast(raw, group=self._group, group_src=0)
        return decode(numbers, bytes(raw.tolist()))

    def exchange(self, value: Any) -> list[Any]:
        return [json.loads(text) for text in self._world.gather_texts(json.dumps(value))]


def tell_failure(launch: Launch, channel: grpc.Channel, failure: bytes) -> None:
    """A member has failed of something: the leader tells the coordinator."""
    CoordinatorStore(channel, launch.secret).set(_failed(launch), failure)


def hear_failure(launch: Launch, channel: grpc.Channel, take: Callable[[bytes], None]) -> None:
    """Calls `take`, on a thread of its own, with the first failure that a member tells."""

    def listen() -> None:
        store = CoordinatorStore(channel, launch.secret)
        while True:
            try:
                take(store.get(_failed(launch)))
                return
            except RuntimeError as error:
                is_not_in_time = isinstance(error.__cause__, grpc.Call) and error.__cause__.code() is NOT_IN_TIME
                if not is_not_in_time:
                    return  # the job has ended, or the coordinator

    threading.Thread(target=listen, name="members", daemon=True).start()


NOT_IN_TIME = grpc.StatusCode.FAILED_PRECONDITION
"""How the store answers when a key does not come."""


def _failed(launch: Launch) -> str:
    """Key of the store under which a member says what it has failed of."""
    return f"members/{launch.rank}/{launch.incarnation}/failed"


def _loopback() -> str:
    """The name of the loopback interface."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
