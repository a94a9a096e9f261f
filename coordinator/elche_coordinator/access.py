"""Who may call what: clients and agents present a token, ranks the secret of their session."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, suppress
from math import isfinite
from typing import Any

import grpc

from elche.errors import Forbidden, NotAllowed
from elche.protocol import KEY, RELEASE_KEY, problem
from elche.token import BEARER, HOW, is_bearer
from elche_coordinator.audit import Audit
from elche_coordinator.core.records.ranks import Address
from elche_coordinator.driver import Driver
from elche_coordinator.roles import CALLER, CHANGES, NEEDED, Caller
from elche_coordinator.streams import Superseded
from elche_coordinator.tokens import Grant, Tokens

SECRET = "elche-secret"
"""Metadata key of a rank's secret."""
HEARD = "elche-heard"
"""Metadata key of the number of the last message that a rank has heard; absent: it will open no second stream."""
STORE = "elche-store"
"""Metadata key of the coordinator's store that a rank has been with; absent: none yet."""

Context = grpc.aio.ServicerContext[Any, Any]
FIELDS = ("job_id", "host", "id", "name")
"""Which field of a request says what it is about."""


class Credentials:
    """Tells callers by what they present: the coordinator's own token, or one that was made with `elche token`.

    Without an own token the coordinator listens on loopback, and whoever reaches it may do everything.
    """

    def __init__(self, own: str, tokens: Tokens) -> None:
        self._own = own
        self._tokens = tokens

    @property
    def are_needed(self) -> bool:
        """Whether callers must present a token."""
        return bool(self._own)

    def find(self, authorization: str) -> tuple[Caller, Grant | None]:
        """Who presents this header, and the grant if it is a token that was made. Raises `NotAllowed`."""
        if not self._own or is_bearer(authorization, self._own):
            return Caller(), None
        grant = self._tokens.find(authorization.removeprefix(BEARER))
        if grant is None:
            raise NotAllowed(f"the token is missing, wrong, expired or revoked: {HOW}")
        return grant.token.caller, grant

    async def ended(self, grant: Grant) -> None:
        """Returns once the token has expired or is revoked."""
        left_s = self._tokens.left_s(grant)
        with suppress(TimeoutError):
            async with asyncio.timeout(left_s if isfinite(left_s) else None):
                await grant.revoked.wait()


class AccessInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stub only
    """Lets clients and agents call what their version speaks and their token's role allows, and notes in the audit log
    what they change. Ranks present their own secrets instead, to the services.
    """

    def __init__(self, credentials: Credentials, audit: Audit) -> None:
        self._credentials = credentials
        self._audit = audit

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Any],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The method's handler, or one that answers UNIMPLEMENTED, UNAUTHENTICATED or PERMISSION_DENIED."""
        method = str(handler_call_details.method)
        needed = NEEDED.get(method)
        handler = await continuation(handler_call_details)
        if needed is None or handler is None:
            return handler
        given = dict(handler_call_details.invocation_metadata or ())
        if why := problem(str(given.get(KEY, "")), str(given.get(RELEASE_KEY, "of another release"))):
            return _refusal(handler, grpc.StatusCode.UNIMPLEMENTED, why)
        call = method.rpartition("/")[2]
        try:
            caller, grant = self._credentials.find(str(given.get("authorization", "")))
        except NotAllowed as error:
            return _refusal(handler, grpc.StatusCode.UNAUTHENTICATED, str(error))
        try:
            caller.require(needed, call)
        except Forbidden as error:
            self._audit.note(caller, call, "", "", f"refused: {error}")
            return _refusal(handler, grpc.StatusCode.PERMISSION_DENIED, str(error))
        CALLER.set(caller)
        if call in CHANGES:
            return self._audited(handler, call, caller)
        return handler if grant is None else self._ending(handler, grant)

    def _audited(self, handler: Any, call: str, caller: Caller) -> Any:
        async def change(request: Any, context: Context) -> Any:
            outcome = "failed"
            try:
                response = await handler.unary_unary(request, context)
                outcome = "done"
                return response
            except grpc.aio.AbortError:
                outcome = f"refused: {context.details()}"
                raise
            finally:
                what = next((str(getattr(request, field)) for field in FIELDS if hasattr(request, field)), "")
                made = getattr(response, "job_id", "") if outcome == "done" else ""
                self._audit.note(caller, call, what or made, context.peer(), outcome)

        return grpc.unary_unary_rpc_method_handler(change, handler.request_deserializer, handler.response_serializer)

    def _ending(self, handler: Any, grant: Grant) -> Any:
        """The handler; a stream of responses ends with the token."""
        inner = handler.stream_stream or handler.unary_stream
        if inner is None:
            return handler

        async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
            ending = asyncio.ensure_future(self._credentials.ended(grant))
            async with aclosing(inner(request, context)) as responses:
                getting = asyncio.ensure_future(anext(responses, None))
                try:
                    while True:
                        await asyncio.wait({getting, ending}, return_when=asyncio.FIRST_COMPLETED)
                        if ending.done():
                            await context.abort(grpc.StatusCode.UNAUTHENTICATED, f"the token has ended: {HOW}")
                        if (response := getting.result()) is None:
                            return
                        yield response
                        getting = asyncio.ensure_future(anext(responses, None))
                finally:
                    ending.cancel()
                    getting.cancel()
                    await asyncio.wait({getting})

        make = grpc.stream_stream_rpc_method_handler if handler.stream_stream else grpc.unary_stream_rpc_method_handler
        return make(stream, handler.request_deserializer, handler.response_serializer)


def _refusal(handler: Any, code: grpc.StatusCode, text: str) -> Any:
    """A handler of the same kind that refuses."""

    async def refuse(_: Any, context: Context) -> Any:
        await context.abort(code, text)

    async def refuse_stream(_: Any, context: Context) -> AsyncIterator[Any]:
        await context.abort(code, text)
        yield

    if handler.stream_stream:
        return grpc.stream_stream_rpc_method_handler(refuse_stream)
    if handler.stream_unary:
        return grpc.stream_unary_rpc_method_handler(refuse)
    if handler.unary_stream:
        return grpc.unary_stream_rpc_method_handler(refuse_stream)
    return grpc.unary_unary_rpc_method_handler(refuse)


def authenticated(driver: Driver, context: Context) -> Address:
    """The rank whose secret the call presents. Raises `NotAllowed`, and `Superseded` for a rank of another store."""
    metadata = dict(context.invocation_metadata() or ())
    if metadata.get(STORE, driver.store.id) != driver.store.id:
        raise Superseded("the rank is another coordinator's; it waits for that")
    address = driver.authenticate(str(metadata.get(SECRET, "")))
    if address is None:
        raise NotAllowed("unknown rank: its job has ended, or its secret is wrong")
    return address


def num_heard_of(context: Context) -> int | None:
    """The number of the last message that the caller has heard; None when it will open no second stream."""
    heard = str(dict(context.invocation_metadata() or ()).get(HEARD, ""))
    return min(int(heard), 2**53) if heard.isascii() and heard.isdigit() else None
