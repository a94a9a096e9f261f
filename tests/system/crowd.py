"""Serves the page over a made-up crowd: ten jobs with a thousand ranks, a hundred that have ended, and sixty hosts,
some of one name, and a long one. Run as a process; prints its address."""

import asyncio
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from elche.errors import UnknownJob
from elche_coordinator.access.credentials import Credentials
from elche_coordinator.core.describe import JobDetails, JobView, RankView
from elche_coordinator.core.messages.events import Gauges
from elche_coordinator.core.messages.ids import AgentId, JobId, Rank
from elche_coordinator.core.messages.reports import EpochReport, EvaluationReport, JobResult, Outcome, Report
from elche_coordinator.core.messages.spec import JobSpec, Slot
from elche_coordinator.core.records.fleet import HostView
from elche_coordinator.core.records.histogram import BATCH_SECONDS, Histogram
from elche_coordinator.web.app import Web
from elche_coordinator.web.recordings import Recordings
from elche_coordinator.web.server import WebServer

NUM_HOSTS = 60
NUM_ENDED = 100
LONG = "a-host-with-a-name-that-goes-on-and-on.of-a-cluster.of-a-company.example"
SIZES = (910, 10, 10, 10, 10, 10, 10, 10, 10, 10)
DURATIONS = Histogram(BATCH_SECONDS)
DURATIONS.extend([0.02] * 50)


def rank_view(rank: int, wave: float) -> RankView:
    ms = 20 + rank % 37 + wave + random.random()
    return RankView(
        rank=rank,
        device="cuda:0 NVIDIA H200",
        state="stalled" if rank == 9 else "training",
        ms_per_batch=ms,
        round_batches=int(40 / ms * 10),
        round_target=40,
        share_fraction=1 / 910,
        num_batches=1000,
        waited_s=10.0 + rank % 7,
        host=LONG if rank < 8 else f"host-{rank // 8}",
        agent_id=f"agent-{rank // 4}",
        log_path="",
        callback_errors=0,
        divergence=0.01 + 0.001 * (rank % 5),
        data_wait_s=1.0,
        compute_s=300.0,
        num_samples=32_000,
        samples_per_s=32_000 / ms,
        loss=0.5 + wave / 10,
        throttled_s=0.0,
        gauges=Gauges(memory_used_bytes=20 << 30, memory_total_bytes=141 << 30, gpu_utilization=0.97),
        durations=DURATIONS,
    )


def job_view(index: int) -> JobView:
    wave = math.sin(time.time() / 5 + index)
    return JobView(
        job_id=f"job-{index}",
        name="crowd",
        state="training",
        reason="trains",
        epoch=2,
        num_epochs=10,
        progress_fraction=0.3,
        loss=0.5 + wave / 10,
        samples_per_s=1e6,
        anchor=20,
        num_rounds=500,
        eta_s=3600.0,
        ranks=tuple(rank_view(rank, wave) for rank in range(SIZES[index])),
    )


class Crowd:
    """What a `Driver` is to the page: hosts, and reports of jobs."""

    @property
    def watchers(self) -> "Crowd":
        """Those that are told of reports: the page alone."""
        return self

    @property
    def agents(self) -> "Crowd":
        return self

    def hosts(self) -> list[HostView]:
        slots = tuple(Slot(device=f"cuda:{index}", model="NVIDIA H200") for index in range(8))
        names = [LONG if index < 3 else f"host-{index}" for index in range(NUM_HOSTS)]
        busy = [{slot: (JobId("job-0"), Rank(7 * index + slot)) for slot in range(7)} for index in range(len(names))]
        return [
            HostView(agent_id=AgentId(f"agent-{index}"), host=name, slots=slots, ranks=busy[index])
            for index, name in enumerate(names)
        ]

    def on_published(self, action: Callable[[str, Report], None]) -> None:
        """Sixty-four metrics in forty epochs."""
        for epoch in range(40):
            scalars = {f"metric {index}": 1 + index / (epoch + 1) for index in range(70)}
            rates = (6, 4)
            report = EpochReport(
                epoch=epoch,
                loss=1 / (epoch + 1),
                scalars=scalars,
                duration_s=1.0,
                committed=1,
                dropped=0,
                rank_batches=rates,
                rank_samples_per_s=rates,
            )
            action("job-0", report)
            action("job-0", EvaluationReport(epoch=epoch, metrics={"metric 3": 2.0}, duration_s=1.0))


class Jobs:
    """What a `JobCatalogue` is to the page: jobs that train, and past ones without figures, some with a long error."""

    def present_views(self) -> list[JobView]:
        return [job_view(index) for index in range(len(SIZES))]

    def past_views(self) -> list[JobView]:
        view = replace(job_view(1), ranks=(), loss=None, samples_per_s=0.0, eta_s=None, metrics={})
        states = ["failed" if index % 10 == 0 else "succeeded" for index in range(NUM_ENDED)]
        return [replace(view, job_id=f"past-{index}", state=state) for index, state in enumerate(states)]

    def is_past(self, job_id: str) -> bool:
        return job_id.startswith("past-")

    def view(self, job_id: str) -> JobView | None:
        views = self.past_views() if self.is_past(job_id) else self.present_views()
        return next((view for view in views if view.job_id == job_id), None)

    def known_view(self, job_id: str) -> JobView:
        view = self.view(job_id)
        if view is None:
            raise UnknownJob(job_id)
        return view

    def result(self, job_id: str) -> JobResult | None:
        view = self.view(job_id)
        if view is None or not self.is_past(job_id):
            return None
        return JobResult(outcome=Outcome(view.state), error="x" * 3000, traceback="y" * 3000)

    def details(self, job_id: str) -> JobDetails | None:
        if self.view(job_id) is None:
            return None
        if (result := self.result(job_id)) is None:
            return JobDetails(spec=JobSpec(name="crowd", source_hash="", file_name="crowd.py"))
        return JobDetails(spec=JobSpec(name="x" * 300, source_hash="", file_name="/" + "z" * 300), result=result)


async def main() -> None:
    server = WebServer("127.0.0.1", 0)
    recordings = Recordings(Path(tempfile.mkdtemp()))
    web = Web(Crowd(), Jobs(), Credentials("", None), None, None, recordings, None, None, None)  # type: ignore[arg-type]
    recording = asyncio.create_task(web.record())
    server.start(web.app)
    print(f"http://127.0.0.1:{server.port}", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    recording.cancel()
    web.stop()
    await server.stop()


if __name__ == "__main__":
    asyncio.run(main())
