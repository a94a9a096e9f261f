"""Views of jobs for people and metrics, as plain values."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice

from elche import views
from elche.settings import AgreedSettings
from elche.sums import added
from elche.views import JobState
from elche_coordinator.core.jobs.managed_job import ManagedJob
from elche_coordinator.core.jobs.notices import too_few_notice
from elche_coordinator.core.life.job import Job
from elche_coordinator.core.loops.loop import Loop
from elche_coordinator.core.messages.events import Gauges
from elche_coordinator.core.messages.ids import Epoch
from elche_coordinator.core.messages.reports import Checkpoint, JobResult
from elche_coordinator.core.messages.spec import JobSpec
from elche_coordinator.core.records.fleet import Fleet
from elche_coordinator.core.records.histogram import Histogram
from elche_coordinator.core.records.machine import Hold, JobPhase, RankPhase
from elche_coordinator.core.records.ranks import RankRecord, present, staying
from elche_coordinator.core.results.counts import Counts
from elche_coordinator.core.results.training import Training
from elche_coordinator.core.rounds.generation import Generation

MAX_RANKS = 1000
"""Most ranks in a view: views are made every second, and each rank costs time."""
OVER = (JobPhase.STOPPING, JobPhase.ENDED)
"""Phases in which nothing is trained any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView(views.RankView):
    """One rank at one moment, with further values for the page and the metrics."""

    divergence: float | None
    data_wait_s: float
    compute_s: float
    num_samples: int
    samples_per_s: float
    loss: float | None
    throttled_s: float
    gauges: Gauges
    durations: Histogram
    agent_id: str = ""
    incarnation: int = 0
    folder: str = ""
    """Id of its agent's work folder, where its log is; empty: unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView(views.JobView):
    """One job at one moment, with further values for the page and the metrics. Its state is a job phase or an
    outcome.
    """

    ranks: tuple[RankView, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()
    submitted_at: float = 0.0
    """Wall-clock time, seconds since 1970."""
    policy: str = ""
    averaging: str = ""
    backend_name: str = ""
    progress_fraction: float = 0.0
    num_samples: int = 0
    """Samples trained, in all epochs."""
    counts: Counts = field(default_factory=Counts)
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the last evaluation."""
    round_s: float = 0.0
    averaging_s: float = 0.0
    overhead_fraction: float = 0.0
    """Fraction of the ranks' time since training began in which rounds kept them from training."""
    sent_bytes: int = 0
    num_given_up: int = 0
    num_lost_ranks: int = 0
    discarded_samples: int = 0
    checkpoint_age_s: float | None = None
    queue_wait_s: float = 0.0
    ended_s: float | None = None
    """When it ended, by the coordinator's clock; None while it has not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDetails:
    """A job's submission and outcome."""

    spec: JobSpec
    settings: AgreedSettings | None = None
    """The ranks' settings; None before they are ready, and for jobs of earlier runs of the coordinator."""
    result: JobResult | None = None
    ran_s: float | None = None
    """Seconds from its placement until its end, or now."""
    num_wanted: int | None = None
    """The number of ranks that it should have; None if it cannot be changed."""


def details(job: Job, training: ManagedJob | None, now_s: float) -> JobDetails:
    """The details of the job at time `now_s`; `training` is the same job, or None for a loop."""
    begun = training.run.training if training is not None else None
    began_s, ended_s = job.began_s.get(JobPhase.STARTING), job.began_s.get(JobPhase.ENDED, now_s)
    return JobDetails(
        spec=job.spec,
        settings=begun.settings if begun is not None else None,
        result=job.result,
        ran_s=None if began_s is None else ended_s - began_s,
        num_wanted=training.num_wanted if training is not None and training.can_scale else None,
    )


def describe_loop(loop: Loop, now_s: float) -> JobView:
    """View of the loop at time `now_s`."""
    state: str = loop.result.outcome if loop.result else loop.phase
    if loop.phase is JobPhase.TRAINING and loop.is_paused:
        state = JobState.PAUSED
    ranks = _describe_ranks(loop, lambda record: record.phase, None, now_s)
    view = _add_loop(_describe(loop, state, loop.reason, ranks, now_s), loop, loop.began_s.get(JobPhase.ENDED, now_s))
    if loop.phase in OVER:
        view = replace(view, eta_s=0.0)
    return view if loop.result else _with_stalls(view)


def describe_training(job: ManagedJob, now_s: float) -> JobView:
    """View of the training at time `now_s`."""
    run, state = job.run, _state_of_training(job)
    ranks = _describe_ranks(job, lambda record: _doing(record, job), run.generation, now_s)
    # A job that waits to go on from a checkpoint has no training.
    kept = tuple(run.kept)
    view = replace(_describe(job, state, _reason(job), ranks, now_s), counts=job.counts, checkpoints=kept)
    if kept:
        view = replace(view, epoch=kept[-1].epoch, metrics=kept[-1].metrics)
    if run.backend is not None:
        view = replace(view, backend=str(run.backend), backend_name=run.backend.backend)
    if run.training is not None:
        is_over = run.training.is_complete or job.phase in OVER
        view = _add_training(view, run.training, run.generation, job.began_s.get(JobPhase.ENDED, now_s), is_over)
    if job.result is None:
        return _with_stalls(view)
    return view if run.training is None else replace(view, epoch=run.training.ledger.epoch)


def why_not_started(job: Job, fleet: Fleet) -> str:
    """Which rank waits for a host that can start none, and why that cannot; empty: none waits for one."""
    waiting = (
        f"rank {rank} waits for host {record.host}: {agent.problem}"
        for rank, record in job.ranks.items()
        if record.phase is RankPhase.STARTING
        and not record.log_path
        and (agent := fleet.agents.get(record.agent_id))
        and agent.problem
    )
    return next(waiting, "")


def _describe(job: Job, state: str, reason: str, ranks: tuple[RankView, ...], now_s: float) -> JobView:
    """The part of a view that trainings and loops have in common."""
    queued_s = job.began_s.get(JobPhase.QUEUED, now_s)
    ended_s = job.began_s.get(JobPhase.ENDED)
    return JobView(
        job_id=job.id,
        name=job.spec.name,
        state=state,
        reason=reason,
        submitted_at=job.submitted_at,
        ranks=ranks,
        num_lost_ranks=job.roster.num_lost,
        queue_wait_s=job.began_s.get(JobPhase.STARTING, ended_s or now_s) - queued_s,
        ended_s=ended_s,
    )


def _with_stalls(view: JobView) -> JobView:
    """Removes speed and estimated end while a rank is stalled, and names the rank in the reason."""
    stalled = [rank for rank in view.ranks if rank.stalled_s]
    if not stalled:
        return view
    first = max(stalled, key=lambda rank: rank.stalled_s)
    others = f", and {len(stalled) - 1} more" if len(stalled) > 1 else ""
    reason = f"rank {first.rank} on {first.host} ({first.device}) has made no batch for {first.stalled_s:.0f} s{others}"
    return replace(view, samples_per_s=0.0, eta_s=None, pacing=reason, reason=reason)


def _state_of_training(job: ManagedJob) -> str:
    if job.result is not None:
        return job.result.outcome
    if job.phase is JobPhase.TRAINING and job.is_paused:
        return JobState.PAUSED
    if job.phase is JobPhase.GROUPING:
        return JobState.STARTING  # users know no other word for it; the reason says that the ranks meet
    return JobState.WAITING if job.phase is JobPhase.TRAINING and job.run.is_held(Hold.TOO_FEW) else job.phase


def _reason(job: ManagedJob) -> str:
    training = job.run.training
    if training is None or _state_of_training(job) != JobState.WAITING:
        return job.reason
    num_loading = sum(one.phase in (RankPhase.STARTING, RankPhase.READY) for one in present(job.ranks).values())
    return too_few_notice(len(staying(training.members)), job.spec.min_ranks, num_loading)


def _add_training(
    view: JobView, training: Training, generation: Generation | None, now_s: float, is_over: bool
) -> JobView:
    """The view with what the training has done; once it `is_over`, with what is committed, as in the job's result."""
    ledger, settings = training.ledger, training.settings
    epoch = Epoch(min(ledger.epoch, ledger.num_epochs - 1))
    total = ledger.extent.total_samples
    processed = min(total, ledger.total_committed() if is_over else ledger.total_processed())
    rate = training.throughput()[0] if is_over else _rate(training, processed, now_s)
    committed = ledger.committed_samples(epoch)
    end_s = training.committed.at_s if is_over and training.committed else now_s
    return replace(
        view,
        epoch=epoch,
        num_epochs=ledger.num_epochs,
        dataset_size=settings.dataset_size,
        epoch_committed=committed,
        epoch_processed=min(ledger.size(epoch), max(committed, processed - epoch * ledger.extent.kept_size)),
        loss=training.loss,
        samples_per_s=rate,
        anchor=training.policy.anchor,
        num_rounds=training.version,
        eta_s=0.0 if is_over else (total - processed) / rate if rate > 0 else None,
        pacing=generation.scheduler.reason if generation else "",
        checkpoints=training.checkpoints.shown(training.evaluations.best_version),
        num_checkpoint_failures=training.checkpoints.num_failures,
        policy=settings.policy,
        averaging=settings.averaging,
        progress_fraction=processed / total if total else 0.0,
        num_samples=processed,
        metrics=training.evaluations.metrics,
        round_s=training.last_round_s,
        averaging_s=training.averaging_ms / 1000,
        overhead_fraction=_overhead(view, training, end_s),
        sent_bytes=training.sent_bytes,
        num_given_up=generation.num_given_up if generation else 0,
        discarded_samples=training.discarded_samples,
        checkpoint_age_s=_age(training.checkpoints.saved_at_s, now_s),
    )


def _add_loop(view: JobView, loop: Loop, now_s: float) -> JobView:
    progress = loop.progress
    view = replace(
        view,
        loss=loop.loss,
        samples_per_s=loop.samples_per_s,
        pacing=f"{loop.policy}; the loop decides by itself",
        policy=loop.policy,
        checkpoints=tuple(loop.checkpoints),
        num_checkpoint_failures=loop.num_checkpoint_failures,
        num_samples=loop.num_samples,
        counts=Counts(
            samples=loop.num_samples,
            made_samples=loop.num_samples,
            rounds=progress.num_steps if progress is not None else 0,
            regroups=loop.generation_id,
            checkpoint_failures=loop.num_checkpoint_failures,
        ),
        metrics=loop.metrics,
        checkpoint_age_s=_age(loop.saved_at_s, now_s),
    )
    if progress is None:
        return view
    total = progress.num_epochs * progress.epoch_size
    done = min(progress.epoch * progress.epoch_size + progress.epoch_done, total)
    busy_s = loop.duration_s * len(view.ranks)
    return replace(
        view,
        epoch=progress.epoch,
        num_epochs=progress.num_epochs,
        dataset_size=progress.epoch_size,
        epoch_committed=progress.epoch_done,
        epoch_processed=progress.epoch_done,
        anchor=progress.anchor,
        num_rounds=progress.num_steps,
        eta_s=(total - done) / loop.samples_per_s if total and loop.samples_per_s else None,
        progress_fraction=done / total if total else 0.0,
        averaging_s=progress.averaging_ms / 1000,
        overhead_fraction=min(1.0, added(rank.waited_s for rank in view.ranks) / busy_s) if busy_s else 0.0,
    )


def _overhead(view: JobView, training: Training, end_s: float) -> float:
    """Fraction of the ranks' time from its beginning to `end_s` in which rounds kept them from training."""
    if training.started is None or not view.ranks:
        return 0.0
    elapsed_s = (end_s - training.started.at_s) * len(view.ranks)
    return min(1.0, added(rank.waited_s for rank in view.ranks) / elapsed_s) if elapsed_s > 0 else 0.0


def _age(at_s: float | None, now_s: float) -> float | None:
    return None if at_s is None else now_s - at_s


def _rate(training: Training, processed: int, now_s: float) -> float:
    """Samples trained per second since training began."""
    if training.started is None:
        return 0.0
    elapsed_s = now_s - training.started.at_s
    return (processed - training.restored_samples) / elapsed_s if elapsed_s > 0 else 0.0


def _describe_ranks(
    job: Job, doing: Callable[[RankRecord], str], generation: Generation | None, now_s: float
) -> tuple[RankView, ...]:
    """`doing` returns the activity of a healthy rank as a word; `generation` has the next round, if there is one."""
    done = job.work_done()
    total = sum(done.values())
    return tuple(
        _describe_rank(
            record,
            job,
            state=_state(record, job, doing(record)),
            target=generation.target(rank) if generation is not None else 0,
            share_fraction=done[rank] / total if total else 0.0,
            now_s=now_s,
        )
        for rank, record in islice(job.ranks.items(), MAX_RANKS)
    )


def _describe_rank(
    record: RankRecord, job: Job, *, state: str, target: int, share_fraction: float, now_s: float
) -> RankView:
    silent_since_s = job.silence.since_s(record.rank)
    samples_per_s = record.batch_size / record.ms_per_batch * 1000 if record.ms_per_batch else 0.0
    return RankView(
        rank=record.rank,
        device=record.device,
        state=state,
        ms_per_batch=record.ms_per_batch or 0.0,
        round_batches=record.round_batches,
        round_target=max(0, target - record.base_step),
        share_fraction=share_fraction,
        num_batches=record.local_step,
        waited_s=record.waited_ms / 1000,
        host=record.host,
        log_path=record.log_path,
        callback_errors=record.callback_errors,
        divergence=record.divergence,
        data_wait_s=record.data_wait_ms / 1000,
        compute_s=record.compute_ms / 1000,
        num_samples=record.num_samples,
        samples_per_s=samples_per_s if silent_since_s is None else 0.0,
        loss=record.loss,
        throttled_s=record.gauges.throttled_ms / 1000,
        gauges=record.gauges,
        # The view is read on another thread when /metrics is made, while the rank's own histogram is counted on.
        durations=record.durations.copy(),
        stalled_s=0.0 if silent_since_s is None else now_s - silent_since_s,
        agent_id=record.agent_id,
        incarnation=record.incarnation,
        folder=record.folder,
    )


def _state(record: RankRecord, job: Job, doing: str) -> str:
    """The rank's state as a word: leaving, stalled, or its activity."""
    if record.is_ending and record.phase is not RankPhase.EXITED and job.is_open:
        return "leaving"
    if job.silence.since_s(record.rank) is not None and not job.result:
        return "stalled"
    return doing


def _doing(record: RankRecord, job: ManagedJob) -> str:
    if job.run.training is not None and job.run.training.evaluations.has(record.rank):
        return "evaluating"
    if job.phase is JobPhase.FINISHING and record.phase is RankPhase.TRAINING:
        return "finished"
    return record.phase
