"""The gRPC services: translate, give to the driver, answer. Nothing is decided here."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from typing import Any

import grpc

from elche.errors import ElcheError, InvalidJob, NotAllowed, UnknownJob
from elche.knobs import KNOBS
from elche.script import check_arguments, check_environment
from elche.status import answering
from elche.token import HOW, is_bearer
from elche.v1 import (
    agent_pb2,
    agent_pb2_grpc,
    averaging_pb2,
    averaging_pb2_grpc,
    job_pb2,
    job_pb2_grpc,
    rank_pb2,
    rank_pb2_grpc,
    store_pb2,
    store_pb2_grpc,
)
from elche_coordinator import codec
from elche_coordinator.averaging import Averager, GivenUp, take_part
from elche_coordinator.core.describe import JobView
from elche_coordinator.core.messages.events import (
    JobBroken,
    JobCancelled,
    LoopAttached,
    RankFailed,
    RankStarted,
    StacksTold,
)
from elche_coordinator.core.messages.ids import AgentId, Generation, Incarnation, JobId, Rank, RoundId
from elche_coordinator.core.messages.spec import JobSpec
from elche_coordinator.core.records.ranks import Address
from elche_coordinator.driver import Driver
from elche_coordinator.history import History
from elche_coordinator.logs import stream_logs
from elche_coordinator.mailbox import Mailbox
from elche_coordinator.models import best_weights
from elche_coordinator.rendezvous import Rendezvous
from elche_coordinator.requests import ask_for_model, new_job_id, pause, request_checkpoint, resume, submit
from elche_coordinator.timelines import Timelines
from elche_coordinator.transfers import Transfers

log = logging.getLogger(__name__)

MAX_SOURCE_BYTES = 1 << 20
MAX_LOOP_RANKS = 10_000
MAX_PAGE = 1000
"""Jobs in one answer."""
PAGE_BYTES = 2 << 20
"""Of one answer, about."""
VIEW_EVERY_S = 0.25
MAX_ECHO = 100
"""Characters of what a client has sent that an error repeats."""
DECIDED = ("stopping", "succeeded", "failed", "cancelled")
"""How a job in one of these states ends does not change any more."""
SECRET = "elche-secret"
"""Metadata key of a rank's secret."""

Context = grpc.aio.ServicerContext[Any, Any]


class JobServicer(job_pb2_grpc.JobServiceServicer):
    """Submits, lists, watches and cancels jobs."""

    def __init__(self, driver: Driver, history: History, transfers: Transfers, timelines: Timelines) -> None:
        self._timelines = timelines
        self._driver = driver
        self._history = history
        self._transfers = transfers

    async def SubmitJob(self, request: job_pb2.SubmitJobRequest, context: Context) -> job_pb2.SubmitJobResponse:  # noqa: N802
        async with answering(context):
            known = self._driver.submitted_as(request.key) or self._history.submitted_as(request.key)
            if known:
                await self._driver.durable(known)
                return job_pb2.SubmitJobResponse(job_id=known)
            _check_spec(request.spec)
            job_id = await submit(self._driver, codec.spec(request.spec), request.key)
        return job_pb2.SubmitJobResponse(job_id=job_id)

    async def ListJobs(self, request: job_pb2.ListJobsRequest, context: Context) -> job_pb2.ListJobsResponse:  # noqa: N802
        async with answering(context):
            first = _page_start(request.page_token)
            views = [*self._history.views(), *self._driver.views()]
            page = job_pb2.ListJobsResponse()
            left_bytes = PAGE_BYTES
            for view in views[first : first + min(request.page_size or MAX_PAGE, MAX_PAGE)]:
                message = _view_message(view)
                left_bytes -= message.ByteSize()
                if left_bytes < 0 and page.jobs:
                    break
                page.jobs.append(message)
            if first + len(page.jobs) < len(views):
                page.next_page_token = str(first + len(page.jobs))
        return page

    async def WatchJob(  # noqa: N802
        self, request: job_pb2.WatchJobRequest, context: Context
    ) -> AsyncIterator[job_pb2.WatchJobResponse]:
        async with answering(context):
            self._known_view(request.job_id)
        box = self._driver.watch(request.job_id)
        try:
            async for response in self._responses(request.job_id, box):
                yield response
        finally:
            self._driver.unwatch(request.job_id, box)

    async def CancelJob(self, request: job_pb2.CancelJobRequest, context: Context) -> job_pb2.CancelJobResponse:  # noqa: N802
        async with answering(context):
            before = self._known_view(request.job_id).state
            self._driver.handle(JobCancelled(job_id=JobId(request.job_id)))
            await self._driver.durable(request.job_id)
        return job_pb2.CancelJobResponse(changed=before not in DECIDED, state=codec.STATES[before])

    async def ResumeJob(self, request: job_pb2.ResumeJobRequest, context: Context) -> job_pb2.ResumeJobResponse:  # noqa: N802
        async with answering(context):
            _check_settings(request.settings)
            view = self._known_view(request.job_id)
            job_id, path = await resume(self._driver, self._history, view, request.settings, request.submitted_by)
        return job_pb2.ResumeJobResponse(job_id=job_id, checkpoint=path)

    async def CheckpointJob(  # noqa: N802
        self, request: job_pb2.CheckpointJobRequest, context: Context
    ) -> job_pb2.CheckpointJobResponse:
        async with answering(context):
            request_checkpoint(self._driver, self._known_view(request.job_id))
        return job_pb2.CheckpointJobResponse()

    async def PauseJob(self, request: job_pb2.PauseJobRequest, context: Context) -> job_pb2.PauseJobResponse:  # noqa: N802
        async with answering(context):
            view = self._known_view(request.job_id)
            is_open = view.state not in DECIDED and (view.state == "paused") != request.is_paused
            if is_open:
                pause(self._driver, view, is_paused=request.is_paused)
        return job_pb2.PauseJobResponse(changed=is_open, state=codec.STATES[view.state])

    async def FetchModel(  # noqa: N802
        self, request: job_pb2.FetchModelRequest, context: Context
    ) -> AsyncIterator[job_pb2.FetchModelResponse]:
        async with answering(context):
            view = self._known_view(request.job_id)
            if request.best:
                async for data in best_weights(view, self._driver, self._transfers):
                    yield job_pb2.FetchModelResponse(data=data)
                return
            transfer = ask_for_model(self._driver, self._history, self._transfers, view)
            async with aclosing(self._transfers.chunks(transfer)) as chunks:
                async for data in chunks:
                    yield job_pb2.FetchModelResponse(data=data)

    async def StreamLogs(  # noqa: N802
        self, request: job_pb2.StreamLogsRequest, context: Context
    ) -> AsyncIterator[job_pb2.StreamLogsResponse]:
        async with answering(context):
            parts = stream_logs(request, lambda: self._known_view(request.job_id), self._driver, self._transfers)
            async with aclosing(parts):
                async for part in parts:
                    yield part

    async def FetchTimeline(  # noqa: N802
        self, request: job_pb2.FetchTimelineRequest, context: Context
    ) -> AsyncIterator[job_pb2.FetchTimelineResponse]:
        async with answering(context):
            self._known_view(request.job_id)
            async for data in self._timelines.chunks(request.job_id):
                yield job_pb2.FetchTimelineResponse(data=data)

    async def _responses(
        self, job_id: str, box: Mailbox[job_pb2.WatchJobResponse]
    ) -> AsyncIterator[job_pb2.WatchJobResponse]:
        """A view now and then, everything else as it happens, and the result last."""
        yield job_pb2.WatchJobResponse(view=_view_message(self._known_view(job_id)))
        ended = self._driver.result(job_id) or self._history.result(job_id)
        if ended is not None:
            yield codec.watch_message(ended)
            return
        getting = asyncio.ensure_future(box.get())
        next_view_s = time.monotonic() + VIEW_EVERY_S
        try:
            while True:
                done, _ = await asyncio.wait({getting}, timeout=max(0.0, next_view_s - time.monotonic()))
                if time.monotonic() >= next_view_s:  # also where something happens more often than that
                    yield job_pb2.WatchJobResponse(view=_view_message(self._known_view(job_id)))
                    next_view_s = time.monotonic() + VIEW_EVERY_S
                if not done:
                    continue
                if (item := getting.result()) is None:
                    return
                if item.HasField("result"):
                    yield job_pb2.WatchJobResponse(view=_view_message(self._known_view(job_id)))
                yield item
                getting = asyncio.ensure_future(box.get())
        finally:
            getting.cancel()

    def _known_view(self, job_id: str) -> JobView:
        view = self._driver.view(job_id) or self._history.view(job_id)
        if view is None:
            raise UnknownJob(job_id)
        return view


class AgentServicer(agent_pb2_grpc.AgentServiceServicer):
    """Hosts that offer devices."""

    def __init__(self, driver: Driver, transfers: Transfers) -> None:
        self._driver = driver
        self._transfers = transfers
        self._count = 0

    async def Attend(  # noqa: N802
        self, request_iterator: AsyncIterator[agent_pb2.AttendRequest], context: Context
    ) -> AsyncIterator[agent_pb2.AttendResponse]:
        first = await anext(request_iterator, None)
        if first is None or not first.HasField("hello"):
            raise InvalidJob("an agent's first message must be its hello")
        self._count += 1
        agent_id = AgentId(f"agent-{self._count}")
        box = self._driver.attend(agent_id, first.hello.host, first.hello)
        reading = asyncio.ensure_future(self._read(agent_id, request_iterator, box))
        try:
            async for response in box:
                yield response
            if reading.done():
                reading.result()  # raises what was wrong with the agent's last message
        finally:
            reading.cancel()
            self._driver.leave(agent_id)

    async def _read(
        self,
        agent_id: AgentId,
        requests: AsyncIterator[agent_pb2.AttendRequest],
        box: Mailbox[agent_pb2.AttendResponse],
    ) -> None:
        try:
            async for request in requests:
                self._driver.pulse.messages["agent", "in"] += 1
                match request.WhichOneof("message"):
                    case "rank_started":
                        started = request.rank_started
                        address = _address(started)
                        self._driver.handle(RankStarted(**address, agent_id=agent_id, log_path=started.log_path))
                    case "rank_exited":
                        exited = request.rank_exited
                        self._driver.handle(codec.rank_exited(_address(exited), agent_id, exited))
                    case "rank_stacks":
                        told = request.rank_stacks
                        self._driver.handle(StacksTold(**_address(told), agent_id=agent_id, text=told.text))
        except ElcheError as error:
            log.warning("agent=%s has sent what cannot be taken in, and is cut off: %s", agent_id, error)
            raise
        finally:
            box.close()

    async def Deliver(  # noqa: N802
        self, request_iterator: AsyncIterator[agent_pb2.DeliverRequest], context: Context
    ) -> agent_pb2.DeliverResponse:
        transfer = ""
        async with answering(context):
            async for request in request_iterator:
                transfer = transfer or request.transfer
                if request.error:
                    await self._transfers.deliver(transfer, InvalidJob(request.error))
                    return agent_pb2.DeliverResponse()
                await self._transfers.deliver(transfer, request.data)  # none: the host says that it is there
            await self._transfers.deliver(transfer, None)
        return agent_pb2.DeliverResponse()


class RankServicer(rank_pb2_grpc.RankServiceServicer):
    """Ranks in training."""

    def __init__(self, driver: Driver, timelines: Timelines) -> None:
        self._driver = driver
        self._timelines = timelines

    async def Attach(self, request: rank_pb2.AttachRequest, context: Context) -> rank_pb2.AttachResponse:  # noqa: N802
        async with answering(context):
            if not 1 <= len(request.ranks) <= MAX_LOOP_RANKS:
                raise InvalidJob(f"a loop has 1 to {MAX_LOOP_RANKS} ranks, not {len(request.ranks)}")
            job_id = new_job_id(request.name)
            spec = JobSpec(
                name=request.name,
                source="",
                file_name=request.name,
                num_ranks=len(request.ranks),
                output_dir=request.checkpoint_dir,
                resume=request.resumed,
                is_loop=True,
                submitted_by=request.submitted_by,
            )
            attached = LoopAttached(
                job_id=job_id,
                spec=spec,
                ranks=tuple((rank.host, rank.device) for rank in request.ranks),
                policy=request.policy,
                submitted_at=time.time(),
            )
            of_ranks = self._driver.attach(attached)
            await self._driver.durable(job_id)
        return rank_pb2.AttachResponse(job_id=job_id, secrets=of_ranks)

    async def Converse(  # noqa: N802
        self, request_iterator: AsyncIterator[rank_pb2.ConverseRequest], context: Context
    ) -> AsyncIterator[rank_pb2.ConverseResponse]:
        async with answering(context):
            address = _authenticated(self._driver, context)
            box = self._driver.open_session(address)
            if box is None:
                raise NotAllowed("this secret has opened a session before")
        reading = asyncio.ensure_future(self._read(address, request_iterator, box))
        try:
            async for response in box:
                yield response
        finally:
            reading.cancel()
            self._driver.close_session(address)

    async def _read(
        self,
        address: Address,
        requests: AsyncIterator[rank_pb2.ConverseRequest],
        box: Mailbox[rank_pb2.ConverseResponse],
    ) -> None:
        try:
            async for request in requests:
                self._driver.pulse.messages["rank", "in"] += 1
                if request.HasField("ready") and request.ready.timeline:
                    self._timelines.begin(address["job_id"], address["rank"])
                if request.HasField("spans"):
                    self._timelines.take_spans(address["job_id"], address["rank"], request.spans)
                event = codec.rank_event(address, request)
                if event is not None:
                    self._driver.handle(event)
        except ElcheError as error:
            reason = f"rank {address['rank']} has sent what cannot be taken in: {error}"
            self._driver.handle(RankFailed(**address, error=reason))
        except Exception as error:
            log.exception("job=%s a message of rank %d could not be taken in", address["job_id"], address["rank"])
            reason = f"a message of rank {address['rank']} could not be taken in: {error!r}"
            self._driver.handle(JobBroken(job_id=address["job_id"], reason=reason))
        finally:
            box.close()


class AveragingServicer(averaging_pb2_grpc.AveragingServiceServicer):
    """Averaging for ranks that cannot reach each other; a rank takes part in its own job's open rounds only."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._averager = Averager()
        driver.on_ended(self._averager.drop)

    async def Average(  # noqa: N802
        self, request_iterator: AsyncIterator[averaging_pb2.AverageRequest], context: Context
    ) -> AsyncIterator[averaging_pb2.AverageResponse]:
        async with answering(context):
            address = _authenticated(self._driver, context)
            first = await anext(request_iterator, None)
            join = first.join if first is not None else averaging_pb2.JoinRound()
            generation, round_id = Generation(join.generation), RoundId(join.round)
            seat = self._driver.seat(address, generation, round_id)
            if seat is None:
                raise GivenUp(f"round {round_id} is not open")
            position, size = seat
            meeting = self._averager.meeting(address["job_id"], round_id, size)
            async for data in take_part(meeting, position, request_iterator):
                yield averaging_pb2.AverageResponse(data=data)

    async def GetVerdict(  # noqa: N802
        self, request: averaging_pb2.GetVerdictRequest, context: Context
    ) -> averaging_pb2.GetVerdictResponse:
        async with answering(context):
            job_id = _authenticated(self._driver, context)["job_id"]
            is_complete = await self._averager.is_complete(job_id, RoundId(request.round))
        return averaging_pb2.GetVerdictResponse(is_complete=is_complete)


class StoreServicer(store_pb2_grpc.StoreServiceServicer):
    """The rendezvous store; a rank sees only its own job's table."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._tables: dict[str, Rendezvous] = {}
        driver.on_ended(self._drop)

    async def Set(self, request: store_pb2.SetRequest, context: Context) -> store_pb2.SetResponse:  # noqa: N802
        async with answering(context):
            self._table(context).set(request.key, request.value)
        return store_pb2.SetResponse()

    async def Get(self, request: store_pb2.GetRequest, context: Context) -> store_pb2.GetResponse:  # noqa: N802
        async with answering(context):
            value = await self._table(context).get(request.key, _seconds(request.timeout))
        return store_pb2.GetResponse(value=value)

    async def Add(self, request: store_pb2.AddRequest, context: Context) -> store_pb2.AddResponse:  # noqa: N802
        async with answering(context):
            value = self._table(context).add(request.key, request.amount)
        return store_pb2.AddResponse(value=value)

    async def Wait(self, request: store_pb2.WaitRequest, context: Context) -> store_pb2.WaitResponse:  # noqa: N802
        async with answering(context):
            await self._table(context).wait(list(request.keys), _seconds(request.timeout))
        return store_pb2.WaitResponse()

    async def Check(self, request: store_pb2.CheckRequest, context: Context) -> store_pb2.CheckResponse:  # noqa: N802
        async with answering(context):
            exist = self._table(context).has(request.keys)
        return store_pb2.CheckResponse(exist=exist)

    async def CompareSet(  # noqa: N802
        self, request: store_pb2.CompareSetRequest, context: Context
    ) -> store_pb2.CompareSetResponse:
        async with answering(context):
            value = self._table(context).compare_set(request.key, request.expected, request.desired)
        return store_pb2.CompareSetResponse(value=value)

    async def DeleteKey(  # noqa: N802
        self, request: store_pb2.DeleteKeyRequest, context: Context
    ) -> store_pb2.DeleteKeyResponse:
        async with answering(context):
            deleted = self._table(context).delete(request.key)
        return store_pb2.DeleteKeyResponse(deleted=deleted)

    def _drop(self, job_id: JobId) -> None:
        table = self._tables.pop(job_id, None)
        if table is not None:
            table.close()

    def _table(self, context: Context) -> Rendezvous:
        job_id = _authenticated(self._driver, context)["job_id"]
        return self._tables.setdefault(job_id, Rendezvous())


class TokenCheck(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stub only
    """Lets clients and agents in by a shared token; ranks prove themselves by their own secrets."""

    def __init__(self, token: str) -> None:
        self._token = token

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Any],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Answers UNAUTHENTICATED to a call of a client or agent without the token."""
        method = str(handler_call_details.method)
        if method.startswith(("/elche.v1.JobService/", "/elche.v1.AgentService/", "/elche.v1.RankService/Attach")):
            given = dict(handler_call_details.invocation_metadata or ()).get("authorization", "")
            if not is_bearer(str(given), self._token):
                return _refusal(method)
        return await continuation(handler_call_details)


def _refusal(method: str) -> Any:
    text = f"the token is missing or wrong: {HOW}"

    async def refuse(_: Any, context: Context) -> Any:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, text)

    async def refuse_stream(_: Any, context: Context) -> AsyncIterator[Any]:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, text)
        yield

    if method.endswith("/Attend"):
        return grpc.stream_stream_rpc_method_handler(refuse_stream)
    if method.endswith("/Deliver"):
        return grpc.stream_unary_rpc_method_handler(refuse)
    if method.endswith(("/WatchJob", "/FetchModel", "/FetchTimeline", "/StreamLogs")):
        return grpc.unary_stream_rpc_method_handler(refuse_stream)
    return grpc.unary_unary_rpc_method_handler(refuse)


def _authenticated(driver: Driver, context: Context) -> Address:
    secret = dict(context.invocation_metadata() or ()).get(SECRET, "")
    address = driver.authenticate(str(secret))
    if address is None:
        raise NotAllowed("this rank is not known: its job has ended, or its secret is wrong")
    return address


def _address(message: agent_pb2.RankStarted | agent_pb2.RankExited | agent_pb2.RankStacks) -> Address:
    return {
        "job_id": JobId(message.job_id),
        "rank": Rank(message.rank),
        "incarnation": Incarnation(message.incarnation),
    }


def _check_spec(spec: job_pb2.JobSpec) -> None:
    """Raises `InvalidJob` for what no agent could run."""
    if not spec.source.strip():
        raise InvalidJob("the job's file is empty")
    if len(spec.source.encode()) > MAX_SOURCE_BYTES:
        raise InvalidJob(f"the job's file is larger than {MAX_SOURCE_BYTES >> 20} MiB")
    for name in ("name", "file_name", "output_dir", "resume"):
        if "\0" in getattr(spec, name):
            raise InvalidJob(f"{name} has a zero byte, which no path has")
    for rank, factor in spec.slow_factors.items():
        if not 1.0 <= factor < 1e6:
            raise InvalidJob(f"rank {rank} cannot be slowed {factor} times: the factor must be at least 1")
        if spec.num_ranks and rank >= spec.num_ranks:
            raise InvalidJob(f"there is no rank {rank} to slow: the job has {spec.num_ranks} ranks, from 0")
    _check_settings(spec.settings)
    check_arguments(spec.arguments)
    check_environment(spec.environment)


def _check_settings(settings: Mapping[str, str]) -> None:
    for name, text in settings.items():
        if name not in KNOBS:
            raise InvalidJob(f"there is no setting {_shortened(name)!r}; known are {', '.join(KNOBS)}")
        try:
            KNOBS[name].check(json.loads(text))
        except (ValueError, RecursionError):
            raise InvalidJob(f"the setting {name} is {_shortened(text)!r}, which is no JSON value") from None


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_ECHO else f"{text[:MAX_ECHO]}..."


def _page_start(token: str) -> int:
    if not token:
        return 0
    if not (token.isascii() and token.isdigit() and len(token) < 16):
        raise InvalidJob("the page token is none that a page before has given")
    return int(token)


def _view_message(view: JobView) -> job_pb2.JobView:
    """The view for clients; a job whose figures fit no message does not hide the others."""
    try:
        return codec.view_message(view)
    except (ValueError, TypeError, OverflowError, KeyError) as error:
        log.warning("job=%s cannot be shown: %r", view.job_id, error)
        return job_pb2.JobView(job_id=view.job_id, reason=f"cannot be shown: {error}")


def _seconds(duration: Any) -> float:
    return min(max(0.0, float(duration.seconds) + float(duration.nanos) / 1e9), 3600.0)
