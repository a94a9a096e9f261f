"""The HTTP application: the routes of the page and of /metrics."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from elche.errors import ElcheError, Forbidden, InvalidJob, UnknownJob
from elche.v1 import agent_pb2
from elche_coordinator.access.audit import Audit
from elche_coordinator.access.credentials import Credentials
from elche_coordinator.access.upkeep import Upkeep
from elche_coordinator.archive.artifacts import Artifacts
from elche_coordinator.archive.catalogue import JobCatalogue
from elche_coordinator.core.describe import JobView
from elche_coordinator.core.messages.ids import AgentId
from elche_coordinator.driver import Driver
from elche_coordinator.roles import CALLER
from elche_coordinator.services import requests
from elche_coordinator.services.validation import MAX_RANKS
from elche_coordinator.storage.bundles import Bundles
from elche_coordinator.streams.transfers import Rest
from elche_coordinator.telemetry.journal_files import JournalFiles
from elche_coordinator.telemetry.metrics import SnapshotCollector, snapshot
from elche_coordinator.telemetry.scrapes import Scrapes
from elche_coordinator.web import payloads
from elche_coordinator.web.access import LET_IN, AccessControl
from elche_coordinator.web.downloads import Download, DownloadResponse, Downloads
from elche_coordinator.web.page_stream import PageStream
from elche_coordinator.web.recorder import JobRecording, Recorder
from elche_coordinator.web.recordings import Recordings, SavedRecording

log = logging.getLogger(__name__)

PAGE = Path(__file__).parent / "page"
FETCHED = ("model", "journal")
"""Actions that change nothing."""
EVERY_S = 1.0
"""Interval of recorded views, and of messages to a page."""
SAVE_RUNNING_EVERY_S = 5.0
"""Least seconds between saves of recordings of running jobs."""
MAX_LOADED = 8
"""Recordings of earlier runs that are kept in memory."""
MAX_DIGITS = 6
"""Most digits of a number in a query, so that none is converted that is absurdly long."""
MAX_LOG_BYTES = 64 << 10
"""Largest end of a log that the page shows."""


class Web:
    """The routes. `record` runs as a task beside the application."""

    def __init__(
        self,
        driver: Driver,
        catalogue: JobCatalogue,
        credentials: Credentials,
        audit: Audit,
        artifacts: Artifacts,
        recordings: Recordings,
        journals: JournalFiles,
        bundles: Bundles,
        upkeep: Upkeep,
    ) -> None:
        self._driver = driver
        self._catalogue = catalogue
        self._artifacts = artifacts
        self._upkeep = upkeep
        self._recordings = recordings
        self._recorder = Recorder(load=self._recorded_before)
        self._views: list[JobView] = []
        """The jobs of this run, as last recorded."""
        self._saved_at_s: dict[str, float] = {}
        """Times of the last saves of running jobs' recordings."""
        self._journals = journals
        self._bundles = bundles
        self._loaded: dict[str, SavedRecording] = {}
        """Recordings of earlier runs, by job."""
        self._saved: set[str] = set()
        self._downloads = Downloads()
        self._process = ProcessCollector(registry=None)
        self._scrapes = Scrapes()
        self._stopping = asyncio.Event()
        driver.watchers.on_published(self._recorder.take_report)
        routes = [
            Route("/", self._page),
            Route("/healthz", self._healthz),
            Route("/readyz", self._readyz),
            Route("/metrics", self._metrics),
            Route("/api/stream", self._stream),
            Route("/api/jobs", self._jobs),
            Route("/api/jobs/{job}", self._answering(self._job)),
            Route("/api/jobs/{job}/series", self._answering(self._series)),
            Route("/api/jobs/{job}/model", self._answering(self._model), methods=["GET"]),
            Route("/api/jobs/{job}/journal", self._answering(self._journal), methods=["GET"]),
            Route("/api/jobs/{job}/log/{rank}", self._answering(self._log)),
            Route("/api/jobs/{job}/{verb}", self._answering(self._change_job), methods=["POST"]),
            Route("/api/agents/{agent}/{verb}", self._answering(self._change_agent), methods=["POST"]),
            Route("/download/{name}", self._download),
            Mount("/static", StaticFiles(directory=PAGE)),
        ]
        self.app: ASGIApp = AccessControl(Starlette(routes=routes), credentials, audit)

    async def record(self) -> None:
        """Records a view per second, and saves the recordings of ended jobs, and periodically those of running ones.
        Saves all when cancelled.
        """
        try:
            while True:
                self._take_views()
                await self._save([view for view in self._views if view.ended_s is not None], only_durable=True)
                await self._save_running()
                await asyncio.sleep(EVERY_S)
        finally:
            self._take_views()
            await self._save(self._views)

    def _take_views(self) -> None:
        try:
            self._views = self._catalogue.present_views()
            self._recorder.take_views(self._views)
        except Exception:
            log.exception("a view could not be recorded")

    async def _save(self, views: list[JobView], *, only_durable: bool = False) -> None:
        """Saves recordings that are not saved yet; with `only_durable`, of jobs whose result is durable."""
        for view in views:
            recording = self._recorder.jobs.get(view.job_id)
            if recording is None or view.job_id in self._saved:
                continue
            if only_durable and self._catalogue.result(view.job_id) is None:
                continue
            self._saved.add(view.job_id)
            await self._write(view, recording)

    async def _save_running(self) -> None:
        """Saves the least recently saved running job's recording, in case the coordinator is killed."""
        now_s, recordings = time.monotonic(), self._recorder.jobs
        times_s = {
            view.job_id: self._saved_at_s.get(view.job_id, 0.0)
            for view in self._views
            if view.ended_s is None and view.job_id in recordings
        }
        self._saved_at_s = times_s
        oldest = min(times_s, key=lambda job_id: times_s[job_id], default=None)
        if oldest is None or now_s - times_s[oldest] < SAVE_RUNNING_EVERY_S:
            return
        times_s[oldest] = now_s
        view = next(view for view in self._views if view.job_id == oldest)
        await self._write(view, recordings[oldest].copy(payloads.charted(view)))

    async def _write(self, view: JobView, recording: JobRecording) -> None:
        try:
            job, about = self._shown(view, SavedRecording(recording=recording))
            ranks = payloads.charted(view)
            await asyncio.to_thread(self._recordings.save, view.job_id, recording, ranks, {**job, **about})
        except Exception:
            log.exception("job=%s its recording could not be saved", view.job_id)

    def _recorded_before(self, job_id: str) -> JobRecording | None:
        """A previous coordinator's recording of an open job."""
        saved = self._recordings.load(job_id)
        return saved.recording if saved is not None else None

    def stop(self) -> None:
        """Ends the event streams, so that the server can stop."""
        self._stopping.set()

    # The page and the scrape

    async def _page(self, _: Request) -> Response:
        return FileResponse(PAGE / "index.html")

    async def _healthz(self, _: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def _readyz(self, _: Request) -> Response:
        return PlainTextResponse("leads\n")  # one that stands by answers by `waiting_page`

    async def _metrics(self, request: Request) -> Response:
        try:
            encode, content_type = choose_encoder(request.headers.get("accept", ""))
        except (TypeError, ValueError):  # a version that is not a number
            encode, content_type = choose_encoder("")
        text = await self._scrapes.text(content_type, partial(self._exported, encode))
        return Response(text, headers={"content-type": content_type})

    async def _exported(self, encode: Callable[[CollectorRegistry], bytes]) -> bytes:
        registry = CollectorRegistry()
        disk = await asyncio.to_thread(self._upkeep.disk)
        now = snapshot(self._driver, self._catalogue, self._artifacts, self._upkeep, disk)
        registry.register(SnapshotCollector(now))
        registry.register(self._process)
        # The views are taken on the event loop; formatting a thousand ranks takes long, and would delay rounds there.
        return await asyncio.to_thread(encode, registry)

    # Shown by the page

    async def _stream(self, request: Request) -> Response:
        """Server-sent events: each second, the parts of the lists and of one job that have changed."""
        # The page reads it with `fetch`: an EventSource sends no header, and a token has no place in a URL.
        caller = CALLER.get()
        you = f"{caller.name}, {caller.role}" if caller.role else ""
        return StreamingResponse(self._messages(request.query_params, you), media_type="text/event-stream")

    async def _messages(self, params: QueryParams, you: str) -> AsyncIterator[str]:
        telling, job_id = PageStream(), params.get("job", "")
        while not self._stopping.is_set():
            parts = {
                "you": you,
                "jobs": payloads.jobs(self._all_views(), _list_query(params), self._now),
                "hosts": payloads.hosts(self._driver.agents.hosts(), _list_query(params, "host_")),
            }
            view = self._catalogue.view(job_id)
            if view is not None:
                kept = await self._kept(view)
                job, about = self._shown(view, kept)
                parts |= {"job": job, "about": about, **telling.figures(view, kept.recording)}
            yield telling.message(parts)
            with suppress(TimeoutError):
                async with asyncio.timeout(EVERY_S):
                    await self._stopping.wait()

    def _all_views(self) -> list[JobView]:
        """All jobs, oldest first; views of this run are at most a second old, those of queued jobs perhaps older."""
        return [*self._catalogue.past_views(), *(self._views or self._catalogue.present_views())]

    def _now(self, view: JobView) -> JobView:
        """A queued job as it is now: others may have come before it, or gone."""
        return (view.state == "queued" and self._catalogue.view(view.job_id)) or view

    async def _kept(self, view: JobView) -> SavedRecording:
        """The job's recording: of this run, or of an earlier one."""
        if view.job_id in self._recorder.jobs:
            return SavedRecording(recording=self._recorder.jobs[view.job_id])
        if view.job_id not in self._loaded:
            kept = await asyncio.to_thread(self._recordings.load, view.job_id)
            self._loaded = {**dict(list(self._loaded.items())[-MAX_LOADED:]), view.job_id: kept or SavedRecording()}
        return self._loaded.get(view.job_id) or SavedRecording()

    def _shown(self, view: JobView, kept: SavedRecording) -> tuple[dict[str, Any], dict[str, Any]]:
        """The job's present detail, and its submission."""
        known = self._catalogue.details(view.job_id)
        job, about = payloads.detail(view), payloads.about(view, known, kept.recording.ended_at)
        if self._catalogue.is_past(view.job_id):
            about = payloads.with_saved(about, kept.shown)
        return (job if view.ranks else payloads.with_saved(job, kept.shown)), about

    def _known(self, request: Request) -> JobView:
        return self._catalogue.known_view(request.path_params["job"])

    async def _jobs(self, request: Request) -> Response:
        return JSONResponse(payloads.jobs(self._all_views(), _list_query(request.query_params), self._now))

    async def _job(self, request: Request) -> Response:
        view = self._known(request)
        kept = await self._kept(view)
        job, about = self._shown(view, kept)
        return JSONResponse({**job, **about, "events": payloads.events(kept.recording)})

    async def _series(self, request: Request) -> Response:
        """A job's figures over time, for comparison with another job."""
        view = self._known(request)
        recording = (await self._kept(view)).recording
        return JSONResponse({**payloads.summary(view), **payloads.series(recording)})

    async def _log(self, request: Request) -> Response:
        """The end of a rank's log, fetched from its host."""
        view, text = self._known(request), request.path_params["rank"]
        number = _number(text, MAX_RANKS)
        rank = next((one for one in view.ranks if one.rank == number), None)
        if rank is None:
            return JSONResponse({"error": f"job {view.job_id} has no rank {text[:20]!r}"}, 404)
        ask = partial(self._driver.agents.ask_for_log, view.job_id, rank, agent_pb2.SendLog(max_bytes=MAX_LOG_BYTES))
        absent = "the host of the rank, which has its log, is not connected"
        parts = [data async for data in self._artifacts.log_end([ask], view.job_id, rank.rank, MAX_LOG_BYTES, absent)]
        return PlainTextResponse(b"".join(parts).decode("utf-8", "replace"))

    async def _model(self, request: Request) -> Response:
        """The job's model, fetched from its host, for clients that send the token."""
        return DownloadResponse(await self._begin_download(self._known(request)))

    async def _download(self, request: Request) -> Response:
        """The job's model for browsers, whose downloads send no token: the link itself is the permission and works
        once.
        """
        download = self._downloads.take(request.path_params["name"])
        if download is None:
            return PlainTextResponse("this link has been used or has expired: press the button again\n", 404)
        request.scope[LET_IN] = True
        return DownloadResponse(download)

    async def _journal(self, request: Request) -> Response:
        """The job's journal, as a download."""
        return DownloadResponse(await self._begin_journal(self._known(request)))

    async def _begin_journal(self, view: JobView) -> Download:
        chunks = self._journals.chunks(view.job_id)
        return Download(f"{view.job_id}.journal.jsonl", chunks, await anext(chunks, b""))

    async def _begin_download(self, view: JobView) -> Download:
        chunks = requests.model_chunks(self._catalogue, self._driver.agents, self._artifacts, view, Rest())
        return await self._downloads.begin(chunks, f"{view.job_id}.safetensors", CALLER.get().name)

    async def _link(self, download: Download) -> str:
        """A link to the download, which is closed if there are too many. Raises `TooMuch`."""
        try:
            return self._downloads.link(download, CALLER.get().name)
        except ElcheError:
            await download.close()
            raise

    # Changes from the page

    async def _change_job(self, request: Request) -> Response:
        job_id, verb = request.path_params["job"], request.path_params["verb"]
        view = self._known(request) if verb in FETCHED else requests.own_view(self._catalogue, job_id)
        match verb:
            case "cancel":
                requests.cancel(self._driver, view)
            case "pause" | "unpause":
                requests.pause(self._driver, view, is_paused=verb == "pause")
            case "checkpoint":
                requests.request_checkpoint(self._driver, view)
            case "scale":
                requests.scale(self._driver, view, _num_ranks(request.query_params))
            case "resume":
                new_id, path = await requests.resume(
                    self._driver, self._catalogue, self._artifacts, self._bundles, view, {}, CALLER.get().name
                )
                return JSONResponse({"job": new_id, "checkpoint": path})
            case "model":
                return JSONResponse({"link": await self._link(await self._begin_download(view))})
            case "journal":
                return JSONResponse({"link": await self._link(await self._begin_journal(view))})
            case _:
                return JSONResponse({"error": "there is no such action"}, 404)
        await requests.taken(self._driver)
        return JSONResponse({})

    async def _change_agent(self, request: Request) -> Response:
        verb = request.path_params["verb"]
        if verb not in ("drain", "undrain"):
            return JSONResponse({"error": "there is no such action"}, 404)
        agent_id = AgentId(request.path_params["agent"])
        if all(host.agent_id != agent_id for host in self._driver.agents.hosts()):
            return JSONResponse({"error": f"no host {agent_id} is connected"}, 404)
        requests.drain(self._driver, agent_id, is_drained=verb == "drain")
        await requests.taken(self._driver)
        return JSONResponse({})

    def _answering(self, handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """The handler, with an `ElcheError` as a JSON answer."""

        async def answer(request: Request) -> Response:
            try:
                return await handler(request)
            except Forbidden as error:
                return JSONResponse({"error": str(error)}, 403)
            except UnknownJob as error:
                return JSONResponse({"error": str(error)}, 404)
            except ElcheError as error:
                return JSONResponse({"error": str(error)}, 409)

        return answer


def _num_ranks(params: QueryParams) -> int:
    text = params.get("ranks", "")
    if (num_ranks := _number(text, MAX_RANKS)) is None:
        raise InvalidJob(f"ranks={text[:20]!r} is not a number of ranks up to {MAX_RANKS}")
    return num_ranks


def _number(text: str, most: int) -> int | None:
    """A number from 0 to `most`; None for any other text."""
    is_number = text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS
    return int(text) if is_number and int(text) <= most else None


def _list_query(params: QueryParams, prefix: str = "") -> payloads.ListQuery:
    """The list query in a request's parameters."""
    page = params.get(f"{prefix}page", "")
    return payloads.ListQuery(
        text=params.get(f"{prefix}text", ""),
        state=params.get(f"{prefix}state", ""),
        page=int(page) if page.isdecimal() and len(page) < 10 else 0,
    )
