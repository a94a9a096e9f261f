"""Averaging through the coordinator: relays and adds up what members send, chunk by chunk, holding no model.

All members of a round send the same operations in the same order. An operation is done when every member's part is
there, and its answer goes to all before the next one is read: so a round needs some chunks of memory for each member,
however large the model is, and sums are made in the order of the ranks, equal each time. The round is complete when
every member has said that it has everything; until then a member that is lost, or a transfer that stalls, ends it on
all of them alike.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

from elche.errors import ElcheError
from elche.v1 import averaging_pb2
from elche_coordinator.core.messages.ids import JobId, RoundId

STALL_S = 30.0
"""How long a member may send nothing, or take nothing, once all have met."""
MAX_PART_BYTES = 1 << 20
QUEUE_PARTS = 4
"""Parts of one member that wait, on their way in and on their way out."""
MAX_VERDICTS = 64
"""Ended rounds of a job that are remembered."""
SMALL_BYTES = 1 << 14
"""Sums of less are made at once; larger ones on a thread, so that nobody waits for them."""

Part = averaging_pb2.Part


class GivenUp(ElcheError):
    """The round was given up."""


class Member:
    """One rank's stream in a round: parts come in, answers go out, some of each may wait."""

    def __init__(self) -> None:
        self._parts: asyncio.Queue[Part | None] = asyncio.Queue(QUEUE_PARTS)
        """None: nothing follows."""
        self._answers: asyncio.Queue[bytes] = asyncio.Queue(QUEUE_PARTS)
        self._is_gone = False

    async def put_part(self, part: Part | None) -> None:
        """From the stream."""
        await self._parts.put(part)

    async def next_part(self) -> Part | None:
        """What the member has sent; None when it is gone and has sent nothing more."""
        if self._is_gone and self._parts.empty():
            return None
        return await self._parts.get()

    async def put_answer(self, answer: bytes) -> None:
        """For the stream; dropped when the member is gone."""
        if not self._is_gone:
            await self._answers.put(answer)

    async def next_answer(self) -> bytes:
        """What is to be sent."""
        return await self._answers.get()

    @property
    def has_answer(self) -> bool:
        """Whether something is to be sent."""
        return not self._answers.empty()

    def leave(self) -> None:
        """The stream has ended: wakes whoever waits for it."""
        self._is_gone = True
        while not self._answers.empty():
            self._answers.get_nowait()
        if not self._parts.full():
            self._parts.put_nowait(None)


class Meeting:
    """One round's members, from the first one's joining to the end."""

    def __init__(self, size: int, stall_s: float, pool: ThreadPoolExecutor) -> None:
        self.reason = ""
        """Why it was given up; empty while it was not."""
        self.is_complete = False
        self.ended = asyncio.Event()
        self._members: list[Member | None] = [None] * size
        self._stall_s = stall_s
        self._pool = pool
        self._running: asyncio.Task[None] | None = None

    def join(self, position: int) -> Member:
        """A member's stream begins; when all are there, the operations do. Raises `GivenUp` when it is too late."""
        if self._running is not None or self.ended.is_set():
            raise GivenUp(self.reason or "this rank has joined the round before")
        member = self._members[position] = Member()
        members = [one for one in self._members if one is not None]
        if len(members) == len(self._members):
            self._running = asyncio.ensure_future(self._run(members))
        return member

    def leave(self, position: int, member: Member) -> None:
        """A member's stream has ended; before all have met, it may come again."""
        member.leave()
        if self._running is None and self._members[position] is member:
            self._members[position] = None

    def give_up(self, reason: str) -> None:
        """Ends the round on all members."""
        if self._running is not None:
            self._running.cancel()
        self._end(reason)

    async def _run(self, members: list[Member]) -> None:
        try:
            while not self.is_complete:
                parts = await self._take_parts(members)
                self.is_complete = parts[0].operation == averaging_pb2.OPERATION_FINISH
                if not self.is_complete:
                    await self._answer(members, await self._combine(parts))
            self._end("")
        except GivenUp as error:
            self._end(str(error))

    async def _take_parts(self, members: list[Member]) -> list[Part]:
        """The next part of every member, all of one operation. Raises `GivenUp`."""
        parts = []
        try:
            async with asyncio.timeout(self._stall_s):
                for position, member in enumerate(members):
                    part = await member.next_part()
                    if part is None:
                        raise GivenUp(f"rank {position} left the averaging")
                    parts.append(part)
        except TimeoutError:
            raise GivenUp(f"rank {len(parts)} has sent nothing for {self._stall_s:.0f} s") from None
        first = parts[0]
        for position, part in enumerate(parts):
            if part.operation != first.operation or part.source != first.source or part.source >= len(parts):
                raise GivenUp(f"ranks 0 and {position} have sent different operations")
            if part.operation != averaging_pb2.OPERATION_BROADCAST and len(part.data) != len(first.data):
                raise GivenUp(f"ranks 0 and {position} have sent {len(first.data)} and {len(part.data)} bytes")
        return parts

    async def _combine(self, parts: list[Part]) -> list[bytes]:
        """What each member gets."""
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
                raise GivenUp(f"operation {unknown} is not known")

    async def _sum(self, data: list[bytes], kind: str) -> bytes:
        if len(data[0]) % (4 if kind == "float32" else 8):
            raise GivenUp(f"{len(data[0])} bytes are no {kind} values")
        if len(data[0]) < SMALL_BYTES:
            return _add_up(data, kind)
        return await asyncio.get_running_loop().run_in_executor(self._pool, _add_up, data, kind)

    async def _answer(self, members: list[Member], answers: list[bytes]) -> None:
        for position, (member, answer) in enumerate(zip(members, answers, strict=True)):
            try:
                async with asyncio.timeout(self._stall_s):
                    await member.put_answer(answer)
            except TimeoutError:
                raise GivenUp(f"rank {position} has taken nothing for {self._stall_s:.0f} s") from None

    def _end(self, reason: str) -> None:
        if not self.ended.is_set():
            self.reason = reason
            self.ended.set()


class Averager:
    """All rounds that are averaged here. Lives on the event loop; sums are made on two threads."""

    def __init__(self, *, stall_s: float = STALL_S) -> None:
        self._stall_s = stall_s
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="averaging")
        self._meetings: dict[JobId, OrderedDict[RoundId, Meeting]] = {}

    def meeting(self, job_id: JobId, round_id: RoundId, size: int) -> Meeting:
        """The round's meeting, opened by its first member."""
        meetings = self._meetings.setdefault(job_id, OrderedDict())
        if round_id not in meetings:
            meetings[round_id] = Meeting(size, self._stall_s, self._pool)
            while len(meetings) > MAX_VERDICTS:
                meetings.popitem(last=False)[1].give_up("a later round has begun")
        return meetings[round_id]

    async def is_complete(self, job_id: JobId, round_id: RoundId) -> bool:
        """Waits for the round's end; whether all members had everything. False for a round that is not known."""
        meeting = self._meetings.get(job_id, OrderedDict()).get(round_id)
        if meeting is None:
            return False
        await meeting.ended.wait()
        return meeting.is_complete

    def drop(self, job_id: JobId) -> None:
        """The job has ended."""
        for meeting in self._meetings.pop(job_id, OrderedDict()).values():
            meeting.give_up("the job has ended")


async def take_part(
    meeting: Meeting, position: int, requests: AsyncIterator[averaging_pb2.AverageRequest]
) -> AsyncIterator[bytes]:
    """One member's stream: gives its parts to the meeting, and yields the answers. Raises `GivenUp`."""
    member = meeting.join(position)
    reading = asyncio.ensure_future(_read(requests, meeting, position, member))
    ended = asyncio.ensure_future(meeting.ended.wait())
    getting = asyncio.ensure_future(member.next_answer())
    try:
        while True:
            await asyncio.wait({getting, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not getting.done() and not member.has_answer:
                break
            yield await getting
            getting = asyncio.ensure_future(member.next_answer())
    finally:
        for task in (reading, ended, getting):
            task.cancel()
        meeting.leave(position, member)
    if not meeting.is_complete:
        raise GivenUp(meeting.reason)
    yield b""


async def _read(
    requests: AsyncIterator[averaging_pb2.AverageRequest], meeting: Meeting, position: int, member: Member
) -> None:
    """Takes a member's parts, as fast as the meeting does."""
    async for request in requests:
        if len(request.part.data) > MAX_PART_BYTES:
            meeting.give_up(f"rank {position} has sent a part of {len(request.part.data)} bytes, which is too long")
            return
        await member.put_part(request.part)
    await member.put_part(None)


def _add_up(data: list[bytes], kind: str) -> bytes:
    """The sum of all values, in their order; NaN and infinity go through as they are."""
    import numpy  # here, because only coordinators that average need it

    total = numpy.frombuffer(data[0], kind).copy()
    with numpy.errstate(all="ignore"):
        for one in data[1:]:
            total += numpy.frombuffer(one, kind)
    return total.tobytes()
