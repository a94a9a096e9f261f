"""A real gRPC job service that plays a script, for the client's tests."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from threading import Event as Flag

import grpc

from elche.v1 import job_pb2 as pb
from elche.v1.job_pb2_grpc import JobServiceServicer, add_JobServiceServicer_to_server
from elche_client import Client

SOURCE = "job = None  # é\n"
UNTIL_CANCELLED = "until cancelled"  # in a script: wait here until somebody cancels the job

VIEW = pb.JobView(
    job_id="j-1",
    name="digits",
    state=pb.JOB_STATE_TRAINING,
    epoch=2,
    num_epochs=10,
    dataset_size=1000,
    epoch_committed=400,
    epoch_processed=500,
    loss=0.25,
    samples_per_s=1234.5,
    anchor=10,
    num_rounds=7,
    ranks=[pb.RankView(rank=0, device="cpu", state="training", round_batches=12, round_target=23)],
)
VIEW.submitted_at.FromDatetime(datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC))
EPOCH = pb.EpochReport(
    epoch=2, attempt=1, loss=0.5, scalars={"lr": 0.1}, duration_s=2.0, committed=1000, rank_batches=[5, 3]
)
EVALUATION = pb.EvaluationReport(epoch=2, attempt=1, metrics={"accuracy": 0.98}, duration_s=0.1)
ROUND = pb.RoundReport(round=7, version=7, rank_batches=[2, 1], anchor=10, samples=96)
RESULT = pb.JobResult(
    state=pb.JOB_STATE_SUCCEEDED,
    epochs=3,
    metrics={"accuracy": 0.98},
    samples_per_s=1200.0,
    bound_samples_per_s=1250.0,
    bound_fraction=0.96,
    dataset_size=1000,
    committed_samples=[1000, 1000, 1000],
    dropped_samples=[0, 0, 0],
    rounds=21,
    ranks=[pb.RankResult(device="cpu", batches=40, ms_per_batch=25.0, waited_s=0.5)],
    model="/out/model.safetensors",
    duration_s=2.5,
)
FAILURE = pb.JobResult(
    state=pb.JOB_STATE_FAILED, error="rank 1 failed at batch 3", traceback="Traceback ...\nValueError: no"
)
CANCELLED = pb.JobResult(state=pb.JOB_STATE_CANCELLED)


def message(event: object) -> pb.WatchJobResponse:
    """The watch's message for an event."""
    if isinstance(event, pb.WatchJobResponse):
        return event
    kinds = {pb.JobView: "view", pb.EpochReport: "epoch", pb.EvaluationReport: "evaluation"}
    kinds |= {pb.RoundReport: "round", pb.JobResult: "result"}
    return pb.WatchJobResponse(**{kinds[type(event)]: event})


class ScriptedJobs(JobServiceServicer):
    """Knows one job, "j-1", and plays its script to every watcher. `refusal` is what every call gets instead."""

    def __init__(
        self,
        *script: object,
        refusal: tuple[grpc.StatusCode, str] | None = None,
        logs: Sequence[pb.StreamLogsResponse] = (),
    ) -> None:
        self.logs = logs
        self.log_requests: list[pb.StreamLogsRequest] = []
        self.script: Sequence[object] = script
        self.refusal = refusal
        self.specs: list[pb.JobSpec] = []
        self.metadata: dict[str, str] = {}
        self.cancelled = Flag()
        self.watcher_left = Flag()

    def _enter(self, context: grpc.ServicerContext, job_id: str = "j-1") -> None:
        self.metadata = dict(context.invocation_metadata())
        if self.refusal:
            context.abort(*self.refusal)
        if job_id != "j-1":
            context.abort(grpc.StatusCode.NOT_FOUND, f"no job {job_id}")

    def SubmitJob(self, request, context):  # noqa: N802 - the service's name
        self._enter(context)
        self.specs.append(request.spec)
        return pb.SubmitJobResponse(job_id="j-1")

    def ListJobs(self, request, context):  # noqa: N802
        self._enter(context)
        return pb.ListJobsResponse(jobs=[event for event in self.script if isinstance(event, pb.JobView)])

    def WatchJob(self, request, context):  # noqa: N802
        self._enter(context, request.job_id)
        context.add_callback(self.watcher_left.set)
        context.add_callback(self.cancelled.set)  # a call without a watcher must not hold the server
        for event in self.script:
            if event is UNTIL_CANCELLED:
                self.cancelled.wait()
            elif isinstance(event, grpc.StatusCode):
                context.abort(event, "scripted")
            else:
                yield message(event)

    def StreamLogs(self, request, context):  # noqa: N802
        self._enter(context, request.job_id)
        self.log_requests.append(request)
        yield from self.logs

    def FetchTimeline(self, request, context):  # noqa: N802
        self._enter(context, request.job_id)
        yield from ()

    def ResumeJob(self, request, context):  # noqa: N802
        self._enter(context, request.job_id)
        return pb.ResumeJobResponse(job_id="j-1")

    def PauseJob(self, request, context):  # noqa: N802
        self._enter(context, request.job_id)
        state = next(event.state for event in self.script if isinstance(event, pb.JobView))
        is_made = state == (pb.JOB_STATE_TRAINING if request.is_paused else pb.JOB_STATE_PAUSED)
        return pb.PauseJobResponse(changed=is_made, state=state)

    def CancelJob(self, request, context):  # noqa: N802
        self._enter(context, request.job_id)
        self.cancelled.set()
        state = next((event.state for event in self.script if isinstance(event, pb.JobView)), pb.JOB_STATE_TRAINING)
        return pb.CancelJobResponse(changed=state == pb.JOB_STATE_TRAINING, state=state)


@contextmanager
def serving(jobs: ScriptedJobs) -> Iterator[str]:
    """A server on a free loopback port; gives its address."""
    server = grpc.server(ThreadPoolExecutor(max_workers=8))
    add_JobServiceServicer_to_server(jobs, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(grace=None).wait()


@contextmanager
def connected(jobs: ScriptedJobs) -> Iterator[Client]:
    with serving(jobs) as address, Client(address) as client:
        yield client


def closed_address() -> str:
    with serving(ScriptedJobs()) as address:
        return address
