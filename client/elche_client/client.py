"""The Python client: submits, lists, watches, pauses, resumes and cancels jobs of a coordinator."""

import logging
import math
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeVar

import grpc

from elche.errors import ElcheError, HostAway, InvalidJob, JobFailed, UnknownJob, Unreachable
from elche.mapping import from_message, to_message
from elche.network import user_at_host
from elche.notebook import show_live
from elche.requirements import inline_requirements
from elche.status import calling, was_never_sent
from elche.v1 import job_pb2 as pb
from elche.v1.bundle_pb2_grpc import BundleServiceStub
from elche.v1.job_pb2_grpc import JobServiceStub
from elche_client.events import (
    Checkpoint,
    EpochReport,
    EvaluationReport,
    Event,
    Fault,
    HostView,
    JobResult,
    JobState,
    JobView,
    LinkView,
    LogLine,
)
from elche_client.options import JobOptions, check_loop, read_source, texts
from elche_client.transport.bundle import Bundle, packed
from elche_client.transport.codec import (
    FAULTS,
    decode_event,
    decode_link,
    decode_state,
    decode_view,
    encode_settings,
    encode_spec,
    request_of,
)
from elche_client.transport.connection import connect
from elche_client.transport.draft import Draft
from elche_client.transport.rank_output import LogPosition, RankLines
from elche_client.transport.upload import entry_of, file_of_module, folder_of, upload

log = logging.getLogger(__name__)

Request = TypeVar("Request")
Response = TypeVar("Response")

CALL_TIMEOUT_S = 10.0
"""Seconds for the answer to a call that is not a stream."""
RETRY_AFTER_S = (0.2, 1.0)
"""Seconds before each further attempt of a submission whose answer may have been lost."""
RECONNECT_S = 60.0
"""Seconds for which a watch waits for a lost coordinator."""
RECONNECT_EVERY_S = 1.0
"""Seconds between its attempts."""
STEADY_S = 5.0
"""A watch that goes on for this many seconds after its first event gets the whole waiting time again when it is lost.
"""
LOG_BYTES = 64 * 1024
"""Default bytes of each rank's log."""
CLOSED = "this client is closed: make another one"
NO_ANSWER = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
"""Status codes of a call whose coordinator was stopped or has not answered in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The outcome of a request to cancel or pause a job."""

    is_made: bool
    """True if the request changed anything."""
    before: JobState
    """The job's state when the request arrived."""


class Client:
    """A connection to the coordinator at `address` (HOST:PORT, or several of which one leads, separated by commas),
    opened by the first call.

    Without an address it is that of ELCHE_COORDINATOR, else of the context (`elche context`), else on this machine.
    `token` is the coordinator's credential, by default that of ELCHE_TOKEN or ELCHE_TOKEN_FILE, else of the context if
    that is this coordinator's; `tls` a folder with its `ca.crt`, by default that of ELCHE_TLS, or of the context. An
    empty string is none. Every method raises an `elche.errors.ElcheError` when the coordinator refuses
    (`InvalidJob`, `UnknownJob`, `NotAllowed`, `Forbidden`, `TooMuch`) or does not answer (`Unreachable`). Watching a
    job outlasts a restart of the coordinator that takes up to `reconnect_s` seconds, by default 60.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        token: str | None = None,
        tls: str | None = None,
        reconnect_s: float | None = None,
    ) -> None:
        self._reconnect_s = RECONNECT_S if reconnect_s is None else reconnect_s
        self._was_answered = False
        """True once a coordinator has answered; before, the address may be wrong, and a watch is not retried."""
        self._is_closed = False
        self.problem = ""
        """Why the coordinator decided nothing at the last `jobs()`, so that all jobs waited; empty if it did."""
        connection = connect(address, token, tls)
        self.address, self._metadata, self._channel = connection.address, connection.metadata, connection.channel
        # Both at once: gRPC crashes the process that makes a stub of a channel that is closed.
        self._stub, self._bundles = JobServiceStub(self._channel), BundleServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def is_closed(self) -> bool:
        """True once it was closed: every call then raises `Unreachable`."""
        return self._is_closed

    def close(self) -> None:
        """Closes the connection and cancels its open calls."""
        # First: a watch on another thread would take the end of its call for a lost coordinator.
        self._reconnect_s, self._is_closed = 0.0, True
        self._channel.close()

    def submit(
        self,
        path: str | os.PathLike[str] = "",
        *,
        num_ranks: int = 0,
        min_ranks: int = 0,
        slow_factors: Mapping[int, float] | None = None,
        output_dir: str | os.PathLike[str] | None = None,
        verify_rounds: bool = False,
        name: str | None = None,
        resume: str | os.PathLike[str] = "",
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        folder: str | os.PathLike[str] | None = None,
        priority: int = 0,
        project: str = "",
        artifacts: str = "",
        conditions: Sequence[str] = (),
        requirements: Sequence[str] = (),
        module: str = "",
        secrets: Sequence[str] = (),
        key: str = "",
        **settings: object,
    ) -> "JobHandle":
        """Submits the job that a Python file defines, or a script with its own loop, and returns its handle.

        - `path`: the file. Or `module`, such as "train.digits:job": the job of a module in `folder`, and no `path`.
        - `folder`: what the ranks get as their working directory, by default the file's folder (with `module` the
          current one), or that of ELCHE_FOLDER, except files in .gitignore and .elcheignore. It is uploaded if the
          coordinator does not have it. "none": the file alone.
        - `num_ranks`: 0 takes every free slot. With `min_ranks` the job begins with these, and others join later.
        - `arguments`, `environment`: the file's `sys.argv` after its name, and variables besides the worker's;
          `secrets`: names of variables whose values the hosts have.
        - `conditions` that every device meets, such as "model=*H200*", "memory>=20GiB" or "zone!=eu".
        - `requirements`: packages to install besides those of the hosts, by default those of the file's metadata
          (PEP 723).
        - `priority`: jobs with a higher one get slots first, and may take them from others, which lose no work by it.
          Among equals the next slots go to the `project` with the fewest, by default the submitter's own.
        - `output_dir`: an absolute path on the ranks' host. `resume`: path or URL of a checkpoint that they can read.
          `artifacts`: a folder that workers and coordinator share, or a URL, where what the job leaves is stored, by
          default that of the coordinator.
        - `slow_factors`: by rank, how many times slower it is made, at least 1. `verify_rounds`: compare the ranks'
          parameters after every round; a difference fails the job.
        - `key`: submitted again with it, the job is the one that you have submitted before.
        - `settings`, such as `epochs=3`, replace those of the file; a script with its own loop takes none.

        Raises `InvalidJob`, before any call, when the file or an option is not valid.
        """
        if module and os.fspath(path):
            raise InvalidJob(f"the job is either in the file {os.fspath(path)} or in the module {module}: name one")
        options = JobOptions(
            num_ranks=num_ranks,
            min_ranks=min_ranks,
            slow_factors=slow_factors or {},
            settings=settings,
            output_dir=os.fspath(output_dir or ""),
            verify_rounds=verify_rounds,
            name=name or "",
            resume=os.fspath(resume),
            arguments=texts("arguments", arguments),
            environment=environment or {},
            priority=priority,
            project=project,
            artifacts=artifacts,
            conditions=texts("conditions", conditions),
            requirements=texts("requirements", requirements),
            module=module,
            secrets=texts("secrets", secrets),
        )
        if module:
            file, root = file_of_module(module, folder)
            return self.submit_options(file, options, root, key=key)
        return self.submit_options(Path(path), options, folder_of(path, folder), key=key)

    def submit_options(
        self,
        path: Path,
        options: JobOptions,
        folder: Path | None = None,
        on_progress: Callable[[int, int], None] = lambda uploaded, size: None,
        *,
        key: str = "",
        source: str | None = None,
        bundle: Bundle | None = None,
    ) -> "JobHandle":
        """`submit` with options that have been checked, and a folder or none. `on_progress` is told of how many bytes
        of the folder the coordinator has, and of how many there are. With a `key` with which you have submitted a
        job before, it is that job. `source` and `bundle`: the file and the folder as they were read earlier.
        """
        spec = encode_spec(path, read_source(path) if source is None else source, options)
        if spec.is_loop:
            check_loop(path, options)
        spec.requirements.extend(() if options.requirements else inline_requirements(spec.source))
        if folder is not None:
            spec.file_name = entry_of(path, folder)
            with packed(folder) if bundle is None else nullcontext(bundle) as sent:
                self._upload(spec, sent, on_progress)
        request = request_of(pb.SubmitJobRequest, spec=spec, key=key or uuid.uuid4().hex)
        may_be_there = False
        for wait_s in (*RETRY_AFTER_S, None):
            try:
                response = self._ask(self._stub.SubmitJob, request)
                break
            except Unreachable as error:
                cause = error.__cause__
                may_be_there |= not (isinstance(cause, grpc.RpcError) and was_never_sent(cause))
                if wait_s is None and may_be_there:
                    raise Unreachable(f"{error}; the job may have been submitted: see `elche jobs`") from error
                if wait_s is None:
                    raise
                time.sleep(wait_s)  # the answer may have been lost: the key keeps the job from being submitted twice
        return JobHandle(self, response.job_id)

    def find(self, key: str) -> "JobHandle | None":
        """The job that you have submitted with a key; None if there is none."""
        request = request_of(pb.SubmitJobRequest, key=key, finds=True)
        try:
            response = self._ask(self._stub.SubmitJob, request)
        except UnknownJob:
            return None
        return JobHandle(self, response.job_id)

    def _upload(self, spec: pb.JobSpec, bundle: Bundle, on_progress: Callable[[int, int], None]) -> None:
        for link in bundle.left_out:
            log.warning("left out, as it leads out of the folder that is sent: %s", link)
        with self._calling():
            upload(
                self._bundles,
                bundle,
                address=self.address,
                metadata=self._metadata,
                on_progress=lambda uploaded: on_progress(uploaded, bundle.size_bytes),
            )
        spec.bundle = bundle.name

    def jobs(self) -> list[JobView]:
        """All jobs of the coordinator, oldest first."""
        pages = list(self._pages(self._stub.ListJobs, pb.ListJobsRequest()))
        self.problem = pages[-1].problem
        return [decode_view(job) for page in pages for job in page.jobs]

    def job(self, job_id: str) -> "JobHandle":
        """A handle of an existing job. Its first method raises `UnknownJob` if there is no such job."""
        return JobHandle(self, job_id)

    def get(self, job_id: str) -> JobView:
        """A job as it is now."""
        return next(event for event in self._watch_once(job_id) if isinstance(event, JobView))

    def result(self, job_id: str, *, model: str | os.PathLike[str] | None = None) -> JobResult:
        """Waits for a job to end. Raises `JobFailed`, with the user's traceback, unless it succeeded.

        `model` is the path of a local file to which the final model is written, as safetensors.
        """
        for event in self.watch(job_id):
            if isinstance(event, JobResult):
                result = _succeeded(event, job_id)
                return result if model is None else replace(result, model=str(self.download(job_id, model)))
        raise AssertionError("a watch ends with a result or an error")

    def metrics(self, job_id: str) -> Iterator[EpochReport | EvaluationReport]:
        """Reports of the job's epochs and evaluations from now on, until it ends."""
        return (event for event in self.watch(job_id) if isinstance(event, EpochReport | EvaluationReport))

    def checkpoints(self, job_id: str) -> tuple[Checkpoint, ...]:
        """The kept checkpoints of a job, oldest first."""
        return self.get(job_id).checkpoints

    def cancel(self, job_id: str) -> Change:
        """Cancels a job. Nothing changes for one that has ended."""
        return self._changed(self._stub.CancelJob, request_of(pb.CancelJobRequest, job_id=job_id))

    def resume(self, job_id: str, **settings: object) -> "JobHandle":
        """Resumes a job that has ended as a new job, from its newest checkpoint; `settings` replace its own."""
        checked = JobOptions(settings=settings)
        request = request_of(
            pb.ResumeJobRequest, job_id=job_id, settings=encode_settings(checked), submitted_by=user_at_host()
        )
        response = self._ask(self._stub.ResumeJob, request, job_id)
        return JobHandle(self, response.job_id)

    def checkpoint(self, job_id: str) -> None:
        """Requests a checkpoint of a job with its next round."""
        self._ask(self._stub.CheckpointJob, request_of(pb.CheckpointJobRequest, job_id=job_id), job_id)

    def pause(self, job_id: str, *, is_paused: bool = True) -> Change:
        """Pauses a training job after its open round, or lets it go on with `is_paused=False`."""
        return self._changed(self._stub.PauseJob, request_of(pb.PauseJobRequest, job_id=job_id, is_paused=is_paused))

    def _changed(self, call: Any, request: Any) -> Change:
        response = self._ask(call, request, request.job_id)
        return Change(is_made=response.changed, before=decode_state(response.state))

    def scale(self, job_id: str, num_ranks: int) -> int:
        """Sets a job's number of ranks: new ones join when there are slots for them, or the highest leave once their
        work is committed. Returns the previous number. Raises `InvalidJob`.
        """
        request = request_of(pb.ScaleJobRequest, job_id=job_id, num_ranks=num_ranks)
        return self._ask(self._stub.ScaleJob, request, job_id).num_ranks_before

    def drain(self, host: str, *, is_drained: bool = True) -> int:
        """Drains a host, by name or agent id: its ranks leave once their work is committed, and it gets no others; with
        `is_drained=False` it is available again. Returns its number of ranks.
        """
        request = request_of(pb.DrainHostRequest, host=host, is_drained=is_drained)
        return self._ask(self._stub.DrainHost, request).num_ranks

    def hosts(self) -> list[HostView]:
        """The connected hosts, in the order in which they joined, with the jobs on their devices."""
        pages = self._pages(self._stub.ListHosts, pb.ListHostsRequest())
        return [from_message(host, HostView) for page in pages for host in page.hosts]

    def measure_links(self, hosts: Sequence[str] = ()) -> Iterator[LinkView]:
        """The link between each pair of the connected, or named, hosts, as each is measured. Takes 2 to 3 s for each,
        and slows training there. Needs the role operator.
        """
        with self._calling():
            request = request_of(pb.MeasureLinksRequest, hosts=texts("hosts", hosts))
            for found in self._stub.MeasureLinks(request, metadata=self._metadata):
                yield decode_link(found)

    def inject(self, job_id: str, fault: Fault | None, *, rank: int = 0, seconds: float = 5.0) -> str:
        """Breaks a part of a running job on purpose; returns the name of the host. None breaks nothing.

        `rank` or its worker is hit; without effect for the coordinator. `seconds`, up to 600: how long it is stopped.
        Needs the role operator. Raises `Forbidden` unless the coordinator was started with --allow-chaos, and
        `InvalidJob` when there is nothing to break.
        """
        request = request_of(pb.InjectFaultRequest, job_id=job_id, fault=FAULTS[fault], rank=rank, seconds=seconds)
        return self._ask(self._stub.InjectFault, request, job_id).host

    def download(self, job_id: str, path: str | os.PathLike[str], *, best: bool = False) -> Path:
        """Writes the final model of a job that has succeeded to a local file, atomically. Raises `OSError`.

        With `best` it is the model of the best checkpoint so far, by the metric that `monitor` names. When the
        connection breaks, or the model's host goes away, it goes on where it was; when that fails for 60 s, or this
        process ends, the part that has come stays beside the file, and the next call goes on there.
        """
        self.get(job_id)  # an address at which nobody answers fails at once; one that has answered is tried again
        came_s, has_come = time.monotonic(), False
        while True:
            with Draft(Path(path), job_id) as draft:
                try:
                    with self._calling(job_id):
                        request = request_of(
                            pb.FetchModelRequest, job_id=job_id, best=best, offset=draft.size_bytes, sha256=draft.sha256
                        )
                        for part in self._stub.FetchModel(request, metadata=self._metadata):
                            draft.add(part.data, part.offset, part.sha256)
                    return draft.finish()
                except (Unreachable, HostAway) as error:
                    has_come |= draft.has_grown
                    came_s = time.monotonic() if draft.has_grown else came_s
                    is_away = isinstance(error, HostAway) and not has_come  # no host had it when this began
                    if is_away or time.monotonic() - came_s > RECONNECT_S:
                        raise
            time.sleep(RECONNECT_EVERY_S)

    def logs(
        self, job_id: str, *, rank: int | None = None, follow: bool = False, max_bytes: int = LOG_BYTES
    ) -> Iterator[LogLine]:
        """The end of the log of one rank, or of every rank: at most `max_bytes` of each.

        With `follow` also later output, until the job has ended; if the coordinator is lost, it is retried as by
        `watch`, and goes on with the next line. A rank whose host has disconnected yields one line with an `error`.
        Raises `InvalidJob` if there is no log at all.
        """
        request = request_of(
            pb.StreamLogsRequest, job_id=job_id, rank=rank, max_bytes=max_bytes, follow=follow, with_times=True
        )
        lines, lost_s = RankLines(), -math.inf
        while True:
            heard_s = math.inf
            try:
                if follow:
                    self.get(job_id)  # the logs of ranks that print nothing do not show that the coordinator is there
                    heard_s = time.monotonic()
                yield from self._logs_once(request, lines)
                return
            except Unreachable as error:
                if not follow or not lines.can_go_on:
                    raise
                lost_s = self._outlast(error, heard_s, lost_s)
                del request.positions[:]
                request.positions.extend(to_message(one, pb.LogPosition) for one in lines.positions())

    def _logs_once(self, request: pb.StreamLogsRequest, lines: RankLines) -> Iterator[LogLine]:
        with self._stream(self._stub.StreamLogs, request) as parts:
            for part in parts:
                if part.error:
                    yield LogLine(rank=part.rank, error=part.error)
                if part.HasField("begins"):
                    yield from lines.begin(from_message(part.begins, LogPosition))
                if part.data:
                    yield from lines.add(part.rank, part.data)
            yield from lines.rest()

    def timeline(self, job_id: str) -> str:
        """The timeline so far of a job with `timeline=True`, as JSON lines."""
        return self._text(self._stub.FetchTimeline, request_of(pb.FetchTimelineRequest, job_id=job_id))

    def journal(self, job_id: str, *, num_events: int | None = None) -> str:
        """A job's journal, or its newest events, as JSON lines, such as for a bug report."""
        return self._text(
            self._stub.FetchJournal, request_of(pb.FetchJournalRequest, job_id=job_id, num_events=num_events)
        )

    def watch(self, job_id: str) -> Iterator[Event]:
        """The events of a job: first a view of it as it is now, last its result.

        If the coordinator is lost after it has answered this client, the watch is retried; then another view comes
        first, and reports of the time between are missing. Raises `Unreachable` if it does not return.
        """
        lost_s = -math.inf
        while True:
            heard_s = math.inf
            try:
                for event in self._watch_once(job_id):
                    heard_s = min(heard_s, time.monotonic())
                    yield event
                    if isinstance(event, JobResult):
                        return
            except Unreachable as error:
                lost_s = self._outlast(error, heard_s, lost_s)

    def _outlast(self, error: Unreachable, heard_s: float, lost_s: float) -> float:
        """Waits before a broken stream is tried again; returns the time at which the coordinator was lost. Raises the
        error when that is `reconnect_s` ago. `heard_s`: the time of the stream's first answer, infinite without one;
        `lost_s`: what the call before has returned.
        """
        now_s = time.monotonic()
        # Counted from when the stream broke, not from when it was begun: connecting to a host that is gone takes 20 s.
        if lost_s == -math.inf or now_s - heard_s > STEADY_S:
            lost_s = now_s
            if self._was_answered and self._reconnect_s:
                log.warning("%s; retrying for %.0f s", error, self._reconnect_s)
        if not self._was_answered or now_s - lost_s >= self._reconnect_s:
            raise error
        time.sleep(RECONNECT_EVERY_S)
        return lost_s

    def _watch_once(self, job_id: str) -> Iterator[Event]:
        has_warned = False
        with self._stream(self._stub.WatchJob, request_of(pb.WatchJobRequest, job_id=job_id)) as messages:
            for message in messages:
                self._was_answered = True
                event = decode_event(message)
                if event is not None:
                    yield event
                elif not has_warned:
                    log.warning("job=%s has events that this client is too old to show", job_id)
                    has_warned = True
                if isinstance(event, JobResult):
                    return
        raise Unreachable(f"the coordinator at {self.address} ended the watch before job {job_id} ended")

    def _ask(
        self, call: "grpc.UnaryUnaryMultiCallable[Request, Response]", request: Request, job_id: str = ""
    ) -> Response:
        with self._calling(job_id):
            return call(request, timeout=CALL_TIMEOUT_S, metadata=self._metadata)

    @contextmanager
    def _stream(self, method: Any, request: Any) -> Iterator[Any]:
        """Context with the answers of a call on a job."""
        with self._calling(request.job_id):
            call = method(request, metadata=self._metadata)
            try:
                yield call
            finally:
                # Whoever stops reading closes the generator that reads: without the cancel, the coordinator would go on
                # sending to the call.
                call.cancel()

    def _pages(self, call: Any, request: Any) -> Iterator[Any]:
        """The answers to a call that lists something, page by page."""
        page = self._ask(call, request)
        yield page
        while page.next_page_token:
            request.page_token = page.next_page_token
            page = self._ask(call, request)
            yield page

    def _text(self, call: Any, request: Any) -> str:
        """All parts of a job's file, joined."""
        with self._calling(request.job_id):
            return b"".join(part.data for part in call(request, metadata=self._metadata)).decode("utf-8")

    @contextmanager
    def _calling(self, job_id: str = "") -> Iterator[None]:
        try:
            with calling(self.address):
                yield
            self._was_answered = True
        except UnknownJob as error:
            raise UnknownJob(job_id) from error
        except ValueError as error:  # by gRPC, for each call on a closed channel
            if self._is_closed:
                raise Unreachable(CLOSED) from error
            raise
        except ElcheError as error:
            cause = error.__cause__
            if isinstance(cause, grpc.Call) and cause.code() in NO_ANSWER:
                raise Unreachable(f"the coordinator at {self.address} does not answer any more") from error
            raise


@dataclass(frozen=True, slots=True)
class JobHandle:
    """One job of a coordinator."""

    client: Client
    id: str

    def watch(self) -> Iterator[Event]:
        """The events of the job: first a view of it as it is now, last its result."""
        return self.client.watch(self.id)

    def result(self, *, model: str | os.PathLike[str] | None = None) -> JobResult:
        """Waits for the job to end. Raises `JobFailed`, with the user's traceback, unless it succeeded.

        `model` is the path of a local file to which the final model is written, as safetensors.
        """
        return self.client.result(self.id, model=model)

    def _ipython_display_(self) -> None:
        """Shows live progress in a notebook."""
        show_live(self._views())

    def _views(self) -> Iterator[dict[str, Any]]:
        newest: dict[str, Any] = {"name": self.id}
        for event in self.watch():
            if isinstance(event, JobView | JobResult):
                newest |= asdict(event) if isinstance(event, JobView) else {"state": event.state}
                yield newest

    def cancel(self) -> Change:
        """Cancels the job."""
        return self.client.cancel(self.id)

    def logs(self, *, rank: int | None = None, follow: bool = False) -> Iterator[LogLine]:
        """The end of the log of one rank, or of every rank; with `follow` also later output."""
        return self.client.logs(self.id, rank=rank, follow=follow)

    def checkpoint(self) -> None:
        """Requests a checkpoint with the next round."""
        self.client.checkpoint(self.id)

    def pause(self, *, is_paused: bool = True) -> Change:
        """Pauses training after the open round, or lets it go on with `is_paused=False`."""
        return self.client.pause(self.id, is_paused=is_paused)

    def scale(self, num_ranks: int) -> int:
        """Sets the job's number of ranks; returns the previous one."""
        return self.client.scale(self.id, num_ranks)

    def resume(self, **settings: object) -> "JobHandle":
        """Resumes the job, which must have ended, as a new job from its newest checkpoint."""
        return self.client.resume(self.id, **settings)


def _succeeded(result: JobResult, job_id: str) -> JobResult:
    if result.state is JobState.SUCCEEDED:
        return result
    message = result.error or f"job {job_id} was {result.state}"
    raise JobFailed(message, traceback=result.traceback, invalid=result.invalid)
