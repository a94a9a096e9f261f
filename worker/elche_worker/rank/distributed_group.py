"""A rank of several processes, which share one model (`fully_shard`); when one ends, all end.

The leader, at position 0, has the session with the coordinator; the others carry out its acts in order. The processes
meet through the coordinator's store, with the leader's secret, and connect over loopback, since a group is on one host.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, Any

import grpc
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from elche_worker.collectives.operations import CollectiveFailed
from elche_worker.collectives.reduction import AverageResult
from elche_worker.collectives.store import NOT_IN_TIME, CoordinatorStore
from elche_worker.collectives.world import World
from elche_worker.data.lease_loader import LoadedBatch
from elche_worker.model.layout import Layout
from elche_worker.model.norms import of_parts
from elche_worker.rank.acts import Act, decode, encode
from elche_worker.rank.replica_group import ReplicaGroup, T
from elche_worker.session.launch import Launch
from elche_worker.sharding.mesh import build_mesh
from elche_worker.telemetry.meter import RoundWork
from elche_worker.user.schedule import LearningRates
from elche_worker.user.strategy import Strategy

if TYPE_CHECKING:
    from elche_worker.rank.pieces import Pieces

PATIENCE = timedelta(days=365)
"""Practically no timeout: a follower waits for the next act as long as the job lasts, even while it is paused. If the
leader ends, the connection is closed, which ends the wait.
"""
HEADER_BYTES = 4
"""Length of the act that follows, as a little-endian integer."""
FRAME_BYTES = 512
"""Bytes of the first broadcast of an act, header included; longer acts need a second one."""


class DistributedGroup(ReplicaGroup):
    """Several processes, connected by gloo, torch's default group. The constructor waits for all processes.

    Raises `CollectiveFailed` when they cannot connect, such as when the coordinator, whose store they need, is away.
    """

    def __init__(self, launch: Launch, channel: grpc.Channel, strategy: Strategy) -> None:
        self.position = launch.member
        self.size = launch.group_size
        self._num_shards = strategy.num_shards(self.size)
        self._norm: float | None = None
        """Parameter norm of the whole model at the last round."""
        self._launch = launch
        self._num_abandoned = 0
        """Generations that the others were told to abandon."""
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback())
        backend = "cpu:gloo,cuda:nccl" if launch.device.startswith("cuda") else "gloo"
        self._store = CoordinatorStore(channel, launch.secret)  # torch calls this object but holds no reference to it
        store = PrefixStore(_place(launch), self._store)
        try:
            dist.init_process_group(backend, store=store, rank=self.position, world_size=self.size)
            # A group for each thread that calls collectives: gloo matches calls by their order, and the order in which
            # threads call differs between processes.
            self._acts: Any = dist.new_group(backend="gloo", timeout=PATIENCE)
            self._world = World(self._acts, torch.device("cpu"))
            self._checkpoints: Any = dist.new_group(backend="gloo", timeout=PATIENCE)
            """The same processes, for the thread that writes checkpoints."""
            self._results: Any = dist.new_group(backend="gloo", timeout=PATIENCE)
            """The same processes, for the thread that averages."""
        except RuntimeError as error:
            raise CollectiveFailed(f"the processes of the rank could not meet: {error}") from error

    def send(self, act: Act) -> None:
        raw = encode(act)
        message = bytearray(len(raw).to_bytes(HEADER_BYTES, "little") + raw)
        message += bytes(max(0, FRAME_BYTES - len(message)))
        frame = torch.frombuffer(message, dtype=torch.uint8)
        dist.broadcast(frame[:FRAME_BYTES], group=self._acts, group_src=0)
        if len(message) > FRAME_BYTES:
            dist.broadcast(frame[FRAME_BYTES:], group=self._acts, group_src=0)

    def abandon(self, generation: int) -> None:
        self._num_abandoned += 1
        given = self._store.set, _abandoned(self._launch, self._num_abandoned), str(generation).encode()
        # On a thread: the session's, on which this is called, must not wait for an answer of the coordinator.
        threading.Thread(target=_repeated, args=given, name="abandon", daemon=True).start()

    def receive(self) -> Act:
        """Waits for the leader's next act and returns it. Raises `CollectiveFailed` when the leader has ended."""
        frame = torch.empty(FRAME_BYTES, dtype=torch.uint8)
        try:
            dist.broadcast(frame, group=self._acts, group_src=0)
        except RuntimeError:
            raise CollectiveFailed("the leader of the group has left") from None
        message = frame.numpy().tobytes()
        length = int.from_bytes(message[:HEADER_BYTES], "little")
        missing = torch.empty(max(0, HEADER_BYTES + length - FRAME_BYTES), dtype=torch.uint8)
        if missing.numel():
            dist.broadcast(missing, group=self._acts, group_src=0)
            message += missing.numpy().tobytes()
        return decode(message[HEADER_BYTES : HEADER_BYTES + length])

    def exchange(self, value: Any) -> list[Any]:
        return [json.loads(text) for text in self._world.gather_texts(json.dumps(value))]

    def agree(self, holds: bool) -> bool:
        answer = torch.tensor(int(holds))
        dist.all_reduce(answer, dist.ReduceOp.MIN, group=self._results)
        return bool(answer)

    def train(self, run: Callable[..., T], data: Any, batch: LoadedBatch) -> T:
        # `fully_shard` takes the mean over the K processes. Therefore a loss over n of the batch's N samples is
        # weighted by K n / N: the mean is then the whole batch's gradient.
        weight = self.size * batch.own_size / batch.size
        return run(data, max(1, batch.own_size), weight=weight, max_parts=max(1, batch.size // self.size))

    def share_learning_rates(self, rates: LearningRates) -> None:
        rates.restore(self.exchange(rates.to_json())[0])

    @torch.no_grad()
    def share_buffers(self, layout: Layout) -> None:
        """Averages the buffers, as each process saw other samples; copies the leader's where that is impossible."""
        buffers = [entry for entry in layout.entries if not entry.is_trained]
        averaged = [entry.tensor for entry in buffers if entry.kind != "broadcast"]
        if averaged:
            flat = torch.cat([one.reshape(-1).double() for one in averaged])
            dist.all_reduce(flat)
            parts = torch.split(flat.div_(self.size), [one.numel() for one in averaged])
            for one, part in zip(averaged, parts, strict=True):
                one.copy_(part.view(one.shape))
        for entry in buffers:
            if entry.kind == "broadcast":
                raw = entry.tensor.contiguous().reshape(-1).view(torch.uint8)
                dist.broadcast(raw, src=0)
                entry.tensor.copy_(raw.view(entry.dtype).view(entry.shape))

    def combine(
        self, averaged: AverageResult, digest: int | None, work: RoundWork, norm: float | None
    ) -> tuple[AverageResult, int | None]:
        """Returns only when all processes have the round's result."""
        part = [] if self.is_leader else work.part()
        told = self.exchange([averaged.distance, digest, part, averaged.sent_bytes, norm])
        distances, digests, parts, sent_bytes, norms = zip(*told, strict=True)
        self._norm = of_parts(norms, num_copies=self.size // self._num_shards)
        if self.is_leader:
            for one in parts:
                work.add_part(one)
        if averaged.distance is not None:
            # squares of norms add up over the parts of the model
            changed, size = (sum(one[at] ** 2 for one in distances) ** 0.5 for at in (0, 1))
            averaged = replace(averaged, distance=(changed, size))
        if None in digests:  # a process for which digests cost more has computed none
            digest = None
        else:
            # Odd factors that differ by position: the digest changes if two processes' parts are exchanged.
            digest = sum((2 * at + 1) * one for at, one in enumerate(digests)) % 2**64
        return replace(averaged, sent_bytes=sum(sent_bytes)), digest

    def parameter_norm(self, own: float | None) -> float | None:
        return self._norm

    def new_pieces(self) -> "Pieces | None":
        from elche_worker.rank.pieces import Pieces  # imported late: it takes as long as torch itself

        return Pieces(self._checkpoints, build_mesh(self._checkpoints, self._num_shards, "cpu"))


def report_failure(launch: Launch, channel: grpc.Channel, failure: bytes) -> None:
    """Writes this process's failure into the coordinator's store, where the leader waits for it."""
    CoordinatorStore(channel, launch.secret).set(_failed(launch), failure)


def await_failure(launch: Launch, channel: grpc.Channel, take: Callable[[bytes], None]) -> None:
    """Calls `take`, on a thread of its own, with the first failure that a process of the group reports."""

    def listen() -> None:
        if (failure := _repeated(CoordinatorStore(channel, launch.secret).get, _failed(launch))) is not None:
            take(failure)

    threading.Thread(target=listen, name="members", daemon=True).start()


def await_abandoned(launch: Launch, channel: grpc.Channel, take: Callable[[int], None]) -> None:
    """Calls `take`, on a thread of its own, with each generation that the leader is to abandon."""

    def listen() -> None:
        store = CoordinatorStore(channel, launch.secret)
        for number in count(1):
            if (generation := _repeated(store.get, _abandoned(launch, number))) is None:
                return
            take(int(generation))

    threading.Thread(target=listen, name="abandoned", daemon=True).start()


def _repeated(call: Callable[..., T], *arguments: Any) -> T | None:
    """Repeats a call of the store while the coordinator is away, or no key is set; None if the job has ended."""
    while True:
        try:
            return call(*arguments)
        except RuntimeError as error:
            code = error.__cause__.code() if isinstance(error.__cause__, grpc.Call) else None
            if code not in (grpc.StatusCode.UNAVAILABLE, NOT_IN_TIME):
                return None
            time.sleep(AWAY_S)


AWAY_S = 0.5
"""Seconds between two such calls."""


def _failed(launch: Launch) -> str:
    """Key of the store under which a process reports its failure."""
    return f"{_place(launch)}/failed"


def _abandoned(launch: Launch, number: int) -> str:
    """Key under which the store has the generation that the leader's order `number`, from 1, abandons."""
    return f"{_place(launch)}/abandoned/{number}"


def _place(launch: Launch) -> str:
    """Prefix of all keys of this start of the rank's processes."""
    return f"members/{launch.rank}/{launch.incarnation}"


def _loopback() -> str:
    """The name of the loopback interface."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
