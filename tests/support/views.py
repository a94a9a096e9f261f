"""Made-up views and reports of a job, for tests of what exports, draws and keeps them."""

from elche_coordinator.core.describe import JobView, RankView
from elche_coordinator.core.messages.events import Gauges
from elche_coordinator.core.messages.reports import EpochReport
from elche_coordinator.core.records.histogram import BATCH_SECONDS, Histogram

FULL = Gauges(
    learning_rate=0.1,
    gradient_norm=2.0,
    parameter_norm=3.0,
    memory_used_bytes=1,
    memory_reserved_bytes=1,
    memory_peak_bytes=1,
    memory_total_bytes=1,
    gpu_utilization=0.5,
    gpu_temperature_celsius=60,
    gpu_power_watts=300,
    memory_process_bytes=1,
    gpu_slowdowns=("thermal",),
    gpu_corrected_ecc_errors=5,
    gpu_uncorrected_ecc_errors=1,
    gpu_xid_errors=2,
)


def durations(*values_s: float) -> Histogram:
    histogram = Histogram(BATCH_SECONDS)
    histogram.extend(values_s)
    return histogram


def rank_view(rank: int) -> RankView:
    return RankView(
        rank=rank,
        device="cuda:0 H200",
        state="training",
        ms_per_batch=20.0,
        round_batches=3,
        round_target=7,
        share_fraction=0.5,
        num_batches=100,
        waited_s=1.0,
        host="host",
        log_path="",
        callback_errors=0,
        divergence=0.01,
        data_wait_s=0.5,
        compute_s=2.0,
        num_samples=3200,
        samples_per_s=1600.0,
        loss=0.3,
        throttled_s=0.0,
        gauges=FULL,
        durations=durations(0.02, 0.02, 0.5),
    )


def job_view(num_ranks: int, job_id: str = "j-1") -> JobView:
    return JobView(
        job_id=job_id,
        name="digits",
        state="training",
        reason="trains",
        epoch=1,
        num_epochs=3,
        loss=0.5,
        eta_s=60.0,
        checkpoint_age_s=10.0,
        metrics={"accuracy": 0.9},
        ranks=tuple(rank_view(rank) for rank in range(num_ranks)),
    )


class Wall:
    """A wall clock that goes on by a second at every look."""

    now = 1_700_000_000.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def epoch_report(epoch: int, **scalars: float) -> EpochReport:
    return EpochReport(
        epoch=epoch,
        loss=1.0 / (epoch + 1),
        scalars=scalars,
        duration_s=1.0,
        committed=320,
        dropped=0,
        rank_batches=(6, 4),
        rank_samples_per_s=(1.0, 1.0),
    )
