"""Serves the page over a made-up crowd: ten jobs with a thousand ranks. Run as a process; prints its address."""

import asyncio
import math
import random
import sys
import time
from dataclasses import replace

from elche_coordinator.core.describe import JobView, RankView
from elche_coordinator.core.events import Gauges
from elche_coordinator.core.histogram import BATCH_SECONDS, Histogram
from elche_coordinator.metrics import Moment
from elche_coordinator.transfers import Transfers
from elche_coordinator.web.app import Web
from elche_coordinator.web.server import WebServer

SIZES = (910, 10, 10, 10, 10, 10, 10, 10, 10, 10)
DURATIONS = Histogram(BATCH_SECONDS)
DURATIONS.extend([0.02] * 50)


def rank_view(rank: int, wave: float) -> RankView:
    ms = 20 + rank % 37 + wave + random.random()
    return RankView(
        rank=rank,
        device="cuda:0 NVIDIA H200",
        state="training",
        ms_per_batch=ms,
        round_batches=int(40 / ms * 10),
        round_target=40,
        share_fraction=1 / 910,
        num_batches=1000,
        waited_s=10.0 + rank % 7,
        host=f"host-{rank // 8}",
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
    """What a `Driver` is to the page."""

    def views(self) -> list[JobView]:
        return [job_view(index) for index in range(len(SIZES))]

    def view(self, job_id: str) -> JobView | None:
        return next((view for view in self.views() if view.job_id == job_id), None)

    def hosts(self) -> tuple[dict[object, object], dict[object, object]]:
        return {}, {}

    def moment(self, past: list[JobView]) -> Moment:
        return Moment(jobs=self.views())

    def on_published(self, action: object) -> None:
        """Nobody is told anything."""


class Nothing:
    """What a `History` is to the page."""

    def views(self) -> list[JobView]:
        return [replace(job_view(1), job_id="past", state="succeeded", ranks=())]

    def view(self, job_id: str) -> None:
        return None


async def main() -> None:
    server = WebServer("127.0.0.1", 0)
    web = Web(Crowd(), Nothing(), Transfers(), "")  # type: ignore[arg-type]
    recording = asyncio.create_task(web.record())
    server.start(web.app)
    print(f"http://127.0.0.1:{server.port}", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    recording.cancel()
    web.stop()
    await server.stop()


if __name__ == "__main__":
    asyncio.run(main())
