"""The gRPC service of ranks: their sessions while they train, and scripts with their own loop that attach as jobs."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator

from elche.errors import ElcheError, InvalidJob, NotAllowed
from elche.v1 import rank_pb2, rank_pb2_grpc
from elche_coordinator import codec
from elche_coordinator.core.messages.events import JobBroken, LoopAttached, RankFailed
from elche_coordinator.core.messages.spec import JobSpec
from elche_coordinator.core.records.ranks import Address
from elche_coordinator.driver import AnyStream, Driver
from elche_coordinator.limits.releasing import Context
from elche_coordinator.roles import CALLER
from elche_coordinator.services.interceptor import authenticated, num_received_of
from elche_coordinator.services.requests import new_job_id
from elche_coordinator.services.sessions import open_session
from elche_coordinator.streams.send_queue import SendQueue
from elche_coordinator.telemetry.timelines import Timelines

log = logging.getLogger(__name__)

MAX_LOOP_RANKS = 10_000


class RankServicer(rank_pb2_grpc.RankServiceServicer):
    """The sessions of ranks, and scripts that attach their own loop as a job."""

    def __init__(self, driver: Driver, timelines: Timelines) -> None:
        self._driver = driver
        self._timelines = timelines

    async def Attach(self, request: rank_pb2.AttachRequest, context: Context) -> rank_pb2.AttachResponse:
        if not 1 <= len(request.ranks) <= MAX_LOOP_RANKS:
            raise InvalidJob(f"a script has 1 to {MAX_LOOP_RANKS} ranks, not {len(request.ranks)}")
        self._driver.open_jobs.require_room(CALLER.get().name)
        job_id = new_job_id(request.name)
        spec = JobSpec(
            name=request.name,
            source_hash="",
            file_name=request.name,
            num_ranks=len(request.ranks),
            output_dir=request.checkpoint_dir,
            resume=request.resumed,
            is_loop=True,
            submitted_by=CALLER.get().submitter(request.submitted_by),
        )
        attached = LoopAttached(
            job_id=job_id,
            spec=spec,
            ranks=tuple((rank.host, rank.device) for rank in request.ranks),
            policy=request.policy,
            submitted_at=time.time(),
            can_regroup=request.can_regroup,
        )
        self._driver.handle(attached)
        secrets = [self._driver.secrets.new(address) for address in self._driver.core.addresses(job_id)]
        # The script trains on with these secrets: a restarted coordinator must know its job.
        await self._driver.durable()
        return rank_pb2.AttachResponse(job_id=job_id, secrets=secrets)

    async def Converse(
        self, request_iterator: AsyncIterator[rank_pb2.ConverseRequest], context: Context
    ) -> AsyncIterator[rank_pb2.ConverseResponse]:
        address, num_received = authenticated(self._driver, context), num_received_of(context)
        queue = open_session(self._driver, address, num_received)
        stream = self._driver.streams.of_rank(address)
        if queue is None or stream is None:
            raise NotAllowed("this secret has been used for a session before")
        reading = asyncio.ensure_future(self._read(address, request_iterator, stream, queue))
        try:
            async for response in queue:
                yield response
        finally:
            reading.cancel()
            if stream.disconnect(queue):
                self._driver.presence.on_rank_away(address)

    async def _read(
        self,
        address: Address,
        requests: AsyncIterator[rank_pb2.ConverseRequest],
        stream: AnyStream,
        queue: SendQueue[rank_pb2.ConverseResponse],
    ) -> None:
        spec = self._driver.core.spec(address["job_id"])
        user = spec.submitted_by if spec is not None else ""
        try:
            async for request in requests:
                self._driver.health.messages["rank", "in"] += 1
                stream.on_received(request.num_received)
                if queue.is_closed or not stream.is_news(request.seq):
                    continue  # another connection has taken its place, or it has come before
                if request.HasField("ready") and request.ready.timeline:
                    self._timelines.begin(address["job_id"], address["rank"])
                if request.HasField("spans"):
                    self._timelines.take_spans(address["job_id"], address["rank"], request.spans)
                else:
                    self._driver.handle(codec.rank_event(address, request), number=request.seq)
                    if request.HasField("stopped"):
                        self._driver.presence.on_stopped(address)
                    await self._driver.take(stream, request, user)
        except ElcheError as error:
            reason = f"rank {address['rank']} has sent an invalid message: {error}"
            self._driver.handle(RankFailed(**address, error=reason))
        except Exception as error:
            log.exception("job=%s a message of rank %d could not be handled", address["job_id"], address["rank"])
            reason = f"a message of rank {address['rank']} could not be handled: {error!r}"
            self._driver.handle(JobBroken(job_id=address["job_id"], reason=reason))
        finally:
            queue.close()
