"""Between the messages of `elche.v1` and this package's own values."""

import json
import os
from datetime import UTC
from pathlib import Path
from typing import assert_never

from elche.network import user_at_host
from elche.v1 import job_pb2 as pb
from elche_client.events import (
    Checkpoint,
    EpochReport,
    EvaluationReport,
    Event,
    JobResult,
    JobState,
    JobView,
    RankResult,
    RankView,
    RoundReport,
    StallReport,
    UserEvent,
)
from elche_client.options import MAX_NAME_CHARS, JobOptions

STATES: dict[int, JobState] = {
    pb.JOB_STATE_QUEUED: JobState.QUEUED,
    pb.JOB_STATE_STARTING: JobState.STARTING,
    pb.JOB_STATE_TRAINING: JobState.TRAINING,
    pb.JOB_STATE_PAUSED: JobState.PAUSED,
    pb.JOB_STATE_FINISHING: JobState.FINISHING,
    pb.JOB_STATE_STOPPING: JobState.STOPPING,
    pb.JOB_STATE_SUCCEEDED: JobState.SUCCEEDED,
    pb.JOB_STATE_FAILED: JobState.FAILED,
    pb.JOB_STATE_CANCELLED: JobState.CANCELLED,
}


def encode_spec(path: Path, source: str, options: JobOptions) -> pb.JobSpec:
    spec = pb.JobSpec(
        name=options.name or _utf8(path.stem)[:MAX_NAME_CHARS],
        source=source,
        file_name=_utf8(str(path.absolute())),
        num_ranks=options.num_ranks,
        slow_factors=options.slow_factors,
        settings=encode_settings(options),
        output_dir=options.output_dir,
        verify_rounds=options.verify_rounds,
        resume=options.resume,
        arguments=map(_utf8, options.arguments),
        environment={name: _utf8(value) for name, value in options.environment.items()},
        submitted_by=user_at_host(),
    )
    spec.MergeFromString(options.replay)
    return spec


def encode_settings(options: JobOptions) -> dict[str, str]:
    return {name: json.dumps(value) for name, value in options.settings.items()}


def _utf8(name: str) -> str:
    """A file's name need not be UTF-8, a message's text must be."""
    return os.fsencode(name).decode("utf-8", "replace")


def decode_event(message: pb.WatchJobResponse) -> Event | None:
    """The event in a watch's message; None for a kind that this client does not know."""
    match message.WhichOneof("event"):
        case "view":
            return decode_view(message.view)
        case "round":
            return decode_round(message.round)
        case "epoch":
            return decode_epoch(message.epoch)
        case "evaluation":
            return decode_evaluation(message.evaluation)
        case "stall":
            return decode_stall(message.stall)
        case "checkpoint":
            return decode_checkpoint(message.checkpoint)
        case "user_event":
            event = message.user_event
            return UserEvent(rank=event.rank, text=event.text, num_dropped=event.num_dropped)
        case "result":
            return decode_result(message.result)
        case None:
            return None
        case unreachable:
            assert_never(unreachable)


def decode_state(state: int) -> JobState:
    return STATES.get(state, JobState.UNKNOWN)


def decode_view(view: pb.JobView) -> JobView:
    return JobView(
        job_id=view.job_id,
        name=view.name,
        state=decode_state(view.state),
        reason=view.reason,
        epoch=view.epoch,
        num_epochs=view.num_epochs,
        dataset_size=view.dataset_size,
        epoch_committed=view.epoch_committed,
        epoch_processed=view.epoch_processed,
        loss=view.loss if view.HasField("loss") else None,
        samples_per_s=view.samples_per_s,
        anchor=view.anchor,
        num_rounds=view.num_rounds,
        eta_s=view.eta_s if view.HasField("eta_s") else None,
        ranks=tuple(decode_rank(rank) for rank in view.ranks),
        submitted_at=view.submitted_at.ToDatetime(tzinfo=UTC) if view.HasField("submitted_at") else None,
        pacing=view.pacing,
        backend=view.backend,
        checkpoints=tuple(map(decode_checkpoint, view.checkpoints)),
        num_checkpoint_failures=view.num_checkpoint_failures,
    )


def decode_rank(rank: pb.RankView) -> RankView:
    return RankView(
        rank=rank.rank,
        device=rank.device,
        state=rank.state,
        ms_per_batch=rank.ms_per_batch,
        round_batches=rank.round_batches,
        round_target=rank.round_target,
        share_fraction=rank.share_fraction,
        num_batches=rank.num_batches,
        waited_s=rank.waited_s,
        host=rank.host,
        log_path=rank.log_path,
        callback_errors=rank.callback_errors,
        stalled_s=rank.stalled_s,
    )


def decode_epoch(report: pb.EpochReport) -> EpochReport:
    return EpochReport(
        epoch=report.epoch,
        loss=report.loss if report.HasField("loss") else None,
        scalars=dict(report.scalars),
        duration_s=report.duration_s,
        committed=report.committed,
        dropped=report.dropped,
        rank_batches=tuple(report.rank_batches),
        rank_samples_per_s=tuple(report.rank_samples_per_s),
    )


def decode_evaluation(report: pb.EvaluationReport) -> EvaluationReport:
    return EvaluationReport(
        epoch=report.epoch, metrics=dict(report.metrics), duration_s=report.duration_s, is_final=report.is_final
    )


def decode_stall(report: pb.StallReport) -> StallReport:
    return StallReport(
        rank=report.rank,
        host=report.host,
        device=report.device,
        silent_s=report.silent_s,
        usual_ms=report.usual_ms,
        is_over=report.is_over,
        stacks=report.stacks,
    )


def decode_round(report: pb.RoundReport) -> RoundReport:
    return RoundReport(
        round=report.round,
        version=report.version,
        rank_batches=tuple(report.rank_batches),
        rank_compute_ms=tuple(report.rank_compute_ms),
        rank_waited_ms=tuple(report.rank_waited_ms),
        sync_ms=report.sync_ms,
        anchor=report.anchor,
        duration_s=report.duration_s,
        samples=report.samples,
        rank_sent_bytes=tuple(report.rank_sent_bytes),
        rank_losses=tuple(report.rank_losses),
        rank_samples=tuple(report.rank_samples),
        recorded=pb.JobSpec(replay=[report.recorded]).SerializeToString() if report.HasField("recorded") else b"",
    )


def decode_result(result: pb.JobResult) -> JobResult:
    return JobResult(
        state=decode_state(result.state),
        error=result.error,
        traceback=result.traceback,
        invalid=result.invalid,
        epochs=result.epochs,
        metrics=dict(result.metrics),
        samples_per_s=result.samples_per_s,
        bound_samples_per_s=result.bound_samples_per_s,
        bound_fraction=result.bound_fraction,
        dataset_size=result.dataset_size,
        committed_samples=tuple(result.committed_samples),
        dropped_samples=tuple(result.dropped_samples),
        discarded_samples=result.discarded_samples,
        rounds=result.rounds,
        ranks=tuple(decode_rank_result(rank) for rank in result.ranks),
        model=result.model,
        duration_s=result.duration_s,
        checkpoints=tuple(map(decode_checkpoint, result.checkpoints)),
        ended_early=result.ended_early,
        metrics_epoch=result.metrics_epoch if result.HasField("metrics_epoch") else None,
        best_epoch=result.best_epoch if result.HasField("best_epoch") else None,
        best_metrics=dict(result.best_metrics),
        model_is=result.model_is,
        best_problem=result.best_problem,
    )


def decode_checkpoint(checkpoint: pb.Checkpoint) -> Checkpoint:
    return Checkpoint(
        version=checkpoint.version,
        path=checkpoint.path,
        epoch=checkpoint.epoch,
        global_step=checkpoint.global_step,
        size_bytes=checkpoint.size_bytes,
        duration_s=checkpoint.duration_s,
        metrics=dict(checkpoint.metrics),
        is_best=checkpoint.is_best,
    )


def decode_rank_result(rank: pb.RankResult) -> RankResult:
    return RankResult(device=rank.device, batches=rank.batches, ms_per_batch=rank.ms_per_batch, waited_s=rank.waited_s)
