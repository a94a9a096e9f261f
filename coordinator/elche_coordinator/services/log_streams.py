"""Streams ranks' logs from their hosts to a client: the end of each, and what is appended to it until the job ends."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial

from elche.errors import ElcheError, HostAway, InvalidJob, TooMuch
from elche.v1 import agent_pb2, job_pb2
from elche_coordinator.archive.artifacts import STAMP_CHARS, Artifacts
from elche_coordinator.core.describe import JobView, RankView
from elche_coordinator.core.messages.ids import Rank
from elche_coordinator.job_states import BEFORE_TRAINING, ENDED
from elche_coordinator.limits.budgets import Budget
from elche_coordinator.roles import CALLER
from elche_coordinator.streams.agents import Agents
from elche_coordinator.streams.transfers import Rest

log = logging.getLogger(__name__)

MAX_BYTES = 1 << 20
"""Largest end of a log that is sent before what is appended."""
MAX_RANKS = 64
"""Most logs in one answer; each needs a stream from its host."""
POLL_S = 0.25
"""Seconds between two looks whether a queued job's ranks have begun."""
LOOK_S = 0.5
"""Seconds between two looks at a job's ranks, of a client that follows their logs."""
HOST_BACK_S = 30.0
"""Seconds for which a host is waited for whose log a client follows on."""
DEPTH = 1
"""Chunks that may wait for a client, besides one of each log; with more, the hosts wait."""

Parts = asyncio.Queue[job_pb2.StreamLogsResponse | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Looks:
    """Ways to look at one job. Its view is shared by all who look, since making that of a large job takes 20 ms."""

    newest: Callable[[], JobView]
    """The job as it is now."""
    recent: Callable[[], tuple[JobView, int]]
    """The job as it was a moment ago, and the number of the event that had changed it last."""
    last_change: Callable[[], int]
    """The number of the event that has changed it last."""


async def stream_logs(
    request: job_pb2.StreamLogsRequest,
    looks: Looks,
    agents: Agents,
    artifacts: Artifacts,
    budget: Budget,
) -> AsyncGenerator[job_pb2.StreamLogsResponse]:
    """Yields chunks of the logs as they come, and errors for missing ones. The job is looked at again only after a
    change, by its number. Raises `InvalidJob` when all are missing, `TooMuch` when the caller reads too many at once.
    """
    ranks = await _begun(request, looks)
    with budget.taking(CALLER.get().name, len(ranks)):
        reading = _Reading(request, looks, agents, artifacts, budget)
        async with aclosing(reading.parts_of(ranks)) as parts:
            async for part in parts:
                yield part


@dataclass(slots=True)
class _Reading:
    """One client's reading of a job's logs. A client that follows gets those of later processes and ranks too."""

    request: job_pb2.StreamLogsRequest
    looks: Looks
    agents: Agents
    artifacts: Artifacts
    budget: Budget
    parts: Parts = field(default_factory=lambda: asyncio.Queue(DEPTH))
    """What the tasks have read; None when one has ended."""
    tasks: dict[Rank | None, asyncio.Task[None]] = field(default_factory=dict)
    """The reader of each rank's log; of None, the task that looks for ranks that join."""
    positions: dict[tuple[Rank, str], int] = field(default_factory=dict)
    """Where to go on in the log of a rank at a host and path."""

    async def parts_of(self, ranks: list[RankView]) -> AsyncGenerator[job_pb2.StreamLogsResponse]:
        """Yields the parts of all logs as they come. Raises `InvalidJob` if no rank's log can be read."""
        self.positions |= {(Rank(one.rank), one.log): one.offset for one in self.request.positions}
        for rank in ranks:
            self._begin(Rank(rank.rank), partial(self._read, rank))
        if self.request.follow and not self.request.HasField("rank"):
            self._begin(None, self._read_those_that_join)
        num_ended, num_failed, has_data = 0, 0, False
        try:
            while num_ended < len(self.tasks):
                part = await self.parts.get()
                if part is None:
                    num_ended += 1
                    continue
                num_failed, has_data = num_failed + bool(part.error), has_data or bool(part.data)
                # No rank has a log: that is an error of the call, not of one rank.
                if num_failed == len(ranks) and not has_data and not self._may_change():
                    raise InvalidJob(part.error)
                yield part
        finally:
            for task in self.tasks.values():
                task.cancel()
            # The event loop keeps only weak references to tasks: one without others may be collected while it ends.
            await asyncio.gather(*self.tasks.values(), return_exceptions=True)

    def _begin(self, rank: Rank | None, read: Callable[[], Awaitable[None]]) -> None:
        self.tasks[rank] = asyncio.ensure_future(self._run(read))

    async def _run(self, read: Callable[[], Awaitable[None]]) -> None:
        """Awaits what a task does, and puts None. Also after an error, or the client would wait for good."""
        try:
            await read()
        except ElcheError as error:  # the job is forgotten
            log.debug("job=%s is not followed on: %s", self.request.job_id, error)
        except Exception:
            log.exception("job=%s its logs are not followed on", self.request.job_id)
        await self.parts.put(None)

    def _may_change(self) -> bool:
        """True if the client follows, and ranks may yet write."""
        return self.request.follow and self.looks.newest().state not in ENDED

    async def _views(self) -> AsyncGenerator[JobView]:
        """Yields the job as it is, after each change, the last time when it has ended."""
        while True:
            now, seen = self.looks.recent()
            yield now
            if now.state in ENDED:
                return
            await asyncio.sleep(LOOK_S)
            while self.looks.last_change() == seen:  # noqa: ASYNC110 - as in `_begun`
                await asyncio.sleep(LOOK_S)

    async def _read_those_that_join(self) -> None:
        """Begins to read the logs of ranks that were not there when the client began."""
        async for now in self._views():
            for rank in now.ranks:
                if rank.rank not in self.tasks and rank.log_path and len(self.tasks) <= MAX_RANKS:
                    self._begin(Rank(rank.rank), partial(self._read_one_more, rank))

    async def _read_one_more(self, rank: RankView) -> None:
        try:
            with self.budget.taking(CALLER.get().name):
                await self._read(rank)
        except TooMuch as error:
            await self.parts.put(job_pb2.StreamLogsResponse(rank=rank.rank, error=str(error)))

    async def _read(self, rank: RankView) -> None:
        """Puts the parts of a rank's log. If the client follows: of one process after the other."""
        failed = await self._read_process(rank, tells=True)
        if self.request.follow:
            async for now in self._views():
                for one in now.ranks:
                    if one.rank == rank.rank and one.log_path and self._is_to_be_read(one, rank, failed):
                        rank, failed = one, await self._read_process(one, tells=failed is None)

    def _is_to_be_read(self, now: RankView, before: RankView, failed: ElcheError | None) -> bool:
        """True if a rank has another process than before, or its host, which had gone, has come back."""
        if now.incarnation != before.incarnation:
            return True
        return isinstance(failed, HostAway) and bool(self.agents.holders_of_log(self.request.job_id, now))

    async def _read_process(self, rank: RankView, *, tells: bool) -> ElcheError | None:
        """Puts the parts of a log until the process that writes it has ended. Returns the error that ended it before,
        which the client gets as well if it `tells`.
        """
        try:
            await self._read_log(rank)
            return None
        except ElcheError as error:
            problem = error
        except Exception as error:
            log.exception("job=%s rank=%d its log cannot be forwarded", self.request.job_id, rank.rank)
            problem = ElcheError(f"its log cannot be forwarded: {error}")
        if tells:
            await self.parts.put(job_pb2.StreamLogsResponse(rank=rank.rank, error=str(problem)))
        return problem

    async def _read_log(self, rank: RankView) -> None:
        """Puts the parts of a log: from where it was read to, else its end."""
        request, job_id = self.request, self.request.job_id
        limit = min(request.max_bytes or MAX_BYTES, MAX_BYTES)
        where, rest = f"{rank.host}:{rank.log_path}", Rest()
        key = (Rank(rank.rank), where)
        absent = f"the host of rank {rank.rank} is not here any more; its log is {where}"
        how = agent_pb2.SendLog(max_bytes=limit, follow=request.follow, with_times=request.with_times)
        if (offset := self.positions.get(key)) is not None:
            how.offset = offset
            await self._come_back(rank, absent)
        ask = partial(self.agents.ask_for_log, job_id, rank, how)
        log_end = self.artifacts.log_end([ask], job_id, rank.rank, limit, absent, rest, with_times=request.with_times)
        reached: _Position | None = None
        async with aclosing(log_end) as chunks:
            async for data in chunks:
                part = job_pb2.StreamLogsResponse(rank=rank.rank, data=data)
                if rest.is_announced and reached is None:
                    reached = _Position(rest.offset, STAMP_CHARS if request.with_times else 0)
                    part.begins.MergeFrom(job_pb2.LogPosition(rank=rank.rank, log=where, offset=rest.offset))
                await self.parts.put(part)
                if reached is not None:
                    reached.add(data)
                    self.positions[key] = reached.offset

    async def _come_back(self, rank: RankView, absent: str) -> None:
        """Waits for the host of a log that a client follows on, since a coordinator that was just started has no host
        for a moment. Raises `HostAway`: the artifact store knows no positions.
        """
        try:
            async with asyncio.timeout(HOST_BACK_S):
                while not self.agents.holders_of_log(self.request.job_id, rank):  # noqa: ASYNC110 - as in `_begun`
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise HostAway(absent) from None


@dataclass(slots=True)
class _Position:
    """Where the first line of a log begins that has not come whole."""

    offset: int
    """In bytes of the log."""
    num_stamp: int
    """Bytes of the time before each line that comes, which are not in the log."""
    num_open: int = 0
    """Bytes that have come of the line that is not whole."""

    def add(self, data: bytes) -> None:
        """Counts the next bytes."""
        whole, newline, rest = data.rpartition(b"\n")
        if newline:
            num_lines = whole.count(b"\n") + 1
            self.offset += self.num_open + len(whole) + len(newline) - num_lines * self.num_stamp
            self.num_open = 0
        self.num_open += len(rest)


async def _begun(request: job_pb2.StreamLogsRequest, looks: Looks) -> list[RankView]:
    """The requested ranks, once their processes have started. Raises `InvalidJob` when there are no such logs."""
    while True:
        now, seen = looks.newest(), looks.last_change()
        is_wanted = request.HasField("rank")
        found = [rank for rank in now.ranks if not is_wanted or rank.rank == request.rank]
        if now.ranks and not found:
            raise InvalidJob(f"job {now.job_id} has no rank {request.rank}; it has {len(now.ranks)}, from 0")
        if found and (all(rank.log_path for rank in found) or now.state not in BEFORE_TRAINING):
            break
        if now.state in ENDED:
            where = "its ranks were never started" if not now.num_rounds else "the coordinator has been restarted since"
            raise InvalidJob(f"job {now.job_id} has no logs here: {where}")
        if not request.follow:
            raise InvalidJob(
                f"the ranks of job {now.job_id}, which is {now.state}, have not started; -f waits for them"
            )
        while looks.last_change() == seen:  # noqa: ASYNC110 - a look costs nothing, and there is no event of each job
            await asyncio.sleep(POLL_S)
    if not any(rank.log_path for rank in found):
        raise InvalidJob(
            f"job {now.job_id} has no logs: it is a script with its own loop, which prints where it was started"
        )
    if len(found) > MAX_RANKS:
        raise InvalidJob(f"job {now.job_id} has {len(found)} ranks: name one with --rank")
    return found
