"""What is exported: every metric that the docs name, no other, and fast for a thousand ranks."""

import re
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from elche_coordinator.access.upkeep import Term
from elche_coordinator.core.describe import JobView
from elche_coordinator.core.messages.events import Gauges
from elche_coordinator.telemetry.metrics import EXPIRE_S, MAX_METRICS, MetricsSnapshot, SnapshotCollector
from support.effort import lines_run
from support.views import durations, job_view, rank_view

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs" / "metrics.md"


def exported(snapshot: MetricsSnapshot) -> str:
    registry = CollectorRegistry()
    registry.register(SnapshotCollector(snapshot))
    return generate_latest(registry).decode()


def names_of(text: str) -> set[str]:
    families = text_string_to_metric_families(text)
    return {f"{family.name}_total" if family.type == "counter" else family.name for family in families}


@pytest.fixture
def snapshot() -> MetricsSnapshot:
    streams = {"agent": 1, "rank": 2, "watcher": 0}
    return MetricsSnapshot(
        jobs=[job_view(2)],
        streams=streams,
        messages={("rank", "in"): 5},
        num_slots=3,
        num_busy_slots=2,
        disk=(1, 2),
        terms=[Term(kind="token", name="anna", role="user", made_at=1.0, ends_at=2.0)],
    )


def test_the_docs_name_every_metric_and_no_other(snapshot: MetricsSnapshot) -> None:
    documented = set(re.findall(r"^\| `(elche_\w+)`", DOCS.read_text(encoding="utf-8"), re.MULTILINE))
    assert names_of(exported(snapshot)) == documented


def test_what_is_not_known_has_no_series(snapshot: MetricsSnapshot) -> None:
    unknown = replace(rank_view(0), gauges=Gauges(), loss=None, ms_per_batch=0.0)
    text = exported(replace(snapshot, jobs=[replace(job_view(0), ranks=(unknown,), loss=None, eta_s=None)]))
    for name in ("rank_gpu_power_watts", "rank_loss", "rank_batch_seconds", "rank_memory_used_bytes", "job_loss"):
        assert not re.search(rf"^elche_{name}{{", text, re.MULTILINE), name
    assert re.search(r"^elche_rank_batches_total{", text, re.MULTILINE)


def test_a_slowdown_that_nobody_knows_makes_no_series(snapshot: MetricsSnapshot) -> None:
    said = replace(rank_view(0), gauges=Gauges(gpu_slowdowns=("thermal", "x" * 1000, "thermal")))
    text = exported(replace(snapshot, jobs=[replace(job_view(0), ranks=(said,))]))
    assert re.findall(r'^elche_rank_gpu_slowdown{.*reason="(\w+)"', text, re.MULTILINE) == ["thermal"]


def test_series_of_an_ended_job_expire_and_it_is_still_counted(snapshot: MetricsSnapshot) -> None:
    for ended_for_s, is_shown in ((EXPIRE_S - 1, True), (EXPIRE_S, False)):
        job = replace(job_view(2), state="succeeded", ended_s=7.0)
        text = exported(replace(snapshot, now_s=7.0 + ended_for_s, jobs=[job], ended={"succeeded": 4}))
        assert ('elche_job_epoch{job="j-1"}' in text) == is_shown
        assert ('rank="1"' in text) == is_shown
        assert 'elche_jobs{state="succeeded"} 5.0' in text


def test_a_job_that_waits_has_a_state_and_no_figures(snapshot: MetricsSnapshot) -> None:
    queued = JobView(job_id="j-2", name="next", state="queued", reason="waits for free slots")
    text = exported(replace(snapshot, jobs=[queued]))
    assert 'elche_job_state{job="j-2",state="queued"} 1.0' in text
    assert "elche_job_epoch{" not in text


def test_what_cannot_be_printed_in_a_label_is_escaped(snapshot: MetricsSnapshot) -> None:
    """A job's name could clear or colour the terminal of whoever looked at the metrics."""
    named = replace(job_view(1), name="a\x1b[2Jä\r", metrics={"f\u202e1": 0.5, "f1": 0.25})
    ranks = tuple(replace(one, host="vm\x07") for one in named.ranks)
    text = exported(replace(snapshot, jobs=[replace(named, ranks=ranks)]))
    assert [character for character in text.replace("\n", "") if not character.isprintable()] == []
    samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
    labels = {(name, value) for one in samples for name, value in one.labels.items()}
    escaped = {("name", r"a\x1b[2Jä\r"), ("metric", r"f\u202e1"), ("metric", "f1"), ("host", r"vm\x07")}
    assert escaped <= labels


def test_a_thousand_metrics_of_a_job_do_not_fill_the_text(snapshot: MetricsSnapshot) -> None:
    """100 jobs of one user with a thousand metrics each took 23 MiB and a second of each scrape."""
    many = replace(job_view(0), metrics={f"class {number:04}": 0.5 for number in reversed(range(1000))})
    shown = re.findall(
        r'^elche_job_evaluation{.*metric="(.*)"}', exported(replace(snapshot, jobs=[many])), re.MULTILINE
    )
    assert shown == [f"class {number:04}" for number in range(MAX_METRICS)]


def test_batch_times_are_counted_by_size() -> None:
    histogram = durations(0.001, 0.0011, 0.02, 100.0, 0.0, -1.0, inf)
    rows = dict(histogram.cumulative())
    assert (rows[0.001], rows[0.003], rows[0.03], rows[10.0], rows[inf]) == (1, 2, 3, 3, 4)
    assert histogram.sum == pytest.approx(100.0221)


def test_a_thousand_ranks_in_ten_jobs_are_exported_in_half_a_second() -> None:
    """Half a second is 5,000 lines of Python for each rank, however many there are."""
    small, large = (MetricsSnapshot(jobs=[job_view(size, f"job-{index}") for index in range(10)]) for size in (10, 100))
    assert exported(large).count("elche_rank_batches_total{") == 1000
    per_rank = lines_run(lambda: exported(small)) / 100
    assert lines_run(lambda: exported(large)) / 1000 < min(5000, 1.1 * per_rank)


def test_each_alert_is_in_the_table_of_what_to_do() -> None:
    rules = (ROOT / "docker" / "prometheus" / "rules" / "elche.yml").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (`Elche[^|]+) \|", page, re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(cells))) == sorted(re.findall(r"alert: (\w+)", rules))
