"""The HTTP application: routes, and nothing decided in them."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from elche.errors import ElcheError, UnknownJob
from elche_coordinator.core.describe import JobView
from elche_coordinator.core.events import DrainRequested, JobCancelled
from elche_coordinator.core.ids import AgentId, JobId, Rank
from elche_coordinator.driver import Driver
from elche_coordinator.history import History
from elche_coordinator.metrics import MomentCollector
from elche_coordinator.requests import pause, request_checkpoint
from elche_coordinator.transfers import Transfers
from elche_coordinator.web import shapes
from elche_coordinator.web.guard import Guard
from elche_coordinator.web.recorder import JobRecording, Recorder

log = logging.getLogger(__name__)

PAGE = Path(__file__).parent / "page"
EVERY_S = 1.0
"""Between two views in the recording, and between two messages to a page."""
CHOOSE_EVERY_S = 60.0
"""How long charts show the same ranks of a job that has more than they can show."""
MAX_JOBS = 200
"""In the page's list: the newest."""
MAX_LOG_BYTES = 64 << 10


class Web:
    """The routes over what the coordinator knows. `record` runs beside the application."""

    def __init__(self, driver: Driver, history: History, transfers: Transfers, token: str) -> None:
        self._driver = driver
        self._history = history
        self._transfers = transfers
        self._recorder = Recorder()
        self._process = ProcessCollector(registry=None)
        self._stopping = asyncio.Event()
        driver.on_published(self._recorder.take_report)
        routes = [
            Route("/", self._page),
            Route("/healthz", self._healthz),
            Route("/metrics", self._metrics),
            Route("/api/stream", self._stream),
            Route("/api/jobs/{job}", self._answering(self._job)),
            Route("/api/jobs/{job}/log/{rank:int}", self._answering(self._log)),
            Route("/api/jobs/{job}/{verb}", self._answering(self._change_job), methods=["POST"]),
            Route("/api/agents/{agent}/{verb}", self._answering(self._change_agent), methods=["POST"]),
            Mount("/static", StaticFiles(directory=PAGE)),
        ]
        self.app: ASGIApp = Guard(Starlette(routes=routes), token)

    async def record(self) -> None:
        """Takes a view a second, without end."""
        while True:
            try:
                self._recorder.take_views(self._driver.views())
            except Exception:
                log.exception("a view could not be recorded")
            await asyncio.sleep(EVERY_S)

    def stop(self) -> None:
        """Ends the streams, so that the server can close."""
        self._stopping.set()

    # The page and the scrape

    async def _page(self, _: Request) -> Response:
        return FileResponse(PAGE / "index.html")

    async def _healthz(self, _: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def _metrics(self, request: Request) -> Response:
        registry = CollectorRegistry()
        registry.register(MomentCollector(self._driver.moment(self._history.views())))
        registry.register(self._process)
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(await asyncio.to_thread(encode, registry), headers={"content-type": content_type})

    # What the page shows

    async def _stream(self, request: Request) -> Response:
        """Server-sent events: all jobs in short, and one in full, each second; the first one has its whole past."""
        return StreamingResponse(self._messages(request.query_params.get("job", "")), media_type="text/event-stream")

    async def _messages(self, job_id: str) -> AsyncIterator[str]:
        since: float | None = None
        ranks: tuple[int, ...] = ()
        every_s, chosen_s, number = 0.0, 0.0, 0
        while not self._stopping.is_set():
            message: dict[str, Any] = {"jobs": self._summaries(), "agents": shapes.agents(*self._driver.hosts())}
            view = self._view(job_id)
            if view is not None:
                recording = self._recorder.jobs.get(job_id, JobRecording())
                message["job"] = shapes.detail(view)
                has_more = len(ranks) < min(len(view.ranks), shapes.MAX_CHARTED)
                if has_more or time.monotonic() - chosen_s > CHOOSE_EVERY_S:
                    chosen_s, chosen = time.monotonic(), shapes.charted(view)
                    since, ranks = (since, ranks) if chosen == ranks else (None, chosen)
                since, every_s = (since, every_s) if every_s == recording.every_s else (None, recording.every_s)
                message["series"] = shapes.series(recording, ranks, since)
                message["happenings"] = shapes.happenings(recording, number)
                since = recording.at[-1] if recording.at else since
                number = recording.happenings[-1].number if recording.happenings else number
            yield f"data: {json.dumps(message, separators=(',', ':'), allow_nan=False)}\n\n"
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), EVERY_S)

    def _summaries(self) -> list[dict[str, Any]]:
        """Newest first."""
        views = [*self._history.views(), *self._driver.views()]
        return [shapes.summary(view) for view in reversed(views[-MAX_JOBS:])]

    def _view(self, job_id: str) -> JobView | None:
        return self._driver.view(job_id) or self._history.view(job_id)

    def _known(self, request: Request) -> JobView:
        view = self._view(request.path_params["job"])
        if view is None:
            raise UnknownJob(request.path_params["job"])
        return view

    async def _job(self, request: Request) -> Response:
        view = self._known(request)
        recording = self._recorder.jobs.get(view.job_id, JobRecording())
        return JSONResponse({**shapes.detail(view), "happenings": shapes.happenings(recording)})

    async def _log(self, request: Request) -> Response:
        """The end of a rank's log, from its host."""
        view = self._known(request)
        transfer = self._transfers.begin()
        if not self._driver.ask_for_log(view.job_id, Rank(request.path_params["rank"]), transfer, MAX_LOG_BYTES):
            self._transfers.drop(transfer)
            raise ElcheError("the rank's host is not here any more; its log is there")
        text = b"".join([chunk async for chunk in self._transfers.chunks(transfer)])
        return PlainTextResponse(text.decode("utf-8", "replace"))

    # What the page changes

    async def _change_job(self, request: Request) -> Response:
        view = self._known(request)
        match request.path_params["verb"]:
            case "cancel":
                self._driver.handle(JobCancelled(job_id=JobId(view.job_id)))
            case "pause" | "unpause" as verb:
                pause(self._driver, view, is_paused=verb == "pause")
            case "checkpoint":
                request_checkpoint(self._driver, view)
            case _:
                return JSONResponse({"error": "there is no such action"}, 404)
        await self._driver.durable(view.job_id)
        return JSONResponse({})

    async def _change_agent(self, request: Request) -> Response:
        verb = request.path_params["verb"]
        if verb not in ("drain", "undrain"):
            return JSONResponse({"error": "there is no such action"}, 404)
        agent_id = AgentId(request.path_params["agent"])
        if agent_id not in self._driver.hosts()[0]:
            return JSONResponse({"error": f"no host attends as {agent_id}"}, 404)
        self._driver.handle(DrainRequested(agent_id=agent_id, is_drained=verb == "drain"))
        return JSONResponse({})

    def _answering(self, handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """The handler, with an `ElcheError` as an answer."""

        async def answer(request: Request) -> Response:
            try:
                return await handler(request)
            except UnknownJob as error:
                return JSONResponse({"error": str(error)}, 404)
            except ElcheError as error:
                return JSONResponse({"error": str(error)}, 409)

        return answer
