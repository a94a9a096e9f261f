"""Ranks of one job that speak the real protocol and train by letting time pass; one process plays all of them.

Each has a connection of its own, its own speed, leases, targets and reports, as a rank of elche has. The averaging is
made up: it begins when the last rank has entered, and lasts a given time.
"""

import asyncio
import random
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from functools import wraps
from math import inf
from typing import Any

import grpc

from elche.header import header_digest
from elche.network import CHANNEL_OPTIONS
from elche.ready import ready_message
from elche.settings import AgreedSettings
from elche.v1 import agent_pb2, agent_pb2_grpc, rank_pb2

Metadata = tuple[tuple[str, str], ...]
Converse = Callable[[Metadata, AsyncIterator[bytes]], AsyncIterator[rank_pb2.ConverseResponse]]
"""Opens a rank's session by its metadata: its messages go in, the coordinator's come out."""

CONVERSE = "/elche.v1.RankService/Converse"
REPORT_EVERY_S, PER_RANK_S, MAX_BATCHES = 0.05, 0.001, 4
"""Between two progress reports, as of `elche_worker.session.report_times`, which needs no torch here."""
WARM_ROUNDS = 3
CONNECTING = 50
"""Ranks that connect at once."""
PASSING = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL)
"""Status codes after which the coordinator may come back; `grpc.aio` gives the second for a connection that it lost
within its own calls.
"""
RETRY_S, MAX_RETRY_S = 0.05, 1.0
"""First and longest pause between two attempts to connect again, as of `elche_worker.session.outbound`."""


@dataclass(slots=True, kw_only=True)
class Course:
    """How ranks train: seconds per batch by rank, its jitter, and how long an averaging takes."""

    batch_s: list[float]
    jitter: float
    sync_s: float
    batch_size: int
    overlaps: bool


@dataclass(slots=True)
class Figures:
    """What is counted while the ranks train."""

    trained_s: float = 0.0
    played_s: float = 0.0
    """Processor time that the ranks have taken."""
    batches: int = 0
    sent: dict[str, int] = field(default_factory=dict)
    received: dict[str, int] = field(default_factory=dict)
    sent_bytes: int = 0
    announced_s: list[float] = field(default_factory=list)
    """Of each round, from the last rank's result to the last rank's `SyncNow` of the next one."""
    announced_cpu_s: list[float] = field(default_factory=list)
    """The same in processor time of this process without the ranks' own: of a coordinator in it."""

    def reset(self) -> None:
        """Counts from now on."""
        self.__init__()  # type: ignore[misc]


def played(method: Callable[..., None]) -> Callable[..., None]:
    """Counts the processor time of the method as that of the ranks."""

    @wraps(method)
    def timed(self: Any, *arguments: Any) -> None:
        began_s = time.thread_time()
        method(self, *arguments)
        self.figures.played_s += time.thread_time() - began_s

    return timed


class World:
    """What the ranks have in common: who has entered, and the header of the rounds."""

    def __init__(self, course: Course, settings: AgreedSettings) -> None:
        self.course = course
        self.settings = settings
        self.num_ranks = len(course.batch_s)
        self.figures = Figures()
        self.committed = 0
        """Rounds whose result all have said to have."""
        self.is_warm = asyncio.Event()
        """Set once three rounds are committed."""
        self.has_committed = asyncio.Event()
        """Set with each committed round."""
        self.is_over = asyncio.Event()
        self.random = random.Random(0)
        self.is_complete = asyncio.Event()
        """Set once all ranks are connected."""
        self.is_announced = asyncio.Event()
        """Set once all ranks have heard of a round that nobody had heard of before `forget`."""
        self.playing: dict[int, tuple[agent_pb2.StartRank, asyncio.Task[None]]] = {}
        """The ranks that run, by number."""
        self.exits: asyncio.Queue[agent_pb2.AttendRequest] = asyncio.Queue()
        """Of killed ranks, to be told by their agent."""
        self._num_exited = 0
        self._connected: set[int] = set()
        self._known = 0
        self._formed: dict[int, list[PlayedRank]] = {}
        """By generation, the members that are ready to meet."""
        self._sizes: dict[int, int] = {}
        """Members by generation."""
        self._broken: set[int] = set()
        """Generations of which a member has died, or that are abandoned: none of their averagings ends."""
        self._entered: dict[int, list[tuple[int, PlayedRank, rank_pb2.HeaderRow]]] = {}
        self._committed_s = inf
        self._committed_cpu_s = 0.0
        self._announced = 0
        self._num_announced = 0

    def form(self, command: rank_pb2.FormGroup, rank: "PlayedRank") -> None:
        """A rank is ready to meet the others; the group stands when all are."""
        self._sizes[command.generation] = command.world_size
        formed = self._formed.setdefault(command.generation, [])
        formed.append(rank)
        if len(formed) == command.world_size:
            for one in self._formed.pop(command.generation):
                one.say("group_ready", rank_pb2.GroupReady(generation=command.generation))

    def kill(self, number: int) -> None:
        """A rank's process ends, and its agent says so."""
        start, task = self.playing.pop(number)
        task.cancel()
        self._connected.discard(number)
        for generation in self._sizes:
            self.break_off(generation)
        exited = agent_pb2.RankExited(
            job_id=start.job_id, rank=start.rank, incarnation=start.incarnation, exit_code=-signal.SIGKILL
        )
        self._num_exited += 1
        self.exits.put_nowait(agent_pb2.AttendRequest(rank_exited=exited, seq=self._num_exited))

    def break_off(self, generation: int) -> None:
        """Ends all averagings of the generation without a result."""
        self._broken.add(generation)

    def forget(self) -> None:
        """The coordinator is gone: ranks that connect, and rounds that they hear of, are counted anew."""
        self._connected.clear()
        self._known = self._announced
        self.is_complete.clear()
        self.is_announced.clear()

    def on_connected(self, rank: "PlayedRank") -> None:
        """A rank's stream is open."""
        self._connected.add(rank.number)
        if len(self._connected) == self.num_ranks:
            self.is_complete.set()

    def enter(self, round_id: int, generation: int, rank: "PlayedRank", row: rank_pb2.HeaderRow) -> None:
        """A rank's part; the last one's begins the averaging."""
        entries = self._entered.setdefault(round_id, [])
        entries.append((rank.number, rank, row))
        if len(entries) == self._sizes[generation]:
            asyncio.get_running_loop().call_later(self.course.sync_s, self._finish, round_id, generation)

    @played
    def _finish(self, round_id: int, generation: int) -> None:
        entries = sorted(self._entered.pop(round_id), key=lambda entry: entry[0])
        if generation in self._broken:
            return
        rows = [row for _, _, row in entries]
        version, digest = 1 + max(row.version for row in rows), header_digest(rows)
        for _, rank, _ in entries:
            rank.receive(round_id, version, rows, digest)
        self.committed, self._committed_s, self._committed_cpu_s = self.committed + 1, _now_s(), self._spent_s
        self.has_committed.set()
        if self.committed >= WARM_ROUNDS:
            self.is_warm.set()

    def on_announced(self, round_id: int, generation: int) -> None:
        """A rank has heard of a round for the first time."""
        if round_id != self._announced:
            self._announced, self._num_announced = round_id, 0
        self._num_announced += 1
        if self._num_announced < self._sizes[generation]:
            return
        if round_id > self._known:
            self.is_announced.set()
        if self._committed_s < inf:
            self.figures.announced_s.append(_now_s() - self._committed_s)
            self.figures.announced_cpu_s.append(self._spent_s - self._committed_cpu_s)

    @property
    def _spent_s(self) -> float:
        """Processor time of this process, without the ranks' own."""
        return time.process_time() - self.figures.played_s


class PlayedRank:
    """One rank, as a state machine on the event loop."""

    def __init__(self, number: int, world: World, secret: str) -> None:
        self.number = number
        self._sends_digest: set[int] = set()
        """Generations in which it sends the digest of headers."""
        self._unreported_headers: dict[int, tuple[int, list[rank_pb2.HeaderRow]]] = {}
        """Generation and rows by round, whose digest alone was sent (protocol P5.5)."""
        self._to_abandon: rank_pb2.Abandon | None = None
        """The command to abandon a generation, followed once the batch is made."""
        self._world = world
        self.figures = world.figures
        self._batch_s = world.course.batch_s[number]
        self._secret = secret
        self._outgoing: asyncio.Queue[bytes | None] | None = None
        """Messages of the present stream; None while there is none."""
        self._kept: deque[tuple[int, bytes]] = deque()
        """Numbered messages that may not be durable at the coordinator."""
        self._store = ""
        self._newest: rank_pb2.BatchesTrained | None = None
        """The newest report, which is sent again on each new stream."""
        self._on_welcome: Callable[[], None] = lambda: None
        self._seq = self._heard = 0
        self._leases: deque[int] = deque()
        self._left_of_first = 0
        self._leased = self._permitted = self._processed = 0
        self._targets: dict[int, tuple[int, int]] = {}
        """Step and generation by round."""
        self._last_entered = self._last_announced = self._version = self._local_step = 0
        self._limit_step: float = inf
        self._weight, self._num_batches, self._compute_s = 0, 0, 0.0
        self._entered: tuple[int, int, int, int, float, float] | None = None
        """The round that runs: its id and generation, samples, batches and their time, and when it was entered."""
        self._batch: asyncio.TimerHandle | None = None
        """The end of the batch that it trains."""
        self._idle_since_s: float | None = None
        self._stalled_s = 0.0
        self._unreported: list[float] = []
        self._reported_s = -inf

    # The wire

    async def run(self, converse: Converse, on_welcome: Callable[[], None]) -> None:
        """Converses until the coordinator has it leave, over one stream after the other (protocol P15)."""
        try:
            await self._converse(converse, on_welcome)
        finally:  # it may have been killed
            if self._batch is not None:
                self._batch.cancel()

    async def _converse(self, converse: Converse, on_welcome: Callable[[], None]) -> None:
        self._on_welcome = on_welcome
        self.say("ready", ready_message(self._world.settings, device="cpu"))
        retry_s = RETRY_S
        while not self._world.is_over.is_set():
            outgoing: asyncio.Queue[bytes | None] = asyncio.Queue()
            try:
                async for response in converse(self._metadata, _requests(outgoing)):
                    retry_s = RETRY_S
                    self._hear(response, outgoing)
            except grpc.aio.AioRpcError as error:
                if error.code() not in PASSING:
                    print(f"rank {self.number} has lost the coordinator: {error.details()}", file=sys.stderr)
                    self._world.is_over.set()
            self._outgoing = None
            outgoing.put_nowait(None)  # else the task of the ended stream would wait for it
            on_welcome()
            await asyncio.sleep(retry_s * self._world.random.uniform(0.5, 1.0))
            retry_s = min(2 * retry_s, MAX_RETRY_S)

    @property
    def _metadata(self) -> Metadata:
        store = (("elche-store", self._store),) if self._store else ()
        return ("elche-secret", self._secret), ("elche-heard", str(self._heard)), *store

    def say(self, name: str, message: object, *, is_kept: bool = True) -> None:
        """Sends a message, numbered if it is to be kept."""
        self._seq += is_kept
        seq = self._seq if is_kept else 0
        said: dict[str, Any] = {name: message}
        data = rank_pb2.ConverseRequest(**said, seq=seq, num_received=self._heard).SerializeToString()
        self.figures.sent[name] = self.figures.sent.get(name, 0) + 1
        self.figures.sent_bytes += len(data)
        if is_kept:
            self._kept.append((seq, data))
        if self._outgoing is not None:
            self._outgoing.put_nowait(data)

    def _open(self, welcome: rank_pb2.Welcome, outgoing: "asyncio.Queue[bytes | None]") -> None:
        self._store, self._outgoing = welcome.store, outgoing
        self._forget(welcome.taken)
        for _, data in self._kept:
            outgoing.put_nowait(data)
        if self._newest is not None:
            self.say("batches_trained", self._newest, is_kept=False)
        self._world.on_connected(self)
        self._on_welcome()

    def _forget(self, taken: int) -> None:
        while self._kept and self._kept[0][0] <= taken:
            self._kept.popleft()

    @played
    def _hear(self, response: rank_pb2.ConverseResponse, outgoing: "asyncio.Queue[bytes | None]") -> None:
        name = response.WhichOneof("message")
        if 0 < response.seq <= self._heard:
            return
        self._heard = response.seq or self._heard
        self.figures.received[name] = self.figures.received.get(name, 0) + 1
        match name:
            case "sync_now":
                self._learn(response.sync_now)
            case "start_epoch":
                self._take_lease(response.start_epoch)
            case "permit":
                self._permitted = max(self._permitted, response.permit.num_samples)
            case "throttle":
                self._limit_step = response.throttle.limit_step
            case "recall":
                self._give_back()
            case "form_group":
                if response.form_group.sends_digest:
                    self._sends_digest.add(response.form_group.generation)
                self._world.form(response.form_group, self)
            case "round_outcome":
                self._unreported_headers.pop(response.round_outcome.round, None)
            case "abandon":
                self._world.break_off(response.abandon.generation)
                self._to_abandon = response.abandon
            case "welcome":
                self._open(response.welcome, outgoing)
            case "taken":
                self._forget(response.taken.seq)
            case "ping":
                self.say("pong", rank_pb2.Pong(), is_kept=False)
            case "shutdown":
                outgoing.put_nowait(None)
                self._world.is_over.set()
        self._go_on()

    def _learn(self, command: rank_pb2.SyncNow) -> None:
        for index in range(command.count):
            if command.round + index > self._last_entered:
                self._targets[command.round + index] = command.after_step + index, command.generation
        if command.round > self._last_announced:
            self._last_announced = command.round
            self._world.on_announced(command.round, command.generation)

    def _take_lease(self, lease: rank_pb2.StartEpoch) -> None:
        self._leases.append(lease.partition_size)
        self._leased += lease.partition_size
        if not lease.is_reserve:
            self._permitted = self._leased

    def _give_back(self) -> None:
        while self._leased > self._permitted:
            if not self._leases:  # the rest is of the lease that has begun
                self._left_of_first -= self._leased - self._permitted
                self._leased = self._permitted
                break
            size = self._leases.pop()
            kept = max(0, size - (self._leased - self._permitted))
            self._leased -= size - kept
            if kept:
                self._leases.append(kept)
        self.say("recalled", rank_pb2.Recalled(num_samples=self._permitted))

    # Training

    @property
    def _has_work(self) -> bool:
        return self._processed < self._permitted

    def _go_on(self) -> None:
        if self._batch is not None:
            return
        if self._to_abandon is not None:
            self._abandon(self._to_abandon)
        due = min(self._targets, default=None)
        is_there = due is not None and (self._local_step >= self._targets[due][0] or not self._has_work)
        if due is not None and is_there and self._entered is None:
            self._enter(due)
        may_train = self._version > 0 and self._local_step < self._limit_step
        if self._has_work and may_train and (self._world.course.overlaps or self._entered is None):
            self._end_idling()
            duration_s = self._batch_s * max(0.1, self._world.random.gauss(1.0, self._world.course.jitter))
            self._batch = asyncio.get_running_loop().call_later(duration_s, self._finish_batch, _now_s())
        else:
            self._idle_since_s = self._idle_since_s or _now_s()
            if self._unreported and _now_s() - self._reported_s >= REPORT_EVERY_S:
                self._report()

    def _end_idling(self) -> None:
        if self._idle_since_s is not None and self._entered is not None:
            self._stalled_s += _now_s() - self._idle_since_s
        self._idle_since_s = None

    @played
    def _finish_batch(self, began_s: float) -> None:
        now_s = _now_s()
        self._batch = None
        while self._leases and not self._left_of_first:
            self._left_of_first = self._leases.popleft()
        size = min(self._world.course.batch_size, self._left_of_first, self._permitted - self._processed)
        self._left_of_first -= size
        self._processed += size
        self._local_step += 1
        self._weight += size
        self._num_batches += 1
        self._compute_s += now_s - began_s
        self.figures.trained_s += now_s - began_s
        self.figures.batches += 1
        self._unreported.append((now_s - began_s) * 1000)
        since_s, every_s = now_s - self._reported_s, PER_RANK_S * self._world.num_ranks
        if since_s >= REPORT_EVERY_S and (since_s >= every_s or len(self._unreported) >= MAX_BATCHES):
            self._report()
        self._go_on()

    def _report(self) -> None:
        self._reported_s = _now_s()
        told = rank_pb2.BatchesTrained(
            local_step=self._local_step,
            num_processed=self._processed,
            batch_ms=self._unreported,
            loss_sum=float(len(self._unreported)),
            loss_count=len(self._unreported),
        )
        self._unreported, self._newest = [], told
        self.say("batches_trained", told, is_kept=False)

    # Rounds

    def _enter(self, round_id: int) -> None:
        _, generation = self._targets.pop(round_id)
        self._last_entered = round_id
        self._entered = (round_id, generation, self._weight, self._num_batches, self._compute_s, _now_s())
        if self._unreported:
            self._report()
        self.say("round_entered", rank_pb2.RoundEntered(round=round_id, generation=generation))
        row = rank_pb2.HeaderRow(
            weight=self._weight,
            cut=self._processed,
            local_step=self._local_step,
            compute_us=round(self._compute_s * 1e6),
            finite=True,
            version=self._version,
        )
        self._weight, self._num_batches, self._compute_s, self._stalled_s = 0, 0, 0.0, 0.0
        self._world.enter(round_id, generation, self, row)

    def receive(self, round_id: int, version: int, rows: list[rank_pb2.HeaderRow], digest: bytes) -> None:
        """The round's result is there, with its header."""
        assert self._entered is not None
        _, generation, samples, batches, _, entered_s = self._entered
        if self._batch is not None or self._idle_since_s is not None:
            self._end_idling()
        self._entered = None
        self._version = version
        work = rank_pb2.EpochWork(epoch=0, num_batches=batches, num_samples=samples, loss_sum=float(batches))
        own = rank_pb2.SyncAck(
            round=round_id,
            generation=generation,
            collective_ms=(_now_s() - entered_s) * 1000,
            stalled_ms=self._stalled_s * 1000,
            divergence=0.001,
            work=[work] if batches else [],
        )
        if generation in self._sends_digest:
            own.header_digest = digest
            self._unreported_headers[round_id] = generation, rows
        else:
            own.header.extend(rows)
        self.say("sync_ack", own)
        self._go_on()

    def _abandon(self, command: rank_pb2.Abandon) -> None:
        """Ends the generation between two batches: the work of a round that runs belongs to the next one."""
        self._to_abandon, generation = None, command.generation
        if self._entered is not None and self._entered[1] == generation:
            round_id, _, samples, batches, compute_s, _ = self._entered
            self._entered = None
            self._weight += samples
            self._num_batches += batches
            self._compute_s += compute_s
            failed = rank_pb2.RoundFailed(round=round_id, generation=generation, reason="a member has died")
            self.say("round_failed", failed)
        self._targets = {round_id: target for round_id, target in self._targets.items() if target[1] != generation}
        for round_id, (of, rows) in list(self._unreported_headers.items()):
            if of == generation and not command.keeps_headers:
                del self._unreported_headers[round_id]
                reported = rank_pb2.HeaderReported(round=round_id, generation=of, header=rows)
                self.say("header_reported", reported)
        self.say("abandoned", rank_pb2.Abandoned(generation=generation, keeps_headers=command.keeps_headers))


async def _requests(outgoing: "asyncio.Queue[bytes | None]") -> AsyncIterator[bytes]:
    while (message := await outgoing.get()) is not None:
        yield message


def over_the_wire(address: str) -> Converse:
    """Each rank has a connection of its own to the coordinator."""
    options = [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]

    async def converse(metadata: Metadata, requests: AsyncIterator[bytes]) -> AsyncIterator[rank_pb2.ConverseResponse]:
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            method = channel.stream_stream(CONVERSE, response_deserializer=rank_pb2.ConverseResponse.FromString)
            call: Any = method(requests, metadata=metadata)
            async for response in call:
                yield response

    return converse


async def attended(address: str, world: World) -> AsyncIterator[agent_pb2.StartRank]:
    """Offers devices to the coordinator, and yields the ranks that it starts on them; comes back when it was away."""
    hello = agent_pb2.AgentHello(
        host="played", slots=[agent_pb2.Slot(device="cpu")] * world.num_ranks, identity="played", folder="played"
    )

    async def requests() -> AsyncIterator[agent_pb2.AttendRequest]:
        yield agent_pb2.AttendRequest(hello=hello)
        while True:
            yield await world.exits.get()

    while True:
        try:
            async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
                call: Any = agent_pb2_grpc.AgentServiceStub(channel).Attend(requests())  # type: ignore[arg-type]
                async for response in call:
                    if response.HasField("welcome"):
                        hello.store = response.welcome.store
                    hello.num_received = response.seq or hello.num_received
                    if response.HasField("start_rank"):
                        hello.num_ranks += 1
                        yield response.start_rank
        except grpc.aio.AioRpcError as error:
            if error.code() not in PASSING:
                raise
        await asyncio.sleep(RETRY_S)


async def play(
    world: World,
    started: AsyncIterator[agent_pb2.StartRank],
    converse: Converse,
    measure: Callable[[World], Coroutine[None, None, None]],
) -> None:
    """Plays the ranks that are started, and measures meanwhile. An error of a rank ends it."""
    connecting = asyncio.Semaphore(CONNECTING)

    async def run(start: agent_pb2.StartRank) -> None:
        await connecting.acquire()
        await PlayedRank(start.rank, world, start.secret).run(converse, connecting.release)

    async with asyncio.TaskGroup() as group:

        async def attend() -> None:
            async for start in started:
                world.playing[start.rank] = start, group.create_task(run(start))

        attending = group.create_task(attend())
        await measure(world)
        for task in (attending, *(task for _, task in world.playing.values())):
            task.cancel()


def _now_s() -> float:
    return asyncio.get_running_loop().time()
