"""The HTTP application: routes, and nothing decided in them."""

import asyncio
from collections.abc import Callable

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from elche_coordinator.web.guard import Guard


def new_app(registry: Callable[[], CollectorRegistry], token: str) -> ASGIApp:
    """The application. `registry` gives what is scraped, as of now."""

    async def healthz(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        present = registry()  # on the event loop, where nothing changes meanwhile
        return Response(await asyncio.to_thread(encode, present), headers={"content-type": content_type})

    routes = [Route("/healthz", healthz), Route("/metrics", metrics)]
    return Guard(Starlette(routes=routes), token)
