"""Who may call what: clients and agents present the shared token, ranks the secret of their session."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from elche.errors import NotAllowed
from elche.protocol import KEY, RELEASE_KEY, problem
from elche.token import HOW, is_bearer
from elche_coordinator.core.records.ranks import Address
from elche_coordinator.driver import Driver
from elche_coordinator.streams import Superseded

SECRET = "elche-secret"
"""Metadata key of a rank's secret."""
HEARD = "elche-heard"
"""Metadata key of the number of the last message that a rank has heard; absent: it will open no second stream."""
STORE = "elche-store"
"""Metadata key of the coordinator's store that a rank has been with; absent: none yet."""

OF_THE_TOKEN = (
    "/elche.v1.JobService/",
    "/elche.v1.AgentService/",
    "/elche.v1.RankService/Attach",
    "/elche.v1.BundleService/FindBundle",
    "/elche.v1.BundleService/UploadBundle",
)
"""Calls of clients and agents."""

Context = grpc.aio.ServicerContext[Any, Any]


class VersionInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stub only
    """Refuses clients and agents of versions that this coordinator does not speak."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Any],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Answers UNIMPLEMENTED to such a call, and says which of the two is to be upgraded."""
        method = str(handler_call_details.method)
        if method.startswith(OF_THE_TOKEN):
            given = dict(handler_call_details.invocation_metadata or ())
            if why := problem(str(given.get(KEY, "")), str(given.get(RELEASE_KEY, "of another release"))):
                return _refusal(method, grpc.StatusCode.UNIMPLEMENTED, why)
        return await continuation(handler_call_details)


class TokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stub only
    """Requires the shared token of clients and agents. Ranks present their own secrets instead."""

    def __init__(self, token: str) -> None:
        self._token = token

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Any],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Answers UNAUTHENTICATED to a call of a client or an agent without the token."""
        method = str(handler_call_details.method)
        if method.startswith(OF_THE_TOKEN):
            given = dict(handler_call_details.invocation_metadata or ()).get("authorization", "")
            if not is_bearer(str(given), self._token):
                return _refusal(method, grpc.StatusCode.UNAUTHENTICATED, f"the token is missing or wrong: {HOW}")
        return await continuation(handler_call_details)


def _refusal(method: str, code: grpc.StatusCode, text: str) -> Any:
    async def refuse(_: Any, context: Context) -> Any:
        await context.abort(code, text)

    async def refuse_stream(_: Any, context: Context) -> AsyncIterator[Any]:
        await context.abort(code, text)
        yield

    if method.endswith("/Attend"):
        return grpc.stream_stream_rpc_method_handler(refuse_stream)
    if method.endswith(("/Deliver", "/UploadBundle")):
        return grpc.stream_unary_rpc_method_handler(refuse)
    if method.endswith(("/WatchJob", "/FetchModel", "/FetchTimeline", "/FetchJournal", "/StreamLogs")):
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
