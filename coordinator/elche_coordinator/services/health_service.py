"""The standard gRPC health service, for probes."""

from collections.abc import AsyncIterator

import grpc
from grpc_health.v1 import health_pb2

NAME = "grpc.health.v1.Health"

Context = grpc.aio.ServicerContext[object, object]


def health_handler() -> "grpc.GenericRpcHandler[bytes, health_pb2.HealthCheckResponse]":
    """Answers `Check` with SERVING, whichever service the call names. Callers are not authenticated, so their messages
    are never read: both methods take a stream of requests, for which gRPC calls them before any message has come.
    `Watch` is refused, since its streams would stay open.
    """

    async def check(_sent: object, _context: Context) -> health_pb2.HealthCheckResponse:
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)

    async def watch(_sent: object, context: Context) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Health.Watch is not offered: call Check now and then")
        yield health_pb2.HealthCheckResponse()  # the `yield` makes this a generator

    serialize = health_pb2.HealthCheckResponse.SerializeToString
    methods = {
        "Check": grpc.stream_unary_rpc_method_handler(check, None, serialize),
        "Watch": grpc.stream_stream_rpc_method_handler(watch, None, serialize),
    }
    return grpc.method_handlers_generic_handler(NAME, methods)
