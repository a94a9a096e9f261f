"""The gRPC service of clients: translates requests to submit, list, watch and change jobs."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar

from elche.errors import InvalidJob, UnknownJob
from elche.v1 import job_pb2, job_pb2_grpc
from elche_coordinator import codec
from elche_coordinator.archive.artifacts import Artifacts
from elche_coordinator.archive.catalogue import JobCatalogue
from elche_coordinator.core.describe import JobView
from elche_coordinator.driver import Driver
from elche_coordinator.job_states import DECIDED
from elche_coordinator.limits.budgets import MAX_LOGS, MAX_LOGS_OF_CALLER, Budget
from elche_coordinator.limits.releasing import Context
from elche_coordinator.roles import CALLER, HAS_CHANGED
from elche_coordinator.services import requests
from elche_coordinator.services.faults import Faults
from elche_coordinator.services.link_trials import LinkTrials
from elche_coordinator.services.log_streams import Looks, stream_logs
from elche_coordinator.services.shared_views import SharedViews, view_every_s
from elche_coordinator.services.submission import check_settings, check_spec
from elche_coordinator.storage.bundles import Bundles
from elche_coordinator.streams.send_queue import SendQueue
from elche_coordinator.streams.transfers import Rest, Transfers
from elche_coordinator.telemetry.journal_files import JournalFiles
from elche_coordinator.telemetry.timelines import Timelines

log = logging.getLogger(__name__)

MAX_PAGE = 200
"""Jobs, or hosts, in one answer."""
PAGE_BYTES = 2 << 20
"""Approximate size of one answer."""

Item = TypeVar("Item")


class JobServicer(job_pb2_grpc.JobServiceServicer):
    """Submits, lists, watches and cancels jobs."""

    def __init__(
        self,
        driver: Driver,
        catalogue: JobCatalogue,
        transfers: Transfers,
        artifacts: Artifacts,
        timelines: Timelines,
        journals: JournalFiles,
        bundles: Bundles,
        faults: Faults,
    ) -> None:
        self._faults = faults
        self._bundles = bundles
        self._timelines = timelines
        self._journals = journals
        self._driver = driver
        self._catalogue = catalogue
        self._artifacts = artifacts
        self._logs = Budget("logs of ranks open", MAX_LOGS_OF_CALLER, MAX_LOGS)
        self._messages = SharedViews(self._message, driver.last_change)
        self._views = SharedViews(catalogue.known_view, driver.last_change)
        self._links = LinkTrials(driver.agents, transfers)

    async def SubmitJob(self, request: job_pb2.SubmitJobRequest, context: Context) -> job_pb2.SubmitJobResponse:
        key = CALLER.get().own_key(request.key)
        known = self._catalogue.submitted_as(key)
        if known:
            HAS_CHANGED.set(False)
            # The submission whose answer was lost may not be durable yet.
            await requests.taken(self._driver)
            return job_pb2.SubmitJobResponse(job_id=known)
        if request.finds:
            raise UnknownJob(request.key)
        check_spec(request.spec)
        if request.spec.bundle:
            self._bundles.require(request.spec.bundle)
        spec = codec.spec(request.spec, self._driver.sources.add(request.spec.source))
        spec = replace(spec, submitted_by=CALLER.get().submitter(spec.submitted_by))
        job_id = await requests.submit(self._driver, spec, key)
        return job_pb2.SubmitJobResponse(job_id=job_id)

    async def ListJobs(self, request: job_pb2.ListJobsRequest, context: Context) -> job_pb2.ListJobsResponse:
        page = job_pb2.ListJobsResponse(problem=requests.problem(self._driver))
        page.next_page_token = _fill(
            page.jobs,
            self._catalogue.job_ids(),
            self._message,
            request,
        )
        return page

    async def WatchJob(
        self, request: job_pb2.WatchJobRequest, context: Context
    ) -> AsyncIterator[job_pb2.WatchJobResponse]:
        self._messages.newest(request.job_id)
        # Before the first view that is sent: no report may fall between the two.
        queue = self._driver.watchers.watch(request.job_id, CALLER.get().name)
        try:
            async for response in self._responses(request.job_id, queue):
                yield response
        finally:
            self._driver.watchers.unwatch(request.job_id, queue)

    async def CancelJob(self, request: job_pb2.CancelJobRequest, context: Context) -> job_pb2.CancelJobResponse:
        before = requests.cancel(self._driver, self._own_view(request.job_id))
        await requests.taken(self._driver)
        return job_pb2.CancelJobResponse(changed=before not in DECIDED, state=codec.STATES[before])

    async def ResumeJob(self, request: job_pb2.ResumeJobRequest, context: Context) -> job_pb2.ResumeJobResponse:
        check_settings(request.settings)
        view = self._own_view(request.job_id)
        submitter = CALLER.get().submitter(request.submitted_by)
        job_id, path = await requests.resume(
            self._driver, self._catalogue, self._artifacts, self._bundles, view, request.settings, submitter
        )
        return job_pb2.ResumeJobResponse(job_id=job_id, checkpoint=path)

    async def CheckpointJob(
        self, request: job_pb2.CheckpointJobRequest, context: Context
    ) -> job_pb2.CheckpointJobResponse:
        requests.request_checkpoint(self._driver, self._own_view(request.job_id))
        await requests.taken(self._driver)
        return job_pb2.CheckpointJobResponse()

    async def PauseJob(self, request: job_pb2.PauseJobRequest, context: Context) -> job_pb2.PauseJobResponse:
        view = self._own_view(request.job_id)
        is_open = view.state not in DECIDED and (view.state == "paused") != request.is_paused
        HAS_CHANGED.set(is_open)
        if is_open:
            requests.pause(self._driver, view, is_paused=request.is_paused)
            await requests.taken(self._driver)
        return job_pb2.PauseJobResponse(changed=is_open, state=codec.STATES[view.state])

    async def ScaleJob(self, request: job_pb2.ScaleJobRequest, context: Context) -> job_pb2.ScaleJobResponse:
        before = requests.scale(self._driver, self._own_view(request.job_id), request.num_ranks)
        await requests.taken(self._driver)
        return job_pb2.ScaleJobResponse(num_ranks_before=before)

    async def DrainHost(self, request: job_pb2.DrainHostRequest, context: Context) -> job_pb2.DrainHostResponse:
        num_ranks = requests.drain(self._driver, request.host, is_drained=request.is_drained)
        await requests.taken(self._driver)
        return job_pb2.DrainHostResponse(num_ranks=num_ranks)

    async def ListHosts(self, request: job_pb2.ListHostsRequest, context: Context) -> job_pb2.ListHostsResponse:
        page = job_pb2.ListHostsResponse(now=time.time())
        page.next_page_token = _fill(page.hosts, self._driver.agents.hosts(), codec.host_message, request)
        return page

    async def MeasureLinks(
        self, request: job_pb2.MeasureLinksRequest, context: Context
    ) -> AsyncIterator[job_pb2.MeasureLinksResponse]:
        async with aclosing(self._links.measure(request.hosts)) as found:
            async for one in found:
                yield one

    async def InjectFault(self, request: job_pb2.InjectFaultRequest, context: Context) -> job_pb2.InjectFaultResponse:
        host = self._faults.inject(self._own_view(request.job_id), request)
        return job_pb2.InjectFaultResponse(host=host)

    async def FetchModel(
        self, request: job_pb2.FetchModelRequest, context: Context
    ) -> AsyncIterator[job_pb2.FetchModelResponse]:
        view = self._catalogue.known_view(request.job_id)
        find = requests.best_weights if request.best else requests.model_chunks
        rest = Rest(request.offset, request.sha256)
        found = find(self._catalogue, self._driver.agents, self._artifacts, view, rest)
        num_sent = 0
        async with aclosing(found) as chunks:
            async for data in chunks:
                yield job_pb2.FetchModelResponse(data=data, offset=rest.offset + num_sent, sha256=rest.sha256)
                num_sent += len(data)
        # tells which file it is also to a client that had all of it
        yield job_pb2.FetchModelResponse(offset=rest.offset + num_sent, sha256=rest.sha256)

    async def StreamLogs(
        self, request: job_pb2.StreamLogsRequest, context: Context
    ) -> AsyncIterator[job_pb2.StreamLogsResponse]:
        looks = Looks(
            newest=lambda: self._views.newest(request.job_id),
            recent=lambda: self._views.recent_and_change(request.job_id),
            last_change=lambda: self._driver.last_change(request.job_id),
        )
        parts = stream_logs(request, looks, self._driver.agents, self._artifacts, self._logs)
        async with aclosing(parts):
            async for part in parts:
                yield part

    async def FetchTimeline(
        self, request: job_pb2.FetchTimelineRequest, context: Context
    ) -> AsyncIterator[job_pb2.FetchTimelineResponse]:
        self._catalogue.known_view(request.job_id)
        async for data in self._timelines.chunks(request.job_id):
            yield job_pb2.FetchTimelineResponse(data=data)

    async def FetchJournal(
        self, request: job_pb2.FetchJournalRequest, context: Context
    ) -> AsyncIterator[job_pb2.FetchJournalResponse]:
        self._catalogue.known_view(request.job_id)
        num_events = request.num_events if request.HasField("num_events") else None
        async for data in self._journals.chunks(request.job_id, num_events):
            yield job_pb2.FetchJournalResponse(data=data)

    def _own_view(self, job_id: str) -> JobView:
        return requests.own_view(self._catalogue, job_id)

    def _message(self, job_id: str) -> job_pb2.JobView:
        spec = self._catalogue.spec(job_id)
        return _view_message(self._catalogue.known_view(job_id), "" if spec is None else spec.resume)

    async def _responses(
        self, job_id: str, queue: SendQueue[job_pb2.WatchJobResponse]
    ) -> AsyncIterator[job_pb2.WatchJobResponse]:
        """Yields views at intervals, reports as they come, and the result last."""
        yield job_pb2.WatchJobResponse(view=self._messages.newest(job_id))
        ended = self._catalogue.result(job_id)
        if ended is not None:
            yield codec.watch_message(ended)
            return
        getting = asyncio.ensure_future(queue.get())
        watchers = self._driver.watchers
        next_view_s = time.monotonic() + view_every_s(watchers.num_watchers)
        try:
            while True:
                done, _ = await asyncio.wait({getting}, timeout=max(0.0, next_view_s - time.monotonic()))
                if time.monotonic() >= next_view_s:  # also when reports come more often than that
                    yield job_pb2.WatchJobResponse(view=self._messages.recent(job_id))
                    next_view_s = time.monotonic() + view_every_s(watchers.num_watchers)
                if not done:
                    continue
                if (item := getting.result()) is None:
                    return
                if item.HasField("result"):
                    yield job_pb2.WatchJobResponse(view=self._messages.newest(job_id))
                yield item
                getting = asyncio.ensure_future(queue.get())
        finally:
            getting.cancel()


def _fill(
    page: Any,
    every: Sequence[Item],
    message_of: Callable[[Item], Any],
    request: job_pb2.ListJobsRequest | job_pb2.ListHostsRequest,
) -> str:
    """Adds the messages of one page; returns the token of the next, empty after the last. Raises `InvalidJob`."""
    first, left_bytes = _page_start(request.page_token), PAGE_BYTES
    for one in every[first : first + min(request.page_size or MAX_PAGE, MAX_PAGE)]:
        message = message_of(one)
        left_bytes -= message.ByteSize()
        if left_bytes < 0 and page:
            break
        page.append(message)
    return str(first + len(page)) if first + len(page) < len(every) else ""


def _page_start(token: str) -> int:
    if not token:
        return 0
    if not (token.isascii() and token.isdigit() and len(token) < 16):
        raise InvalidJob("the page token was not returned by an earlier page")
    return int(token)


def _view_message(view: JobView, resume: str) -> job_pb2.JobView:
    """The view as a message. A job whose figures do not fit the message is shown without any."""
    try:
        return codec.view_message(view, resume)
    except (ValueError, TypeError, OverflowError, KeyError) as error:
        log.warning("job=%s cannot be shown: %r", view.job_id, error)
        why = f"its figures cannot be shown: {error}"
        return job_pb2.JobView(job_id=view.job_id, name=view.name, state=codec.STATES[view.state], reason=why)
