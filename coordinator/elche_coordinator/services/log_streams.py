"""Streams ranks' logs from their hosts to a client: the end of each, and what is appended to it."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial

from elche.errors import ElcheError, HostAway, InvalidJob
from elche.v1 import agent_pb2, job_pb2
from elche_coordinator.archive.artifacts import Artifacts
from elche_coordinator.core.describe import JobView, RankView
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
HOST_BACK_S = 30.0
"""Seconds for which a host is waited for whose log a client follows on."""
DEPTH = 1
"""Chunks that may wait for a client, besides one of each log; with more, the hosts wait."""

Parts = asyncio.Queue[job_pb2.StreamLogsResponse | None]


async def stream_logs(
    request: job_pb2.StreamLogsRequest,
    view: Callable[[], JobView],
    last_change: Callable[[], int],
    agents: Agents,
    artifacts: Artifacts,
    budget: Budget,
) -> AsyncGenerator[job_pb2.StreamLogsResponse]:
    """Yields chunks of the logs as they come, and errors for missing ones. The job is viewed again only after a change,
    by its number. Raises `InvalidJob` when all are missing, and `TooMuch` when the caller reads too many at once.
    """
    ranks = await _begun(request, view, last_change)
    with budget.taking(CALLER.get().name, len(ranks)):
        async with aclosing(_merged(request, ranks, agents, artifacts)) as parts:
            async for part in parts:
                yield part


async def _merged(
    request: job_pb2.StreamLogsRequest,
    ranks: list[RankView],
    agents: Agents,
    artifacts: Artifacts,
) -> AsyncGenerator[job_pb2.StreamLogsResponse]:
    """Yields the parts of all ranks' logs as they come. Raises `InvalidJob` if no rank's log can be read."""
    parts: Parts = asyncio.Queue(DEPTH)
    readers = [asyncio.ensure_future(_read(request, rank, agents, artifacts, parts)) for rank in ranks]
    problems: list[str] = []
    num_open = len(readers)
    try:
        while num_open:
            part = await parts.get()
            if part is None:
                num_open -= 1
            # No rank has a log: that is an error of the call, not of one rank.
            elif part.error and len(problems) + 1 == len(ranks):
                raise InvalidJob(part.error)
            else:
                problems += [part.error] if part.error else []
                yield part
    finally:
        for reader in readers:
            reader.cancel()
        # The event loop keeps only weak references to tasks: one without others may be collected while it ends.
        await asyncio.gather(*readers, return_exceptions=True)


async def _begun(
    request: job_pb2.StreamLogsRequest, view: Callable[[], JobView], last_change: Callable[[], int]
) -> list[RankView]:
    """The requested ranks, once their processes have started. Raises `InvalidJob` when there are no such logs."""
    while True:
        now, seen = view(), last_change()
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
        while last_change() == seen:  # noqa: ASYNC110 - a look costs nothing, and there is no event of each job
            await asyncio.sleep(POLL_S)
    if not any(rank.log_path for rank in found):
        raise InvalidJob(
            f"job {now.job_id} has no logs: it is a script with its own loop, which prints where it was started"
        )
    if len(found) > MAX_RANKS:
        raise InvalidJob(f"job {now.job_id} has {len(found)} ranks: name one with --rank")
    return found


async def _come_back(job_id: str, rank: RankView, agents: Agents, absent: str) -> None:
    """Waits for the host of a log that a client follows on, since a coordinator that was just started has no host for
    a moment. Raises `HostAway`: the artifact store knows no positions.
    """
    try:
        async with asyncio.timeout(HOST_BACK_S):
            while not agents.holders_of_log(job_id, rank):  # noqa: ASYNC110 - as in `_begun`
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise HostAway(absent) from None


async def _read(
    request: job_pb2.StreamLogsRequest,
    rank: RankView,
    agents: Agents,
    artifacts: Artifacts,
    parts: Parts,
) -> None:
    """Puts the chunks of one rank's log into `parts`, then None."""
    job_id, limit = request.job_id, min(request.max_bytes or MAX_BYTES, MAX_BYTES)
    where, rest, is_first = f"{rank.host}:{rank.log_path}", Rest(), True
    absent = f"the host of rank {rank.rank} is not here any more; its log is {where}"
    how = agent_pb2.SendLog(max_bytes=limit, follow=request.follow, with_times=request.with_times)
    try:
        for position in request.positions:
            if (position.rank, position.log) == (rank.rank, where):
                how.offset = position.offset
                await _come_back(job_id, rank, agents, absent)
        ask = partial(agents.ask_for_log, job_id, rank, how)
        log_end = artifacts.log_end([ask], job_id, rank.rank, limit, absent, rest, with_times=request.with_times)
        async with aclosing(log_end) as chunks:
            async for data in chunks:
                part = job_pb2.StreamLogsResponse(rank=rank.rank, data=data)
                if rest.is_announced and is_first:
                    part.begins.MergeFrom(job_pb2.LogPosition(rank=rank.rank, log=where, offset=rest.offset))
                is_first = False
                # A host whose rank writes nothing sends empty chunks, by which it notices that the client has left.
                if data:
                    await parts.put(part)
    except ElcheError as error:
        await parts.put(job_pb2.StreamLogsResponse(rank=rank.rank, error=str(error)))
    except Exception as error:
        log.exception("job=%s rank=%d its log cannot be forwarded", job_id, rank.rank)
        await parts.put(job_pb2.StreamLogsResponse(rank=rank.rank, error=f"its log cannot be forwarded: {error}"))
    await parts.put(None)
