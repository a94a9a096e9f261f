"""What Prometheus scrapes: computed from the jobs' views when it asks, nothing counted on the way."""

from collections.abc import Callable, Iterable

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from elche_coordinator.core.describe import JobView, RankView

RANK_LABELS = ("job", "rank", "device")


class JobCollector(Collector):
    """Turns views of all jobs into metrics."""

    def __init__(self, views: list[JobView], num_write_failures: int) -> None:
        self._views = views
        self._num_write_failures = num_write_failures

    def collect(self) -> Iterable[Metric]:
        """The metrics of this moment."""
        yield from _job_metrics(self._views)
        yield from _rank_metrics(self._views)
        failures = CounterMetricFamily("elche_record_write_failures", "Failed attempts to make a job's record durable.")
        failures.add_metric((), self._num_write_failures)
        yield failures


def _job_metrics(views: list[JobView]) -> Iterable[Metric]:
    states = GaugeMetricFamily("elche_jobs", "Jobs by state.", labels=("state",))
    for state in sorted({view.state for view in views}):
        states.add_metric((state,), sum(view.state == state for view in views))
    yield states
    running = [view for view in views if view.num_epochs]
    columns: list[tuple[str, str, Callable[[JobView], float]]] = [
        ("elche_job_samples_per_second", "Samples trained per second.", lambda view: view.samples_per_s),
        ("elche_job_epoch", "Epoch in progress, from 0.", lambda view: view.epoch),
        ("elche_job_anchor_batches", "Batches of the slowest rank between averagings.", lambda view: view.anchor),
        ("elche_job_loss", "Mean training loss of the last reported batches.", lambda view: view.loss or 0.0),
    ]
    for name, text, value in columns:
        gauge = GaugeMetricFamily(name, text, labels=("job",))
        for view in running:
            gauge.add_metric((view.job_id,), value(view))
        yield gauge
    failures = CounterMetricFamily(
        "elche_job_checkpoint_failures", "Checkpoints that could not be written.", labels=("job",)
    )
    for view in running:
        failures.add_metric((view.job_id,), view.num_checkpoint_failures)
    yield failures
    rounds = CounterMetricFamily("elche_job_rounds", "Committed rounds.", labels=("job",))
    for view in running:
        rounds.add_metric((view.job_id,), view.num_rounds)
    yield rounds


def _rank_metrics(views: list[JobView]) -> Iterable[Metric]:
    rows = [((view.job_id, str(rank.rank), rank.device), rank) for view in views for rank in view.ranks]
    gauges: list[tuple[str, str, Callable[[RankView], float]]] = [
        ("elche_rank_batch_seconds", "Recent compute time per batch.", lambda rank: rank.ms_per_batch / 1000),
        ("elche_rank_divergence_ratio", "What the last round changed, relative to its result.", lambda r: r.divergence),
        ("elche_rank_peak_memory_bytes", "Peak device memory; 0 when unknown.", lambda rank: rank.peak_memory_bytes),
        ("elche_rank_share_ratio", "Part of the job's committed batches.", lambda rank: rank.share_fraction),
    ]
    counters: list[tuple[str, str, Callable[[RankView], float]]] = [
        ("elche_rank_batches", "Batches trained.", lambda rank: rank.num_batches),
        ("elche_rank_compute_seconds", "Compute time of committed batches.", lambda rank: rank.compute_s),
        ("elche_rank_waited_seconds", "Time spent waiting for other ranks in rounds.", lambda rank: rank.waited_s),
        ("elche_rank_data_wait_seconds", "Time spent waiting for data.", lambda rank: rank.data_wait_s),
        (
            "elche_rank_callback_errors",
            "How often callbacks of the job have raised.",
            lambda rank: rank.callback_errors,
        ),
    ]
    for family, columns in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
        for name, text, value in columns:
            metric = family(name, text, labels=RANK_LABELS)
            for labels, rank in rows:
                metric.add_metric(labels, value(rank))
            yield metric
