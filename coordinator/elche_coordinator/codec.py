"""Between the wire's messages and the core's values. Nothing is decided here."""

import math
from collections.abc import Mapping
from typing import assert_never

from elche.v1 import agent_pb2, job_pb2, rank_pb2
from elche_coordinator.core.describe import JobView, RankView
from elche_coordinator.core.messages import commands, events, reports
from elche_coordinator.core.messages.ids import AgentId, Generation, RoundId, Version
from elche_coordinator.core.messages.spec import (
    Build,
    EpochWork,
    HeaderRow,
    JobSpec,
    RankPart,
    RecordedRound,
    Settings,
    Slice,
    Slot,
)
from elche_coordinator.core.records.ranks import Address

MAX_EVENT_CHARS = 200
"""Of an event of the user's own."""

STATES = {
    "queued": job_pb2.JOB_STATE_QUEUED,
    "starting": job_pb2.JOB_STATE_STARTING,
    "grouping": job_pb2.JOB_STATE_STARTING,
    "training": job_pb2.JOB_STATE_TRAINING,
    "paused": job_pb2.JOB_STATE_PAUSED,
    "finishing": job_pb2.JOB_STATE_FINISHING,
    "stopping": job_pb2.JOB_STATE_STOPPING,
    "succeeded": job_pb2.JOB_STATE_SUCCEEDED,
    "failed": job_pb2.JOB_STATE_FAILED,
    "cancelled": job_pb2.JOB_STATE_CANCELLED,
}


# From ranks and agents


def rank_event(address: Address, request: rank_pb2.ConverseRequest) -> events.Event | None:
    """What a rank says; None for a message that this version does not know."""
    match request.WhichOneof("message"):
        case "batches_trained":
            return _batches_trained(address, request.batches_trained)
        case "round_entered":
            entered = request.round_entered
            return events.RoundEntered(
                **address, generation=Generation(entered.generation), round=RoundId(entered.round)
            )
        case "sync_ack":
            return _round_held(address, request.sync_ack)
        case "round_failed":
            failed = request.round_failed
            return events.RoundFailed(
                **address, generation=Generation(failed.generation), round=RoundId(failed.round), reason=failed.reason
            )
        case "ready":
            ready = request.ready
            return events.RankReady(
                **address,
                settings=_settings(ready),
                device=ready.device,
                build=_build(ready.build),
                tensors=tuple(ready.tensors),
                batch_size=ready.rank_batch_size or None,
                resumed=ready.resumed,
            )
        case "group_ready":
            return events.GroupFormed(**address, generation=Generation(request.group_ready.generation))
        case "evaluated":
            done = request.evaluated
            return events.EvaluationDone(
                **address, epoch=done.epoch, sums=_sums(done.sums), duration_ms=done.duration_ms
            )
        case "checkpoint_saved":
            saved = request.checkpoint_saved
            return events.CheckpointSaved(
                **address,
                version=Version(saved.version),
                path=saved.path,
                size_bytes=saved.size_bytes,
                duration_s=saved.duration_s,
            )
        case "checkpoint_failed":
            not_saved = request.checkpoint_failed
            return events.CheckpointFailed(**address, version=Version(not_saved.version), reason=not_saved.reason)
        case "epoch_metrics_taken":
            taken = request.epoch_metrics_taken
            return events.EpochMetricsTaken(**address, epoch=taken.epoch, callback_errors=taken.callback_errors)
        case "event_recorded":
            recorded = request.event_recorded
            return events.UserEventRecorded(
                **address, text=recorded.text[:MAX_EVENT_CHARS], num_dropped=min(recorded.num_dropped, 2**31)
            )
        case "final_state_saved":
            return events.FinalStateSaved(**address, path=request.final_state_saved.path)
        case "best_kept":
            return events.BestKept(**address, error=request.best_kept.error)
        case "loop_progress":
            progress = request.loop_progress
            return events.LoopProgressed(
                **address,
                num_steps=progress.num_steps,
                epoch=progress.epoch,
                num_epochs=progress.num_epochs,
                epoch_size=progress.epoch_size,
                epoch_done=progress.epoch_done,
                batch_size=progress.batch_size,
                anchor=progress.anchor,
                averaging_ms=progress.averaging_ms,
            )
        case "loop_epoch_ended":
            epoch_ended = request.loop_epoch_ended
            return events.LoopEpochEnded(
                **address, work=_epoch_work(epoch_ended.work), duration_s=epoch_ended.duration_s
            )
        case "loop_left":
            return events.LoopLeft(**address)
        case "failed":
            return _rank_failed(address, request.failed)
        case _:
            return None


def _batches_trained(address: Address, message: rank_pb2.BatchesTrained) -> events.BatchesTrained:
    return events.BatchesTrained(
        **address,
        local_step=message.local_step,
        num_processed=message.num_processed,
        batch_ms=tuple(message.batch_ms),
        loss_sum=message.loss_sum,
        loss_count=message.loss_count,
        data_wait_ms=message.data_wait_ms,
        gauges=_gauges(message.gauges) if message.HasField("gauges") else None,
        waited_ms=message.waited_ms,
    )


def _gauges(message: rank_pb2.Gauges) -> events.Gauges:
    """What is absent is not known."""
    return events.Gauges(**{field.name: value for field, value in message.ListFields()})


def _round_held(address: Address, message: rank_pb2.SyncAck) -> events.RoundHeld:
    return events.RoundHeld(
        **address,
        generation=Generation(message.generation),
        round=RoundId(message.round),
        header=tuple(
            HeaderRow(
                weight=row.weight,
                cut=row.cut,
                local_step=row.local_step,
                compute_us=row.compute_us,
                finite=row.finite,
                version=row.version,
            )
            for row in message.header
        ),
        collective_ms=message.collective_ms,
        stalled_ms=message.stalled_ms,
        sent_bytes=message.sent_bytes,
        divergence=message.divergence if message.HasField("divergence") else None,
        digest=message.digest if message.HasField("digest") else None,
        newer_batches=message.newer_batches,
        callback_errors=message.callback_errors,
        work=tuple(map(_epoch_work, message.work)),
    )


def _epoch_work(work: rank_pb2.EpochWork) -> EpochWork:
    return EpochWork(
        epoch=work.epoch,
        num_batches=work.num_batches,
        num_samples=work.num_samples,
        loss_sum=work.loss_sum,
        has_loss=not work.has_no_loss,
        scalars=_sums(work.scalars),
    )


def _sums(message: Mapping[str, rank_pb2.ScalarSum]) -> dict[str, tuple[float, int]]:
    return {name: (scalar.sum, scalar.count) for name, scalar in message.items()}


def _settings(ready: rank_pb2.Ready) -> Settings:
    hint = (ready.speed_hint.slow_rank, ready.speed_hint.ratio) if ready.HasField("speed_hint") else None
    return Settings(
        dataset_size=ready.dataset_size,
        batch_size=ready.batch_size,
        num_epochs=ready.num_epochs,
        policy=ready.policy,
        backend=ready.backend,
        averaging=ready.averaging,
        nonfinite=ready.nonfinite,
        averaging_options=ready.averaging_options,
        seed=ready.seed,
        drop_last=ready.drop_last,
        has_evaluation=ready.has_evaluation,
        anchor=ready.anchor,
        max_anchor=ready.max_anchor,
        overhead_target=ready.overhead_target,
        divergence_threshold=ready.divergence_threshold,
        speed_hint=hint,
        max_batch_diff=ready.max_batch_diff if ready.HasField("max_batch_diff") else None,
        max_steps=ready.max_steps or None,
        checkpoint_every_epochs=ready.checkpoint_every_epochs or None,
        checkpoint_every_s=ready.checkpoint_every_s or None,
        keep_checkpoints=ready.keep_checkpoints,
        monitor=ready.monitor or None,
        more_is_better=ready.more_is_better,
        restore=ready.restore or "best",
        patience=ready.patience or None,
        eval_size=ready.eval_size,
        wants_metrics=ready.wants_metrics,
        shard_sizes=tuple(ready.shard_sizes),
        layout_hash=ready.layout_hash,
    )


def _build(message: rank_pb2.Build) -> Build:
    return Build(
        device_type=message.device_type,
        device_id=message.device_id,
        torch=message.torch,
        cuda=message.cuda,
        nccl=message.nccl,
    )


def _rank_failed(address: Address, message: rank_pb2.RankFailed) -> events.RankFailed:
    return events.RankFailed(
        **address,
        error=message.error,
        traceback=message.traceback,
        batch=message.batch if message.HasField("batch") else None,
        invalid=message.invalid,
    )


def slots(hello: agent_pb2.AgentHello) -> tuple[Slot, ...]:
    """The devices that an agent offers."""
    return tuple(Slot(device=slot.device, model=slot.model) for slot in hello.slots)


def rank_exited(address: Address, agent_id: AgentId, message: agent_pb2.RankExited) -> events.RankExited:
    """How a rank's process ended, as an agent says."""
    return events.RankExited(
        **address,
        agent_id=agent_id,
        exit_code=message.exit_code,
        log_tail=message.log_tail,
        member=message.member,
        log_path=message.log_path,
    )


# To ranks and agents


def rank_response(command: commands.RankCommand) -> rank_pb2.ConverseResponse:
    """The message that a command is. Raises `TypeError` for one that is not for ranks."""
    match command:
        case commands.SendSyncNow():
            sync_now = rank_pb2.SyncNow(
                round=command.round,
                generation=command.generation,
                after_step=command.after_step,
                count=command.count,
                every=1,
                stop_after=command.stop_after,
                kept_round=command.kept_round or 0,
                newer_batches=command.newer_batches,
            )
            return rank_pb2.ConverseResponse(sync_now=sync_now)
        case commands.SendLease():
            lease = command.lease
            plan = rank_pb2.StartEpoch(
                lease=lease.id, epoch=lease.epoch, partition_offset=lease.offset, partition_size=lease.size
            )
            return rank_pb2.ConverseResponse(start_epoch=plan)
        case commands.SendThrottle():
            return rank_pb2.ConverseResponse(throttle=rank_pb2.Throttle(limit_step=command.limit_step))
        case commands.SendOutcome():
            return rank_pb2.ConverseResponse(round_outcome=_round_outcome(command))
        case commands.SendEpochMetrics():
            return rank_pb2.ConverseResponse(epoch_metrics=_epoch_metrics(command))
        case commands.SendFormGroup():
            group = rank_pb2.FormGroup(
                attempt=command.attempt,
                generation=command.generation,
                position=command.position,
                world_size=command.world_size,
                backend=command.backend,
            )
            return rank_pb2.ConverseResponse(form_group=group)
        case commands.SendSaveCheckpoint():
            return rank_pb2.ConverseResponse(save_checkpoint=rank_pb2.SaveCheckpoint())
        case commands.SendPauseLoop():
            return rank_pb2.ConverseResponse(pause_loop=rank_pb2.PauseLoop(is_paused=command.is_paused))
        case commands.SendKeepBest():
            keep_best = rank_pb2.KeepBest(checkpoint=command.checkpoint, restores=command.restores)
            return rank_pb2.ConverseResponse(keep_best=keep_best)
        case commands.SendShutdown():
            return rank_pb2.ConverseResponse(shutdown=rank_pb2.Shutdown(reason=command.reason))
        case _:
            raise TypeError(f"{type(command).__name__} is not for ranks")


def _round_outcome(command: commands.SendOutcome) -> rank_pb2.RoundOutcome:
    outcome = rank_pb2.RoundOutcome(
        round=command.round,
        version=command.version,
        global_step=command.global_step,
        save_final=command.save_final,
    )
    if (part := command.evaluate) is not None:
        outcome.evaluate.CopyFrom(rank_pb2.Evaluate(epoch=part.epoch, offset=part.offset, size=part.size))
    if (order := command.checkpoint) is not None:
        write = rank_pb2.WriteCheckpoint(name=order.name, training=order.training, keep=order.keep)
        outcome.checkpoint.CopyFrom(write)
    return outcome


def _epoch_metrics(command: commands.SendEpochMetrics) -> rank_pb2.EpochMetrics:
    report = command.report
    return rank_pb2.EpochMetrics(
        epoch=report.epoch,
        loss=math.nan if report.loss is None else report.loss,
        scalars=report.scalars,
        metrics=command.metrics,
        duration_s=report.duration_s,
        samples=report.committed,
        rank_batches=report.rank_batches,
    )


def start_rank(command: commands.StartRank, secret: str) -> agent_pb2.AttendResponse:
    """Tells an agent to start a process."""
    message = agent_pb2.StartRank(
        job_id=command.job_id,
        rank=command.rank,
        incarnation=command.incarnation,
        secret=secret,
        slot=command.slot,
        more_slots=command.more_slots,
        spec=spec_message(command.spec),
    )
    return agent_pb2.AttendResponse(start_rank=message)


def stop_rank(command: commands.StopRank) -> agent_pb2.AttendResponse:
    """Tells an agent to end a process."""
    message = agent_pb2.StopRank(
        job_id=command.job_id, rank=command.rank, incarnation=command.incarnation, grace_s=command.grace_s
    )
    return agent_pb2.AttendResponse(stop_rank=message)


def ask_stacks(command: commands.AskStacks) -> agent_pb2.AttendResponse:
    """Asks an agent what a process's threads do."""
    message = agent_pb2.SendStacks(job_id=command.job_id, rank=command.rank, incarnation=command.incarnation)
    return agent_pb2.AttendResponse(send_stacks=message)


# From and to clients


def spec(message: job_pb2.JobSpec) -> JobSpec:
    """What a client asks for."""
    return JobSpec(
        name=message.name,
        source=message.source,
        file_name=message.file_name,
        num_ranks=message.num_ranks,
        slow_factors=dict(message.slow_factors),
        settings=dict(message.settings),
        output_dir=message.output_dir,
        verify_rounds=message.verify_rounds,
        resume=message.resume,
        replay=tuple(_recorded(one) for one in message.replay),
        arguments=tuple(message.arguments),
        environment=dict(message.environment),
        submitted_by=message.submitted_by,
    )


def _recorded(message: job_pb2.RecordedRound) -> RecordedRound:
    return RecordedRound(
        parts=tuple(
            RankPart(
                slices=tuple(Slice(epoch=one.epoch, offset=one.offset, size=one.size) for one in part.slices),
                num_batches=part.num_batches,
                newer_batches=part.newer_batches,
            )
            for part in message.parts
        )
    )


def _recorded_message(recorded: RecordedRound) -> job_pb2.RecordedRound:
    return job_pb2.RecordedRound(
        parts=[
            job_pb2.RankPart(
                slices=[job_pb2.Slice(epoch=one.epoch, offset=one.offset, size=one.size) for one in part.slices],
                num_batches=part.num_batches,
                newer_batches=part.newer_batches,
            )
            for part in recorded.parts
        ]
    )


def spec_message(spec: JobSpec) -> job_pb2.JobSpec:
    """What a client asked for, as far as ranks need it."""
    return job_pb2.JobSpec(
        name=spec.name,
        source=spec.source,
        file_name=spec.file_name,
        num_ranks=spec.num_ranks,
        slow_factors=spec.slow_factors,
        settings=spec.settings,
        output_dir=spec.output_dir,
        verify_rounds=spec.verify_rounds,
        resume=spec.resume,
        arguments=spec.arguments,
        environment=spec.environment,
    )


def view_message(view: JobView) -> job_pb2.JobView:
    """A job as it is now."""
    message = job_pb2.JobView(
        job_id=view.job_id,
        name=view.name,
        state=STATES[view.state],
        reason=view.reason,
        epoch=view.epoch,
        num_epochs=view.num_epochs,
        dataset_size=view.dataset_size,
        epoch_committed=view.epoch_committed,
        epoch_processed=view.epoch_processed,
        loss=view.loss,
        samples_per_s=view.samples_per_s,
        anchor=view.anchor,
        num_rounds=view.num_rounds,
        eta_s=view.eta_s,
        ranks=[_rank_view(rank) for rank in view.ranks],
        pacing=view.pacing,
        backend=view.backend,
        checkpoints=[_checkpoint(one) for one in view.checkpoints],
        num_checkpoint_failures=view.num_checkpoint_failures,
    )
    message.submitted_at.FromMilliseconds(int(view.submitted_at * 1000))
    return message


def _rank_view(view: RankView) -> job_pb2.RankView:
    return job_pb2.RankView(
        rank=view.rank,
        device=view.device,
        state=view.state,
        ms_per_batch=view.ms_per_batch,
        round_batches=view.round_batches,
        round_target=view.round_target,
        share_fraction=view.share_fraction,
        num_batches=view.num_batches,
        waited_s=view.waited_s,
        host=view.host,
        log_path=view.log_path,
        callback_errors=view.callback_errors,
        stalled_s=view.stalled_s,
    )


def watch_message(report: reports.Report) -> job_pb2.WatchJobResponse:
    """Something that happened to a job."""
    match report:
        case reports.RoundReport():
            return job_pb2.WatchJobResponse(round=_round_report(report))
        case reports.EpochReport():
            return job_pb2.WatchJobResponse(epoch=_epoch_report(report))
        case reports.EvaluationReport():
            evaluation = job_pb2.EvaluationReport(
                epoch=report.epoch,
                metrics=report.metrics,
                duration_s=report.duration_s,
                is_final=report.is_final,
            )
            return job_pb2.WatchJobResponse(evaluation=evaluation)
        case reports.StallReport():
            return job_pb2.WatchJobResponse(stall=_stall(report))
        case reports.Checkpoint():
            return job_pb2.WatchJobResponse(checkpoint=_checkpoint(report))
        case reports.UserEvent():
            user_event = job_pb2.UserEvent(rank=report.rank, text=report.text, num_dropped=report.num_dropped)
            return job_pb2.WatchJobResponse(user_event=user_event)
        case reports.JobResult():
            return job_pb2.WatchJobResponse(result=_result(report))
        case _:
            assert_never(report)


def _stall(report: reports.StallReport) -> job_pb2.StallReport:
    return job_pb2.StallReport(
        rank=report.rank,
        host=report.host,
        device=report.device,
        silent_s=report.silent_s,
        usual_ms=report.usual_ms,
        is_over=report.is_over,
        stacks=report.stacks,
    )


def _round_report(report: reports.RoundReport) -> job_pb2.RoundReport:
    return job_pb2.RoundReport(
        round=report.round,
        version=report.version,
        rank_batches=report.rank_batches,
        rank_compute_ms=report.rank_compute_ms,
        rank_waited_ms=report.rank_waited_ms,
        sync_ms=report.sync_ms,
        anchor=report.anchor,
        duration_s=report.duration_s,
        samples=report.samples,
        rank_sent_bytes=report.rank_sent_bytes,
        recorded=_recorded_message(report.recorded),
        rank_losses=report.rank_losses,
        rank_samples=report.rank_samples,
    )


def _epoch_report(report: reports.EpochReport) -> job_pb2.EpochReport:
    return job_pb2.EpochReport(
        epoch=report.epoch,
        loss=report.loss,
        scalars=report.scalars,
        duration_s=report.duration_s,
        committed=report.committed,
        dropped=report.dropped,
        rank_batches=report.rank_batches,
        rank_samples_per_s=report.rank_samples_per_s,
    )


def _checkpoint(checkpoint: reports.Checkpoint) -> job_pb2.Checkpoint:
    return job_pb2.Checkpoint(
        version=checkpoint.version,
        path=checkpoint.path,
        epoch=checkpoint.epoch,
        global_step=checkpoint.global_step,
        size_bytes=checkpoint.size_bytes,
        duration_s=checkpoint.duration_s,
        metrics=checkpoint.metrics,
        is_best=checkpoint.is_best,
    )


def _result(result: reports.JobResult) -> job_pb2.JobResult:
    return job_pb2.JobResult(
        state=STATES[result.outcome],
        error=result.error,
        traceback=result.traceback,
        invalid=result.invalid,
        epochs=result.epochs,
        metrics=result.metrics,
        samples_per_s=result.samples_per_s,
        bound_samples_per_s=result.bound_samples_per_s,
        bound_fraction=result.bound_fraction,
        dataset_size=result.dataset_size,
        committed_samples=result.committed_samples,
        dropped_samples=result.dropped_samples,
        rounds=result.rounds,
        ranks=[
            job_pb2.RankResult(
                device=rank.device, batches=rank.batches, ms_per_batch=rank.ms_per_batch, waited_s=rank.waited_s
            )
            for rank in result.ranks
        ],
        model=result.model,
        discarded_samples=result.discarded_samples,
        duration_s=result.duration_s,
        checkpoints=[_checkpoint(one) for one in result.checkpoints],
        ended_early=result.ended_early,
        metrics_epoch=result.metrics_epoch,
        best_epoch=result.best_epoch,
        best_metrics=result.best_metrics,
        model_is=result.model_is,
        best_problem=result.best_problem,
    )
