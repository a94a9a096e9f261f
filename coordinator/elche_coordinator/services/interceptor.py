"""Authentication and authorisation of calls: clients and agents present a token, ranks the secret of their session."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, ExitStack, aclosing, nullcontext
from functools import partial
from typing import Any, NamedTuple

import grpc
from google.protobuf.message import Message

from elche.errors import Forbidden, NotAllowed, WrongVersion
from elche.protocol import KEY, RELEASE_KEY, problem
from elche.status import answering
from elche.token import HOW, Role
from elche_coordinator.access.audit import UNCHANGED, Audit
from elche_coordinator.access.credentials import Credentials
from elche_coordinator.access.tokens import Grant
from elche_coordinator.core.records.ranks import Address
from elche_coordinator.driver import Driver
from elche_coordinator.limits.backlog import Turns
from elche_coordinator.limits.budgets import (
    FILE_CALLS,
    FOLDER_CALL,
    MAX_AGENT_CALLS,
    MAX_AGENT_CALLS_OF_CALLER,
    MAX_CALLS,
    MAX_CALLS_OF_CALLER,
    MAX_CALLS_OF_RANK,
    MAX_FILE_CALLS,
    MAX_FILE_CALLS_OF_CALLER,
    MAX_FOLDER_CALLS_OF_RANK,
    MAX_RANK_CALLS,
    MAX_RANK_CALLS_OF_USER,
    MAX_RECEIVED_OF_CALLER,
    MAX_RECEIVED_OF_RANKS,
    MAX_REQUEST_BYTES,
    MAX_REQUEST_BYTES_OF_CALLER,
    MAX_REQUEST_BYTES_OF_RANKS,
    MAX_UNREAD_BYTES,
    MAX_UNREAD_BYTES_OF_CALLER,
    RECEIVE_S,
    TAKE_S,
    Budget,
)
from elche_coordinator.limits.processor import Processor
from elche_coordinator.limits.receiving import Receiving
from elche_coordinator.limits.releasing import Context, kind_of
from elche_coordinator.roles import CALLER, CHANGES, HAS_CHANGED, NEEDED, Caller
from elche_coordinator.services.validation import MAX_RANKS, NUM_RANKS
from elche_coordinator.streams.streams import Superseded

SECRET = "elche-secret"
"""Metadata key of a rank's secret."""
RECEIVED = "elche-heard"
"""Metadata key of the number of the last message that a rank has received; absent: it opens no second stream."""
STORE = "elche-store"
"""Metadata key of the id of the coordinator's store to which a rank was connected; absent: none yet."""

MAX_DIGITS = 20
"""Digits of a number in metadata that are read: Python refuses to read thousands."""
OWN_SERVICES = "/elche.v1."
"""Prefix of the methods of this project's services."""
SESSION = "/elche.v1.RankService/Converse"
"""The method of a rank's session, of which a newer one ends the one before it."""

ATTENDANCE = "/elche.v1.AgentService/Attend"
"""The method of an agent's session."""

Pause = Callable[[int], Awaitable[None]]
"""Waits until a message of so many bytes may be read."""
Counted = Callable[[int], AbstractContextManager[None]]
"""Context in which so many bytes are a caller's. Raises `TooMuch`."""
FIELDS = ("job_id", "host", "id", "name")
"""Fields that name a request's object, in the order in which they are tried."""


class RankCaller(NamedTuple):
    """The caller of a rank's call."""

    rank: str
    """The job and the rank."""
    user: str
    """The job's submitter."""
    num_ranks: Callable[[], int] = lambda: MAX_RANKS
    """Returns how many ranks the job has."""


class AccessInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stub only
    """Lets clients and agents call what their version speaks and their token's role allows, and notes in the audit log
    what they change. Ranks present their own secrets instead; `authenticate` raises an `ElcheError` for a wrong one.

    gRPC is told that each method takes a stream of messages, also where it takes one: otherwise it calls the handler
    only once the message is there, and a stranger's calls without one would stay open. Messages of refused callers are
    neither received nor unpacked.
    """

    def __init__(
        self,
        credentials: Credentials,
        audit: Audit,
        authenticate: Callable[[Context], "RankCaller"],
        *,
        take_s: float = TAKE_S,
        receive_s: float = RECEIVE_S,
        processor: Processor | None = None,
    ) -> None:
        self._authenticate = authenticate
        self._credentials = credentials
        self._audit = audit
        self._take_s = take_s
        self._processor = processor or Processor()
        self._rank_turns, self._agent_turns = Turns(), Turns()
        self._received = Receiving(MAX_RECEIVED_OF_CALLER, receive_s)
        self._received_of_ranks = Receiving(MAX_RECEIVED_OF_RANKS, receive_s)
        self._calls = Budget("calls", MAX_CALLS_OF_CALLER, MAX_CALLS)
        self._agent_calls = Budget("calls of workers", MAX_AGENT_CALLS_OF_CALLER, MAX_AGENT_CALLS)
        self._file_calls = Budget("calls that fetch or send files", MAX_FILE_CALLS_OF_CALLER, MAX_FILE_CALLS)
        self._rank_calls = Budget("calls of a rank", MAX_CALLS_OF_RANK, MAX_RANK_CALLS)
        self._user_calls = Budget("calls of your jobs' ranks", MAX_RANK_CALLS_OF_USER, MAX_RANK_CALLS)
        held = "bytes of requests of open calls"
        self._requests = Budget(held, MAX_REQUEST_BYTES_OF_CALLER, MAX_REQUEST_BYTES)
        self._requests_of_ranks = Budget(held, MAX_REQUEST_BYTES_OF_RANKS, MAX_REQUEST_BYTES)
        self._unread = Budget("bytes of answers not read", MAX_UNREAD_BYTES_OF_CALLER, MAX_UNREAD_BYTES)
        self._unread_of_ranks = Budget("bytes of answers not read", MAX_UNREAD_BYTES_OF_CALLER, MAX_UNREAD_BYTES)
        self._folder_calls = Budget("fetches of a rank's folder", MAX_FOLDER_CALLS_OF_RANK, MAX_RANK_CALLS)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Any],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The method's handler, which first lets the caller in or ends the call with UNIMPLEMENTED, UNAUTHENTICATED or
        PERMISSION_DENIED.
        """
        method = str(handler_call_details.method)
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        if method not in NEEDED:
            if method == SESSION:
                return self._session(handler)
            is_ranks = method.startswith(OWN_SERVICES)  # the health check is open
            return self._of_rank(handler, method) if is_ranks else handler
        return self._of_client(handler, method)

    async def _let_in(self, context: Context, method: str, during: ExitStack) -> Grant | None:
        """Sets `CALLER` and returns the grant of a made token. Ends the call if the caller may not make it, has too
        many open, or has used too much processor time; the call counts as open within `during`.
        """
        given = dict(context.invocation_metadata() or ())
        uris = context.auth_context().get("peer_uri", ())
        async with answering(context):
            if why := problem(str(given.get(KEY, "")), str(given.get(RELEASE_KEY, "of another release"))):
                raise WrongVersion(why)
            caller, grant = self._credentials.find(str(given.get("authorization", "")), uris)
            call = method.rpartition("/")[2]
            try:
                caller.require(NEEDED[method], call)
            except Forbidden as error:
                self._audit.note(caller, call, "", context.peer(), f"refused: {error}")
                raise
            # Counted before it waits for its turn: calls that wait are open, too.
            budget = self._agent_calls if NEEDED[method] is Role.AGENT else self._calls
            during.enter_context(budget.taking(caller.name))
            if call in FILE_CALLS:
                during.enter_context(self._file_calls.taking(caller.name))
            await self._processor.turn(_payer(caller, method))
        CALLER.set(caller)
        return grant

    async def _let_rank_in(self, context: Context, method: str, during: ExitStack) -> str:
        """Returns the rank's user. Ends the call if it presents no secret of a rank, or if the rank or its user has too
        many open; it counts as open within `during`.
        """
        async with answering(context):
            rank, user, _ = self._authenticate(context)
            during.enter_context(self._rank_calls.taking(rank))
            during.enter_context(self._user_calls.taking(user))
            if method.rpartition("/")[2] == FOLDER_CALL:
                during.enter_context(self._folder_calls.taking(rank))
        return user

    def _session(self, handler: Any) -> Any:
        """Wraps the handler of a rank's session, of which there is one of each rank: it is read at its user's turn."""

        async def stream(sent: Any, context: Context) -> AsyncIterator[Any]:
            async with answering(context):
                caller = self._authenticate(context)

            async def pause(num_bytes: int) -> None:
                await self._rank_turns.take(caller.user, num_bytes)
                # Anew for each message: the job may have got more ranks.
                NUM_RANKS.set(caller.num_ranks())

            async with aclosing(handler.stream_stream(_each_parsed(handler, sent, pause), context)) as responses:
                async for response in responses:
                    yield response

        return grpc.stream_stream_rpc_method_handler(stream, None, handler.response_serializer)

    def _of_rank(self, handler: Any, method: str) -> Any:
        """Wraps the handler of a rank's call with the check of its secret."""

        async def stream(sent: Any, context: Context) -> None:
            with ExitStack() as stack:
                user = await self._let_rank_in(context, method, stack)
                receiving, held = self._received_of_ranks.turn(user), partial(self._requests_of_ranks.taking, user)
                request = await _request(handler, sent, context, receiving, stack, held)
                unread = _no_bound if handler.response_streaming else partial(self._unread_of_ranks.taking, user)
                async with aclosing(_responses(handler, _function_of(handler), request, context)) as responses:
                    is_taken = await self._write_all(handler, responses, context, "", unread)
                if not is_taken:
                    await self._abort_unread(context)

        return _as_stream(handler, stream)

    def _of_client(self, handler: Any, method: str) -> Any:
        """Wraps the handler of a client's or agent's call, which ends with the caller's token. To gRPC a single answer
        is a stream, too, of which each part can be waited for: else gRPC holds what the caller does not take, and says
        nothing.
        """

        async def stream(sent: Any, context: Context) -> None:
            with ExitStack() as stack:
                grant = await self._let_in(context, method, stack)
                payer = _payer(CALLER.get(), method)
                async with (
                    aclosing(self._answers(handler, method, sent, context, stack)) as answers,
                    aclosing(self._processor.metered_parts(payer, answers)) as parts,
                    aclosing(parts if grant is None else self._each_until_ended(grant, parts, context)) as until_ended,
                ):
                    is_taken = await self._write_all(handler, until_ended, context, payer, self._unread_by(method))
                if not is_taken:
                    await self._abort_unread(context)

        return _as_stream(handler, stream)

    async def _answers(
        self, handler: Any, method: str, sent: Any, context: Context, during: ExitStack
    ) -> AsyncGenerator[Any, None]:
        """The answers to a client or agent that was let in, whose request counts within `during`."""
        caller, call, function = CALLER.get(), method.rpartition("/")[2], _function_of(handler)

        async def pause(num_bytes: int) -> None:
            if method == ATTENDANCE:
                await self._agent_turns.take(caller.name, num_bytes)
            await self._processor.pause(_payer(caller, method))

        receiving, held = self._received.turn(caller.name), partial(self._requests.taking, caller.name)
        request = await _request(handler, sent, context, receiving, during, held, pause)
        if call in CHANGES and handler.response_streaming:
            self._audit.note(caller, call, "", context.peer(), "begun")
        elif call in CHANGES:
            function = partial(self._audited, function, method)
        async with aclosing(_responses(handler, function, request, context)) as responses:
            async for response in responses:
                yield response

    async def _audited(self, inner: Any, method: str, request: Any, context: Context) -> Any:
        outcome = "failed"
        try:
            HAS_CHANGED.set(True)
            response = await inner(request, context)
            outcome = "done" if HAS_CHANGED.get() else UNCHANGED
            return response
        except grpc.aio.AbortError:
            outcome = f"refused: {context.details()}"
            raise
        finally:
            what = next((str(getattr(request, field)) for field in FIELDS if hasattr(request, field)), "")
            made = getattr(response, "job_id", "") if outcome in ("done", UNCHANGED) else ""
            self._audit.note(CALLER.get(), method.rpartition("/")[2], what or made, context.peer(), outcome)

    def _unread_by(self, method: str) -> Counted:
        """Counts what the present caller does not take; of agents, who take all, nothing."""
        is_agents = NEEDED[method] is Role.AGENT
        return _no_bound if is_agents else partial(self._unread.taking, CALLER.get().name)

    async def _write_all(
        self, handler: Any, responses: AsyncIterator[Any], context: Context, payer: str, unread: Counted
    ) -> bool:
        """Sends the responses; returns False if the caller does not take one for too long. Ends the call if there is
        too much that the caller does not take.
        """
        async for response in responses:
            num_bytes = response.ByteSize() if isinstance(response, Message) else len(response)
            try:
                async with answering(context):
                    with unread(num_bytes):
                        async with asyncio.timeout(self._take_s) as taking:
                            await self._processor.metered(payer, context.write(response))
            except TimeoutError:
                if taking.expired():
                    return False
                raise
            if not handler.response_streaming:  # nothing follows: the call does not wait for its caller's turn
                break
        return True

    async def _abort_unread(self, context: Context) -> None:
        """Ends a call of which nothing is taken. Waits for the caller, too, and the call counts as open so long."""
        await context.abort(grpc.StatusCode.CANCELLED, f"nothing of the stream was taken for {self._take_s:g} s")

    async def _each_until_ended(
        self, grant: Grant, responses: AsyncIterator[Any], context: Context
    ) -> AsyncGenerator[Any, None]:
        """The responses, until the token expires or is revoked; one that is there by then is still sent."""
        ending = asyncio.ensure_future(self._credentials.ended(grant))
        getting = asyncio.ensure_future(anext(responses, None))
        try:
            while True:
                await asyncio.wait({getting, ending}, return_when=asyncio.FIRST_COMPLETED)
                if getting.done():
                    if (response := getting.result()) is None:
                        return
                    yield response
                if ending.done():
                    await context.abort(grpc.StatusCode.UNAUTHENTICATED, f"the token has ended: {HOW}")
                getting = asyncio.ensure_future(anext(responses, None))
        finally:
            ending.cancel()
            getting.cancel()
            # A generator that runs cannot be closed: `aclosing` would raise. And the handler must have ended before its
            # call counts as closed.
            await asyncio.wait({getting})


def _payer(caller: Caller, method: str) -> str:
    """The caller that is charged for a call's processor time; empty: none, as for agents."""
    return "" if NEEDED[method] is Role.AGENT else caller.name


def _function_of(handler: Any) -> Any:
    return getattr(handler, kind_of(handler))


def _as_stream(handler: Any, stream: Callable[[Any, Context], Awaitable[None]]) -> Any:
    """The handler of a method that gRPC is told takes and gives streams (`AccessInterceptor`)."""
    serialize = handler.response_serializer if handler.response_streaming else None
    return grpc.stream_stream_rpc_method_handler(stream, None, serialize)


async def _responses(handler: Any, function: Any, request: Any, context: Context) -> AsyncGenerator[Any, None]:
    """What the handler's function answers. A single answer is serialized here and not by gRPC, so that the caller is
    charged for it.
    """
    if not handler.response_streaming:
        answer = await function(request, context)
        yield handler.response_serializer(answer) if handler.response_serializer else answer
        return
    async with aclosing(function(request, context)) as responses:
        async for response in responses:
            yield response


async def _at_once(num_bytes: int) -> None:
    pass


def _no_bound(num_bytes: int) -> AbstractContextManager[None]:
    return nullcontext()


async def _request(
    handler: Any,
    sent: Any,
    context: Context,
    receiving: AbstractAsyncContextManager[None],
    during: ExitStack,
    held: Counted,
    pause: Pause = _at_once,
) -> Any:
    """The request, or stream of requests, each after a `pause`. Called only after authentication, since receiving,
    parsing and validating cost memory and time. A call that ends without a message has an empty one; one whose message
    does not come within `receiving` is ended. Its bytes count as `held` within `during`.
    """
    if handler.request_streaming:
        return _each_parsed(handler, sent, pause)
    async with answering(context), receiving, aclosing(aiter(sent)) as messages:  # else it would keep the message
        data = await anext(messages, b"")
        during.enter_context(held(len(data)))
    return handler.request_deserializer(data)


async def _each_parsed(handler: Any, sent: Any, pause: Pause) -> AsyncIterator[Any]:
    async for one in sent:
        await pause(len(one))
        yield handler.request_deserializer(one)


def authenticated(driver: Driver, context: Context) -> Address:
    """The rank whose secret the call presents. Raises `NotAllowed`, and `Superseded` for a rank of another store."""
    metadata = dict(context.invocation_metadata() or ())
    if metadata.get(STORE, driver.identity.id) != driver.identity.id:
        raise Superseded("the rank is another coordinator's; it waits for that")
    address = driver.secrets.read(str(metadata.get(SECRET, "")))
    stream = None if address is None else driver.streams.of_rank(address)
    if address is None or not driver.core.is_there(address) or (stream is not None and stream.is_over):
        raise NotAllowed("unknown rank: others train on without it, its job has ended, or its secret is wrong")
    return address


def rank_caller(driver: Driver, context: Context) -> RankCaller:
    """The rank and the user whose budgets a rank's call uses. Raises as `authenticated` does."""
    address = authenticated(driver, context)
    job_id = address["job_id"]
    spec = driver.core.spec(job_id)
    num_ranks = partial(driver.core.num_ranks, job_id)
    return RankCaller(f"{job_id} {address['rank']}", spec.submitted_by if spec else "", num_ranks)


def num_received_of(context: Context) -> int | None:
    """The number of the last message that the caller has received; None if it will open no second stream."""
    received = str(dict(context.invocation_metadata() or ()).get(RECEIVED, ""))
    return min(int(received[:MAX_DIGITS]), 2**53) if received.isascii() and received.isdigit() else None
