"""HTTP answers of a standby coordinator: that it is alive and ready, and that another one leads.

It needs neither tokens nor a database: it answers three paths only.
"""

from collections.abc import Callable

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route

METRICS = """\
# HELP elche_coordinator_leads Whether this coordinator leads; 0: it stands by.
# TYPE elche_coordinator_leads gauge
elche_coordinator_leads 0.0
"""
EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"


def waiting_page(problem: Callable[[], str]) -> Starlette:
    """The application. `problem` returns the reason why this one could not take over now; empty if it could."""

    async def readyz(_: Request) -> Response:
        return PlainTextResponse(f"{why}\n", 503) if (why := problem()) else PlainTextResponse("stands by\n")

    return Starlette(
        routes=[
            Route("/healthz", PlainTextResponse("ok\n")),
            Route("/readyz", readyz),
            Route("/metrics", PlainTextResponse(METRICS, media_type=EXPOSITION)),
            Mount("/", PlainTextResponse("this coordinator stands by: ask the one that leads\n", 503)),
        ]
    )
