"""The standard gRPC health service, for probes."""

from collections.abc import AsyncIterator

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1._async import HealthServicer


class Health(HealthServicer):  # type: ignore[misc]  # it has no types
    """Answers `Check`. There is no `Watch`: callers are not authenticated, and streams would stay open."""

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Health.Watch is not offered: call Check now and then")
        yield health_pb2.HealthCheckResponse()  # the `yield` makes this a generator
