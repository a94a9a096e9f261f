"""Averaging through the coordinator: collective operations, relayed chunk by chunk without holding a model.

All members of a round send the same operations in the same order. An operation is answered when every member's part has
arrived, before the next one is read. So a round needs a few chunks of memory per member, whatever the model's size, and
parts are added in rank order, so that sums are reproducible. The round is complete when every member has confirmed that
it has everything. If a member is lost or a transfer stalls before, the round is aborted on all members.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

from elche.errors import ElcheError
from elche.v1 import averaging_pb2
from elche_coordinator.core.messages.ids import Attempt, JobId, RoundId

STALL_S = 30.0
"""Seconds for which a member may send or receive nothing once all members have joined."""
MAX_PART_BYTES = 1 << 20
"""Largest part, as the protocol has it (P11)."""
QUEUE_PARTS = 4
"""Parts of one member that may wait, in each direction."""
MAX_VERDICTS = 64
"""Rounds of a job whose outcome is remembered."""
SMALL_BYTES = 1 << 14
"""Larger sums are computed on a thread, so that they do not block the event loop."""

Part = averaging_pb2.Part


class RelayAborted(ElcheError):
    """The round was aborted."""


class RelayedRank:
    """One rank's stream in a round, with a bounded queue of parts in each direction."""

    def __init__(self) -> None:
        self._parts: asyncio.Queue[Part | None] = asyncio.Queue(QUEUE_PARTS)
        """None marks the end."""
        self._answers: asyncio.Queue[bytes] = asyncio.Queue(QUEUE_PARTS)
        self._is_gone = False
        self.replaced = asyncio.Event()
        """Set when another stream of the rank has joined the round instead."""

    async def put_part(self, part: Part | None) -> None:
        """Adds a part from the stream; waits while the queue is full. None: the stream has ended."""
        await self._parts.put(part)

    async def next_part(self) -> Part | None:
        """The next part of the member; None when it has left and has sent no more."""
        if self._is_gone and self._parts.empty():
            return None
        return await self._parts.get()

    async def put_answer(self, answer: bytes) -> None:
        """Adds an answer for the stream; waits while the queue is full. Drops it if the member has left."""
        if not self._is_gone:
            await self._answers.put(answer)

    async def next_answer(self) -> bytes:
        """The next answer to send."""
        return await self._answers.get()

    @property
    def has_answer(self) -> bool:
        """True if an answer waits to be sent."""
        return not self._answers.empty()

    def leave(self) -> None:
        """Marks the stream as ended and wakes what waits for it."""
        self._is_gone = True
        while self.replaced.is_set() and not self._parts.empty():
            self._parts.get_nowait()
        while not self._answers.empty():
            self._answers.get_nowait()
        # In a full queue the end needs no mark: `next_part` knows of it once the queue is empty.
        if not self._parts.full():
            self._parts.put_nowait(None)


class RelayRound:
    """One round: its members, and the task that relays their operations once all have joined."""

    def __init__(self, size: int, stall_s: float, pool: ThreadPoolExecutor) -> None:
        self.reason = ""
        """The reason why the round was aborted; empty if it was not."""
        self.is_complete = False
        self.ended = asyncio.Event()
        self._members: list[RelayedRank | None] = [None] * size
        self._stall_s = stall_s
        self._pool = pool
        self._running: asyncio.Task[None] | None = None

    def join(self, position: int) -> RelayedRank:
        """Adds a member, instead of its stream before; the operations begin with the last. Raises `RelayAborted` when
        they have begun or ended.
        """
        if self._running is not None or self.ended.is_set():
            raise RelayAborted(self.reason or "this rank has joined the round before")
        if (before := self._members[position]) is not None:
            before.replaced.set()
        member = self._members[position] = RelayedRank()
        members = [one for one in self._members if one is not None]
        if len(members) == len(self._members):
            self._running = asyncio.ensure_future(self._run(members))
        return member

    def most_bytes(self, part: Part) -> int:
        """Bound on the size of a part. An answer has the same bound, and a gathered one contains all parts."""
        is_gathered = part.operation == averaging_pb2.OPERATION_GATHER
        return max(1, MAX_PART_BYTES // len(self._members)) if is_gathered else MAX_PART_BYTES

    def leave(self, position: int, member: RelayedRank) -> None:
        """Removes a member whose stream has ended. Before all have joined, that aborts the round: the rank has lost it,
        and does not come back, so the others would wait for it without end.
        """
        member.leave()
        if self._running is None and not member.replaced.is_set():
            self.abort(f"rank {position} left the averaging")

    def abort(self, reason: str) -> None:
        """Aborts the round on all members, unless it has ended."""
        if self._running is not None:
            self._running.cancel()
        self._end(reason)

    async def _run(self, members: list[RelayedRank]) -> None:
        try:
            while not self.is_complete:
                parts = await self._take_parts(members)
                self.is_complete = parts[0].operation == averaging_pb2.OPERATION_FINISH
                if not self.is_complete:
                    await self._answer(members, await self._combine(parts))
            self._end("")
        except RelayAborted as error:
            self._end(str(error))

    async def _take_parts(self, members: list[RelayedRank]) -> list[Part]:
        """The next part of every member, in rank order. Raises `RelayAborted` when they differ in operation or size."""
        parts = []
        try:
            async with asyncio.timeout(self._stall_s):
                for position, member in enumerate(members):
                    part = await member.next_part()
                    if part is None:
                        raise RelayAborted(f"rank {position} left the averaging")
                    parts.append(part)
        except TimeoutError:
            raise RelayAborted(f"rank {len(parts)} has sent nothing for {self._stall_s:.0f} s") from None
        first = parts[0]
        for position, part in enumerate(parts):
            if part.operation != first.operation or part.source != first.source or part.source >= len(parts):
                raise RelayAborted(f"ranks 0 and {position} have sent different operations")
            if part.operation != averaging_pb2.OPERATION_BROADCAST and len(part.data) != len(first.data):
                raise RelayAborted(f"ranks 0 and {position} have sent {len(first.data)} and {len(part.data)} bytes")
        return parts

    async def _combine(self, parts: list[Part]) -> list[bytes]:
        """The answer to each member, in rank order."""
        size, data = len(parts), [part.data for part in parts]
        match parts[0].operation:
            case averaging_pb2.OPERATION_GATHER:
                return [b"".join(data)] * size
            case averaging_pb2.OPERATION_SCATTER:
                row = len(data[0]) // size
                return [b"".join(one[at * row : (at + 1) * row] for one in data) for at in range(size)]
            case averaging_pb2.OPERATION_BROADCAST:
                source = parts[0].source
                return [b"" if position == source else data[source] for position in range(size)]
            case averaging_pb2.OPERATION_SUM_FLOAT32:
                return [await self._sum(data, "float32")] * size
            case averaging_pb2.OPERATION_SUM_FLOAT64:
                return [await self._sum(data, "float64")] * size
            case unknown:
                raise RelayAborted(f"operation {unknown} is not known")

    async def _sum(self, data: list[bytes], kind: str) -> bytes:
        if len(data[0]) % (4 if kind == "float32" else 8):
            raise RelayAborted(f"{len(data[0])} bytes are not a whole number of {kind} values")
        if len(data[0]) < SMALL_BYTES:
            return _add_up(data, kind)
        return await asyncio.get_running_loop().run_in_executor(self._pool, _add_up, data, kind)

    async def _answer(self, members: list[RelayedRank], answers: list[bytes]) -> None:
        for position, (member, answer) in enumerate(zip(members, answers, strict=True)):
            try:
                async with asyncio.timeout(self._stall_s):
                    await member.put_answer(answer)
            except TimeoutError:
                raise RelayAborted(f"rank {position} has received nothing for {self._stall_s:.0f} s") from None

    def _end(self, reason: str) -> None:
        if not self.ended.is_set():
            self.reason = reason
            self.ended.set()


class Averager:
    """All rounds that are averaged here. Used on the event loop; sums are computed on two threads."""

    def __init__(self, *, stall_s: float = STALL_S) -> None:
        self._stall_s = stall_s
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="averaging")
        self._relays: dict[JobId, OrderedDict[RoundId, RelayRound]] = {}
        self._attempts: dict[JobId, Attempt] = {}

    def relay(self, job_id: JobId, round_id: RoundId, size: int) -> RelayRound:
        """The relay of the round, created for its first member. `size` is the number of members."""
        relays = self._relays.setdefault(job_id, OrderedDict())
        if round_id not in relays:
            relays[round_id] = RelayRound(size, self._stall_s, self._pool)
            while len(relays) > MAX_VERDICTS:
                relays.popitem(last=False)[1].abort("a later round has begun")
        return relays[round_id]

    async def is_complete(self, job_id: JobId, round_id: RoundId) -> bool:
        """Waits for the round to end. Returns True if all members have everything; False for an unknown round."""
        relay = self._relays.get(job_id, OrderedDict()).get(round_id)
        if relay is None:
            return False
        await relay.ended.wait()
        return relay.is_complete

    def begin(self, job_id: JobId, attempt: Attempt) -> None:
        """Forgets rounds of earlier attempts, whose ids are reused, when an attempt of the job forms a group."""
        if self._attempts.setdefault(job_id, attempt) != attempt:
            self.drop(job_id)
            self._attempts[job_id] = attempt

    def abort(self, job_id: JobId, round_id: RoundId, reason: str) -> None:
        """Aborts a round if it is relayed here."""
        if (relay := self._relays.get(job_id, OrderedDict()).get(round_id)) is not None:
            relay.abort(reason)

    def give_up(self, job_id: JobId) -> None:
        """Aborts the open rounds of a job, whose generation is abandoned."""
        for relay in self._relays.get(job_id, OrderedDict()).values():
            relay.abort("the generation was given up")

    def drop(self, job_id: JobId) -> None:
        """Aborts the rounds of a job that has ended."""
        self._attempts.pop(job_id, None)
        for relay in self._relays.pop(job_id, OrderedDict()).values():
            relay.abort("the job has ended")


async def take_part(
    relay: RelayRound, position: int, requests: AsyncIterator[averaging_pb2.AverageRequest]
) -> AsyncIterator[bytes]:
    """One member's stream: passes its parts to the relay and yields the answers. Raises `RelayAborted`."""
    member = relay.join(position)
    reading = asyncio.ensure_future(_read(requests, relay, position, member))
    ended = asyncio.ensure_future(relay.ended.wait())
    replaced = asyncio.ensure_future(member.replaced.wait())
    getting = asyncio.ensure_future(member.next_answer())
    try:
        while True:
            await asyncio.wait({getting, ended, replaced}, return_when=asyncio.FIRST_COMPLETED)
            # What was answered before the end is still sent.
            if not getting.done() and not member.has_answer:
                break
            yield await getting
            getting = asyncio.ensure_future(member.next_answer())
    finally:
        for task in (reading, ended, replaced, getting):
            task.cancel()
        relay.leave(position, member)
    if member.replaced.is_set():
        raise RelayAborted("another call of this rank has joined the round")
    if not relay.is_complete:
        raise RelayAborted(relay.reason)
    yield b""


async def _read(
    requests: AsyncIterator[averaging_pb2.AverageRequest], relay: RelayRound, position: int, member: RelayedRank
) -> None:
    """Reads a member's parts at the pace of the relay."""
    async for request in requests:
        if len(request.part.data) > relay.most_bytes(request.part):
            relay.abort(f"rank {position} has sent a part of {len(request.part.data)} bytes, which is too long")
            return
        await member.put_part(request.part)
    await member.put_part(None)


def _add_up(data: list[bytes], kind: str) -> bytes:
    """The elementwise sum, added in rank order; NaN and infinity propagate."""
    import numpy  # imported here because most coordinators never average

    total = numpy.frombuffer(data[0], kind).copy()
    with numpy.errstate(all="ignore"):
        for one in data[1:]:
            total += numpy.frombuffer(one, kind)
    return total.tobytes()
