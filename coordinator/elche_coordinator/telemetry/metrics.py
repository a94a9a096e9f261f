"""Prometheus metrics, computed from a snapshot at each scrape. `docs/metrics.md` explains each."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from elche_coordinator.access.upkeep import Term, Upkeep
from elche_coordinator.archive.artifacts import Artifacts
from elche_coordinator.archive.catalogue import JobCatalogue
from elche_coordinator.core.describe import JobView, RankView
from elche_coordinator.core.records.histogram import PERSIST_SECONDS, Histogram
from elche_coordinator.driver import Driver

MAX_METRICS = 64
"""Most metrics of a job's evaluation that are exported, the first by name. Each is a series, and a job may have a
thousand."""
EXPIRE_S = 15 * 60
"""Seconds for which the series of an ended job are exported."""


@dataclass(slots=True, kw_only=True)
class MetricsSnapshot:
    """All values that are exported, at one moment."""

    now_s: float = 0.0
    """By the coordinator's clock."""
    jobs: list[JobView] = field(default_factory=list)
    ended: dict[str, int] = field(default_factory=dict)
    """State to number of jobs, of earlier runs of the coordinator."""
    num_agents: int = 0
    num_slots: int = 0
    num_busy_slots: int = 0
    streams: dict[str, int] = field(default_factory=dict)
    messages: dict[tuple[str, str], int] = field(default_factory=dict)
    """(kind of stream, "in" or "out") to messages."""
    loop_lag_s: float = 0.0
    persist: Histogram = field(default_factory=lambda: Histogram(PERSIST_SECONDS))
    num_persist_failures: int = 0
    num_artifact_failures: int = 0
    num_artifacts_waiting: int = 0
    """Jobs that have ended, and are not all in the artifact store."""
    disk: tuple[int, int] | None = None
    """Free bytes and all bytes."""
    terms: list[Term] = field(default_factory=list)


def snapshot(
    driver: Driver,
    catalogue: JobCatalogue,
    artifacts: Artifacts,
    upkeep: Upkeep,
    disk: tuple[int, int] | None,
) -> MetricsSnapshot:
    """All that is exported, as it is now. `disk` is from `upkeep.disk()`, which may block, and so runs on a thread."""
    hosts, streams = driver.agents.hosts(), driver.streams
    num_connected = {
        "agent": sum(stream.is_connected for stream in streams.agents.values()),
        "rank": sum(one.is_connected for of_job in streams.ranks.values() for one in of_job.values()),
    }
    return MetricsSnapshot(
        now_s=driver.now_s,
        jobs=catalogue.present_views(),
        ended=Counter(view.state for view in catalogue.past_views()),
        num_agents=len(hosts),
        num_slots=sum(len(host.slots) for host in hosts),
        num_busy_slots=sum(len(host.ranks) for host in hosts),
        streams={**num_connected, "watcher": driver.watchers.num_watchers},
        messages=dict(driver.health.messages),
        loop_lag_s=driver.health.lag_s,
        persist=driver.writer.durations.copy(),
        num_persist_failures=driver.writer.num_failures,
        num_artifact_failures=artifacts.num_failures,
        num_artifacts_waiting=artifacts.num_waiting,
        disk=disk,
        terms=upkeep.terms(time.time()),
    )


JobFigure = tuple[str, str, Callable[[JobView], float | None]]
RankFigure = tuple[str, str, Callable[[RankView], float | None]]

JOB_GAUGES: tuple[JobFigure, ...] = (
    ("ranks", "Ranks in training.", lambda job: sum(rank.state != "exited" for rank in job.ranks)),
    ("epoch", "Current epoch, from 0.", lambda job: job.epoch),
    ("epochs", "Number of epochs.", lambda job: job.num_epochs),
    ("progress_ratio", "Trained samples as a fraction of all samples to train.", lambda job: job.progress_fraction),
    ("samples_per_second", "Samples trained per second since training began.", lambda job: job.samples_per_s),
    ("remaining_seconds", "Estimated time until training ends.", lambda job: job.eta_s),
    ("loss", "Mean training loss of the last reported batches.", lambda job: job.loss),
    ("anchor_batches", "Batches of the slowest rank between averagings.", lambda job: job.anchor),
    ("round_duration_seconds", "Time between the last two commits.", lambda job: job.round_s),
    ("averaging_seconds", "Duration of the last averaging.", lambda job: job.averaging_s),
    ("overhead_ratio", "Fraction of time in which rounds kept ranks from training.", lambda job: job.overhead_fraction),
    ("checkpoint_age_seconds", "Time since the newest checkpoint.", lambda job: job.checkpoint_age_s),
    ("queue_wait_seconds", "Time from submission to placement.", lambda job: job.queue_wait_s),
)
JOB_COUNTERS: tuple[JobFigure, ...] = (
    ("samples", "Committed samples, repeated ones included.", lambda job: job.counts.samples),
    ("made_samples", "Samples that ranks have trained, committed or not.", lambda job: job.counts.made_samples),
    ("rounds", "Committed rounds.", lambda job: job.counts.rounds),
    ("averaged_bytes", "Payload bytes sent for averaging.", lambda job: job.counts.sent_bytes),
    ("aborted_rounds", "Rounds that were aborted and repeated.", lambda job: job.counts.given_up_rounds),
    ("regroups", "Process groups formed after the first.", lambda job: job.counts.regroups),
    ("lost_ranks", "Ranks that died or were lost while the job ran.", lambda job: job.num_lost_ranks),
    (
        "discarded_samples",
        "Samples left out of the model: non-finite or outliers.",
        lambda job: job.counts.discarded_samples,
    ),
    ("checkpoint_failures", "Checkpoints that could not be written.", lambda job: job.counts.checkpoint_failures),
)
RANK_GAUGES: tuple[RankFigure, ...] = (
    (
        "batch_seconds",
        "Current time per batch, including waits for data.",
        lambda rank: rank.ms_per_batch / 1000 or None,
    ),
    ("samples_per_second", "Current speed between rounds, including waits for data.", lambda rank: rank.samples_per_s),
    ("share_ratio", "Fraction of the job's committed batches.", lambda rank: rank.share_fraction),
    ("round_batches", "Batches since the last committed round.", lambda rank: rank.round_batches),
    ("round_target_batches", "Target number of batches in the open round.", lambda rank: rank.round_target),
    (
        "divergence_ratio",
        "Distance between the rank's parameters and the last result, relative to the result.",
        lambda rank: rank.divergence,
    ),
    ("loss", "Mean training loss of the last reported batches.", lambda rank: rank.loss),
    ("learning_rate", "Learning rate of the first parameter group.", lambda rank: rank.gauges.learning_rate),
    (
        "gradient_norm",
        "Gradient norm before clipping; only with max_grad_norm.",
        lambda rank: rank.gauges.gradient_norm,
    ),
    ("parameter_norm", "Norm of the trained parameters.", lambda rank: rank.gauges.parameter_norm),
    ("memory_used_bytes", "Memory in use on the device.", lambda rank: rank.gauges.memory_used_bytes or None),
    ("memory_process_bytes", "GPU memory held by the rank's process.", lambda rank: rank.gauges.memory_process_bytes),
    (
        "memory_reserved_bytes",
        "Memory held by PyTorch's allocator.",
        lambda rank: rank.gauges.memory_reserved_bytes or None,
    ),
    ("memory_peak_bytes", "Peak memory in use.", lambda rank: rank.gauges.memory_peak_bytes or None),
    ("memory_total_bytes", "Memory of the device.", lambda rank: rank.gauges.memory_total_bytes or None),
    (
        "gpu_utilization_ratio",
        "Fraction of the last second in which the GPU was busy.",
        lambda rank: rank.gauges.gpu_utilization,
    ),
    ("gpu_temperature_celsius", "Temperature.", lambda rank: rank.gauges.gpu_temperature_celsius),
    ("gpu_power_watts", "Power draw.", lambda rank: rank.gauges.gpu_power_watts),
    ("prefetch_batches", "Batches fetched ahead.", lambda rank: rank.gauges.prefetch_batches),
    (
        "stalled_seconds",
        "Time without a batch beyond what the rank's history explains; else 0.",
        lambda rank: rank.stalled_s,
    ),
)
RANK_COUNTERS: tuple[RankFigure, ...] = (
    ("batches", "Batches trained.", lambda rank: rank.num_batches),
    ("samples", "Samples committed.", lambda rank: rank.num_samples),
    ("compute_seconds", "Compute time of committed batches, without waits for data.", lambda rank: rank.compute_s),
    ("data_wait_seconds", "Time without data for the next batch.", lambda rank: rank.data_wait_s),
    ("round_wait_seconds", "Time in which rounds kept the rank from training.", lambda rank: rank.waited_s),
    ("throttled_seconds", "Time stopped at the limit of batches.", lambda rank: rank.throttled_s),
    (
        "gpu_corrected_ecc_errors",
        "Memory errors that were corrected, since the driver was loaded.",
        lambda rank: rank.gauges.gpu_corrected_ecc_errors,
    ),
    (
        "gpu_uncorrected_ecc_errors",
        "Memory errors that could not be corrected, since the driver was loaded.",
        lambda rank: rank.gauges.gpu_uncorrected_ecc_errors,
    ),
    ("gpu_xid_errors", "That the driver has reported since it began.", lambda rank: rank.gauges.gpu_xid_errors),
    ("callback_errors", "Exceptions raised by the job's callbacks.", lambda rank: rank.callback_errors),
)

SLOWDOWNS = ("hardware", "power_brake", "power_cap", "thermal")
"""Exported reasons. Others are dropped, since each text of a rank would be a series."""


class SnapshotCollector(Collector):
    """The metrics of one snapshot. Safe on any thread, because the snapshot does not change."""

    def __init__(self, snapshot: MetricsSnapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterable[Metric]:
        """All metrics of the snapshot."""
        since_s = self._snapshot.now_s - EXPIRE_S
        shown = [job for job in self._snapshot.jobs if job.ended_s is None or job.ended_s > since_s]
        # Not before the ranks have said their epochs: a job that waits or starts would export zeros.
        ranks = [(job.job_id, rank) for job in shown if job.num_epochs for rank in job.ranks]
        of_jobs = chain(_job_metrics(shown), _rank_metrics(ranks))
        of_itself = chain(_coordinator_metrics(self._snapshot), _upkeep_metrics(self._snapshot))
        yield from map(_printable, chain(of_jobs, of_itself))


def _printable(metric: Metric) -> Metric:
    """The metric, with escapes for what cannot be printed in its labels: users name jobs, and terminals show labels."""
    for index, sample in enumerate(metric.samples):
        if not all(map(str.isprintable, sample.labels.values())):
            labels = {name: "".join(map(_escaped, text)) for name, text in sample.labels.items()}
            metric.samples[index] = sample._replace(labels=labels)
    return metric


def _escaped(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def _job_metrics(jobs: list[JobView]) -> Iterator[Metric]:
    labels = ("name", "policy", "averaging", "backend")
    info = GaugeMetricFamily("elche_job_info", "What the job is; always 1.", labels=("job", *labels))
    state = GaugeMetricFamily("elche_job_state", "The state that the job is in; always 1.", labels=("job", "state"))
    evaluation = GaugeMetricFamily("elche_job_evaluation", "Last evaluation.", labels=("job", "metric"))
    for job in jobs:
        info.add_metric((job.job_id, job.name, job.policy, job.averaging, job.backend_name), 1)
        state.add_metric((job.job_id, job.state), 1)
        for name in sorted(job.metrics)[:MAX_METRICS]:
            evaluation.add_metric((job.job_id, name), job.metrics[name])
    yield from (info, state, evaluation)
    rows = [((job.job_id,), job) for job in jobs if job.num_epochs]
    yield from _families("elche_job_", ("job",), JOB_GAUGES, JOB_COUNTERS, rows)


def _rank_metrics(ranks: list[tuple[str, RankView]]) -> Iterator[Metric]:
    names = ("job", "rank", "device", "host")
    rows = [((job_id, str(rank.rank), rank.device, rank.host), rank) for job_id, rank in ranks]
    state = GaugeMetricFamily("elche_rank_state", "The state that the rank is in; always 1.", labels=(*names, "state"))
    slowdown = GaugeMetricFamily(
        "elche_rank_gpu_slowdown", "Why its clock is lower than its load asks for; always 1.", labels=(*names, "reason")
    )
    durations = HistogramMetricFamily(
        "elche_rank_batch_duration_seconds", "Time of each batch, waits for data included.", labels=names
    )
    for labels, rank in rows:
        state.add_metric((*labels, rank.state), 1)
        for reason in SLOWDOWNS:
            if reason in rank.gauges.gpu_slowdowns:
                slowdown.add_metric((*labels, reason), 1)
        durations.add_metric(labels, _buckets(rank.durations), rank.durations.sum)
    yield from (state, slowdown, durations)
    yield from _families("elche_rank_", names, RANK_GAUGES, RANK_COUNTERS, rows)


def _coordinator_metrics(snapshot: MetricsSnapshot) -> Iterator[Metric]:
    counts = Counter(snapshot.ended) + Counter(job.state for job in snapshot.jobs)
    states = _by("elche_jobs", "Jobs by state.", "state", dict(sorted(counts.items())))
    of_slots = {"free": snapshot.num_slots - snapshot.num_busy_slots, "busy": snapshot.num_busy_slots}
    slots = _by("elche_slots", "Device slots by state.", "state", of_slots)
    streams = _by("elche_coordinator_streams", "Open streams by kind.", "kind", snapshot.streams)
    messages = CounterMetricFamily(
        "elche_coordinator_messages", "Messages by kind of stream and direction.", labels=("kind", "direction")
    )
    for labels, count in sorted(snapshot.messages.items()):
        messages.add_metric(labels, count)
    persist = HistogramMetricFamily("elche_coordinator_persist_duration_seconds", "Time to make records durable.")
    persist.add_metric((), _buckets(snapshot.persist), snapshot.persist.sum)
    yield from (states, slots, streams, messages, persist)
    yield GaugeMetricFamily("elche_coordinator_leads", "Whether this coordinator leads; 0: it stands by.", 1)
    yield GaugeMetricFamily("elche_agents", "Connected agents.", snapshot.num_agents)
    yield GaugeMetricFamily(
        "elche_coordinator_loop_lag_seconds",
        "How late the event loop woke, at most, in the last 10 seconds.",
        snapshot.loop_lag_s,
    )
    yield CounterMetricFamily(
        "elche_coordinator_persist_failures", "Failed attempts to make records durable.", snapshot.num_persist_failures
    )
    yield CounterMetricFamily(
        "elche_artifact_failures", "Failed attempts to store what jobs left.", snapshot.num_artifact_failures
    )
    yield GaugeMetricFamily(
        "elche_artifacts_waiting", "Ended jobs that are not all in the artifact store.", snapshot.num_artifacts_waiting
    )


def _by(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    """A gauge with a value for each value of its label."""
    metric = GaugeMetricFamily(name, text, labels=(label,))
    for one, value in values.items():
        metric.add_metric((one,), value)
    return metric


def _upkeep_metrics(snapshot: MetricsSnapshot) -> Iterator[Metric]:
    if snapshot.disk is not None:
        free, total = snapshot.disk
        yield GaugeMetricFamily("elche_coordinator_disk_free_bytes", "Free on the disk with --data.", free)
        yield GaugeMetricFamily("elche_coordinator_disk_bytes", "Size of the disk with --data.", total)
    labels = ("kind", "name", "role")
    made = GaugeMetricFamily("elche_credential_made_timestamp_seconds", "Since when it is valid.", labels=labels)
    ends = GaugeMetricFamily("elche_credential_ends_timestamp_seconds", "Until when it is valid.", labels=labels)
    for one in snapshot.terms:
        made.add_metric((one.kind, one.name, one.role), one.made_at)
        ends.add_metric((one.kind, one.name, one.role), one.ends_at)
    yield from (made, ends)


def _families(  # type: ignore[no-untyped-def]  # figures and rows are of one kind, a view's
    prefix: str, names: tuple[str, ...], gauges, counters, rows
) -> Iterator[Metric]:
    for family, figures in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
        for name, text, value_of in figures:
            metric = family(prefix + name, text, labels=names)
            for labels, view in rows:
                if (value := value_of(view)) is not None:
                    metric.add_metric(labels, value)
            yield metric


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    rows = histogram.cumulative()
    return [*((str(bound), count) for bound, count in rows[:-1]), ("+Inf", rows[-1][1])]
