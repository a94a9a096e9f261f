"""What is exported: every metric that the docs name, no other, and fast for a thousand ranks."""

import re
import time
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from elche_coordinator.core.describe import JobView, RankView
from elche_coordinator.core.messages.events import Gauges
from elche_coordinator.core.records.histogram import BATCH_SECONDS, Histogram
from elche_coordinator.metrics import EXPIRE_S, Moment, MomentCollector

DOCS = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
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


def exported(moment: Moment) -> str:
    registry = CollectorRegistry()
    registry.register(MomentCollector(moment))
    return generate_latest(registry).decode()


def names_of(text: str) -> set[str]:
    families = text_string_to_metric_families(text)
    return {f"{family.name}_total" if family.type == "counter" else family.name for family in families}


@pytest.fixture
def moment() -> Moment:
    streams = {"agent": 1, "rank": 2, "watcher": 0}
    return Moment(jobs=[job_view(2)], streams=streams, messages={("rank", "in"): 5}, num_slots=3, num_busy_slots=2)


def test_the_docs_name_every_metric_and_no_other(moment: Moment) -> None:
    documented = set(re.findall(r"^\| `(elche_\w+)`", DOCS.read_text(encoding="utf-8"), re.MULTILINE))
    assert names_of(exported(moment)) == documented


def test_what_is_not_known_has_no_series(moment: Moment) -> None:
    unknown = replace(rank_view(0), gauges=Gauges(), loss=None, ms_per_batch=0.0)
    text = exported(replace(moment, jobs=[replace(job_view(0), ranks=(unknown,), loss=None, eta_s=None)]))
    for name in ("rank_gpu_power_watts", "rank_loss", "rank_batch_seconds", "rank_memory_used_bytes", "job_loss"):
        assert not re.search(rf"^elche_{name}{{", text, re.MULTILINE), name
    assert re.search(r"^elche_rank_batches_total{", text, re.MULTILINE)


def test_series_of_an_ended_job_expire_and_it_is_still_counted(moment: Moment) -> None:
    for ended_for_s, is_shown in ((EXPIRE_S - 1, True), (EXPIRE_S, False)):
        job = replace(job_view(2), state="succeeded", ended_for_s=ended_for_s)
        text = exported(replace(moment, jobs=[job], ended={"succeeded": 4}))
        assert ('elche_job_epoch{job="j-1"}' in text) == is_shown
        assert ('rank="1"' in text) == is_shown
        assert 'elche_jobs{state="succeeded"} 5.0' in text


def test_a_job_that_waits_has_a_state_and_no_figures(moment: Moment) -> None:
    queued = JobView(job_id="j-2", name="next", state="queued", reason="waits for free slots")
    text = exported(replace(moment, jobs=[queued]))
    assert 'elche_job_state{job="j-2",state="queued"} 1.0' in text
    assert "elche_job_epoch{" not in text


def test_batch_times_are_counted_by_size() -> None:
    histogram = durations(0.001, 0.0011, 0.02, 100.0, 0.0, -1.0, inf)
    rows = dict(histogram.cumulative())
    assert (rows[0.001], rows[0.003], rows[0.03], rows[10.0], rows[inf]) == (1, 2, 3, 3, 4)
    assert histogram.sum == pytest.approx(100.0221)


def test_a_thousand_ranks_in_ten_jobs_are_exported_in_half_a_second() -> None:
    moment = Moment(jobs=[job_view(100, f"job-{index}") for index in range(10)])
    exported(moment)
    started_s = time.process_time()
    assert exported(moment).count("elche_rank_batches_total{") == 1000
    assert time.process_time() - started_s < 0.5
