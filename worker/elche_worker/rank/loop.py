"""The training loop of a rank: batches, rounds when they are due, and chores of committed rounds.

In a replica group this is the leader's loop, which sends each act to the other processes before it carries it out.
"""

import time
from math import inf
from typing import NoReturn, assert_never

import grpc

from elche import timeline
from elche.errors import UnknownMessage
from elche.extent import Extent
from elche.output import notice
from elche.v1 import rank_pb2
from elche_worker.collectives.operations import CollectiveFailed, RoundAborted
from elche_worker.collectives.relay import Relay
from elche_worker.data.lease_loader import LeasedPart
from elche_worker.data.reserve import ReservedLeases
from elche_worker.device.streams import DeviceStreams
from elche_worker.model.evaluation import Evaluated, make_metrics
from elche_worker.rank import acts
from elche_worker.rank.best import keep_best
from elche_worker.rank.evaluation_messages import evaluated_message, tensors_of
from elche_worker.rank.generations import GroupBuild
from elche_worker.rank.headers import Headers
from elche_worker.rank.parts import Parts
from elche_worker.rank.replica import Replica
from elche_worker.session.control import Control, Rounds
from elche_worker.session.launch import Launch
from elche_worker.session.report_times import ReportTimes
from elche_worker.session.session import Session, sendable
from elche_worker.telemetry.gauges import GaugeSampler
from elche_worker.user.callbacks import EpochMetrics
from elche_worker.user.job import JobDefinition
from elche_worker.user.loggers import Loggers
from elche_worker.user.schedule import Progress

LOGGERS_GRACE_S = 2.0
"""Seconds for which a rank that leaves waits for the job's loggers to finish."""

LAST_ROUND_S = 8.0
"""Seconds for the last round of a rank that stops without a coordinator: it then has a draft to write."""

MAX_REASON_CHARS = 1000
"""Most characters of a reason, for people, that a message has."""


class Leave(Exception):
    """Raised when the coordinator has told the rank to leave. Not an error."""


class StoppedAlone(Exception):
    """Raised when the rank was told to stop, and no coordinator answers. Not an error."""

    def __init__(self, round_id: int, draft: str) -> None:
        super().__init__("told to stop, and no coordinator answers")
        self.round = round_id
        """The round whose result is in the draft; 0: none."""
        self.draft = draft


class RankLoop:
    """Drives one rank's replica by the coordinator's commands."""

    def __init__(
        self,
        launch: Launch,
        job: JobDefinition,
        parts: Parts,
        *,
        control: Control,
        session: Session,
        channel: grpc.Channel,
        streams: DeviceStreams,
    ) -> None:
        self._launch = launch
        self._job = job
        self._control = control
        self._session = session
        self._replica = Replica(
            launch,
            job,
            parts,
            channel=channel,
            streams=streams,
            wake=control.notify,
            send=session.send,
            is_over=lambda: control.leaving is not None,
            note_built=control.note_news,
        )
        self._group = parts.group
        self._loader = parts.loader
        self._meter = self._replica.meter
        self._averaging = self._replica.averaging
        self._timeline = parts.timeline
        self._gauges = GaugeSampler(self._replica.device)
        self._grad_norm: float | None = None
        self._rounds = Rounds()
        self._batch_size = parts.batch_size
        self._reserve = ReservedLeases(parts.batch_size, self._begin_lease)
        self._entered_s = 0.0
        """Time at which the present round was entered, by `time.perf_counter`."""
        self._stalled_ms = 0.0
        """Time in ms for which the present round has kept the rank from training."""
        self._chores: list[rank_pb2.RoundOutcome] = []
        """Committed rounds whose result is to be used before the next round, which overwrites it."""
        self._headers = Headers()
        self._report_times = ReportTimes()
        self._loggers = Loggers(job.loggers, launch.job_id)
        # Last: the session's thread calls it from here on.
        control.on_abandon = self._abort_at_once

    @property
    def local_step(self) -> int:
        """Batches trained."""
        return self._replica.local_step

    @property
    def progress(self) -> Progress:
        """The job's progress, as far as this rank knows it."""
        return self._replica.progress

    def rates_notice(self, extent: Extent) -> str:
        """A warning on the job's scheduler; "" if there is none."""
        return self._replica.rates.epochs_notice(extent)

    def rehearse(self, *, warms_up: bool) -> None:
        """Before the rank is ready, evaluates a batch, and with `warms_up` trains one; neither leaves a trace."""
        self._replica.rehearse(warms_up=warms_up)

    def run(self) -> None:
        """Trains until the coordinator tells the rank to leave, and raises `Leave` then. Raises `StoppedAlone` if the
        rank stops without a coordinator, and the errors of user code.
        """
        # The order matters: commands first, since they may abandon what comes next; a result before chores and batches,
        # since the round commits only when all have it; chores before the next round, which overwrites the result.
        while True:
            if self._control.has_news:
                self._take_in()
            if not self._session.is_connected:
                self._ride_out()
            due = self._rounds.due(self.local_step, is_out_of_work=self._is_out_of_work)
            if self._holds_result or (self._averaging.is_running and self._averaging.is_unusual):
                self._apply_result()
            elif self._chores:
                self._do_chore(self._chores.pop(0))
            elif due is not None and not self._averaging.is_running:
                self._enter(due)
            elif self._may_train and self._loader.is_ready:
                self._train()
            else:
                self._rest()

    @property
    def _holds_result(self) -> bool:
        """True if the running round has its result, and this rank is at the step at which it is to be applied."""
        return self._averaging.is_done and self.local_step >= self._rounds.apply_step

    @property
    def _is_out_of_work(self) -> bool:
        """True if all leased samples are trained. A round is then entered before its step, as no batch can come."""
        return self._meter.num_processed == self._loader.num_leased

    @property
    def _may_train(self) -> bool:
        """True if the rank may train a batch now, once one is ready. False until it has a version: the first round
        gives every rank the same model.
        """
        # A replay applies each result after the same batch as the recorded run, and waits there for a late one.
        is_replayed = self._averaging.is_running and self._rounds.apply_step > -inf
        limit = min(self._rounds.limit_step, self._rounds.apply_step) if is_replayed else self._rounds.limit_step
        return self._replica.version > 0 and self._replica.generations.in_use is not None and self.local_step < limit

    # Commands

    def _take_in(self) -> None:
        for command in self._control.take():
            match command.WhichOneof("message"):
                case "sync_now":
                    self._rounds.learn(command.sync_now)
                case "start_epoch":
                    self._take_lease(command.start_epoch)
                case "permit":
                    self._reserve.permit(command.permit.num_samples)
                case "recall":
                    self._give_reserve_back()
                case "round_outcome":
                    self._learn_outcome(command.round_outcome)
                case "epoch_metrics":
                    self._take_metrics(_metrics(command.epoch_metrics))
                case "throttle":
                    self._rounds.throttle_step = command.throttle.limit_step
                case "make_metrics":
                    self._make_metrics(command.make_metrics)
                case "keep_best":
                    self._keep_best(command.keep_best)
                case "form_group":
                    self._join(command.form_group)
                case "abandon":
                    self._abandon(command.abandon)
                case "shutdown" | "clock" | "ping" | "probe" | "welcome" | "taken":
                    pass  # handled on the session's thread
                case "save_checkpoint" | "pause_loop" | None as name:  # the first two are for a loop of the user's own
                    raise UnknownMessage("ConverseResponse", name)
                case unreachable:
                    assert_never(unreachable)
        # At last: what the coordinator sent before the order to leave, such as `keep_best`, is done.
        if self._control.leaving is not None:
            raise Leave(self._control.leaving)
        if self._stops_alone:
            self._stop_alone()
        for build in self._replica.generations.ended:
            self._report_built(build)

    def _take_lease(self, message: rank_pb2.StartEpoch) -> None:
        lease = LeasedPart(
            id=message.lease,
            epoch=message.epoch,
            offset=message.partition_offset,
            size=message.partition_size,
            granted=message.lease,
        )
        self._reserve.add(lease, is_reserve=message.is_reserve)

    def _begin_lease(self, lease: LeasedPart) -> None:
        """Begins a lease, or a part of one, that may be trained now."""
        self._group.send(acts.TakeLease(lease))
        self._replica.take_lease(lease)

    def _give_reserve_back(self) -> None:
        """Answers `Recall`. Grants are dropped first: the coordinator relies on it that none is used after that."""
        self._rounds.give_grants_back()
        recalled = rank_pb2.Recalled(num_samples=self._reserve.give_back())
        self._session.send(rank_pb2.ConverseRequest(recalled=recalled))

    def _ride_out(self) -> None:
        """While the coordinator is away, enters the rounds and begins the leases that were granted for that."""
        every = self._rounds.go_on_alone()
        if every and not self._reserve.is_empty:
            left = self._loader.num_leased - self._meter.num_processed
            # enough for the batches until the next granted round
            self._reserve.permit_batches(every - left // self._batch_size)

    @property
    def _stops_alone(self) -> bool:
        """True if the rank was told to stop while the coordinator, which would have its work committed, is away."""
        return self._control.is_told_to_stop and not self._session.is_connected

    def _stop_alone(self) -> NoReturn:
        """Ends training without a coordinator: finishes the running round, or else enters the next granted one, and
        leaves its result as the draft of a checkpoint. Raises `StoppedAlone`.

        Ranks that are stopped at the same time thus end with the same round. If some are one round ahead, that round
        does not complete: they leave no draft, and the others do.
        """
        if self._averaging.is_running:
            self._apply_result()
        elif (last := self._rounds.last_alone()) is not None and self._can_average_alone(last):
            self._enter(last, is_last=True)
            if self._averaging.is_running:
                self._apply_result()
        try:
            round_id, draft = self._replica.leave_draft()
        except Exception as error:  # the job then goes back to an older checkpoint, whatever error the storage raised
            notice(f"no draft of a checkpoint can be written: {error}")
            round_id, draft = 0, ""
        raise StoppedAlone(round_id, draft)

    def _can_average_alone(self, round_id: int) -> bool:
        """False if the coordinator relays the averaging, or another generation is to take over."""
        group = self._replica.generations.in_use
        is_same = group is not None and group.generation == self._rounds.targets[round_id].generation
        return is_same and not isinstance(group, Relay)

    def _take_metrics(self, metrics: EpochMetrics) -> None:
        """Calls the job's callback here and its loggers on their thread, and acknowledges the metrics afterwards."""
        self._replica.callbacks.call(self._job.metrics_fn, metrics)

        def acknowledge() -> None:
            taken = rank_pb2.EpochMetricsTaken(epoch=metrics.epoch, callback_errors=self._num_callback_errors)
            self._session.send(rank_pb2.ConverseRequest(epoch_metrics_taken=taken))

        self._loggers.log(metrics, acknowledge, is_last=metrics.epoch == self._job.epochs - 1)

    @property
    def _num_callback_errors(self) -> int:
        return self._replica.callbacks.num_errors + self._loggers.num_errors

    def finish(self) -> None:
        """Ends loggers and timeline and sends their remaining data, before the rank leaves."""
        self._replica.leave()
        self._loggers.end(LOGGERS_GRACE_S)
        if self._timeline is not None:
            self._timeline.stop()
        self._replica.audit.end(self.local_step, self._control.outcome)

    def _learn_outcome(self, outcome: rank_pb2.RoundOutcome) -> None:
        """Handles a committed round: writes or discards its checkpoint, evaluates or saves its result."""
        self._headers.forget(outcome.round)
        audit, version = self._replica.audit, outcome.version
        audit.committed(round_id=outcome.round, version=version, global_step=outcome.global_step)
        calls_back = outcome.HasField("checkpoint") and self._job.checkpoint_fn is not None
        # With `checkpoint_fn` it is written once that was called, in `use_result`.
        if not calls_back:
            act = acts.ResolveCheckpoint(outcome.round, outcome.version, outcome.HasField("checkpoint"))
            self._group.send(act)
            self._replica.resolve_checkpoint(act, outcome.checkpoint)
        if outcome.HasField("evaluate") or outcome.save_final or calls_back:
            self._chores.append(outcome)

    def _join(self, command: rank_pb2.FormGroup) -> None:
        self._headers.learn(command)
        self._report_times.learn(command.world_size)
        act = acts.JoinGeneration(
            command.attempt, command.generation, command.position, command.world_size, command.backend
        )
        self._group.send(act)
        self._replica.join_generation(act)

    def _report_built(self, build: GroupBuild) -> None:
        """Reports that a generation's group stands, or why it does not."""
        generation = build.act.generation
        self._group.send(acts.FinishBuild(generation))
        problem = self._replica.finish_build(generation)
        if problem:
            self._report_abandoned(generation, problem)
            return
        self._note(timeline.GROUP, build.started_s, generation)
        self._session.send(rank_pb2.ConverseRequest(group_ready=rank_pb2.GroupReady(generation=generation)))

    def _abort_at_once(self, generation: int) -> None:
        """Aborts the generation's round while the loop may be blocked until it ends. Runs on the session's thread."""
        self._averaging.abandon(generation)
        self._group.abandon(generation)

    def _abandon(self, command: rank_pb2.Abandon) -> None:
        """Abandons a generation: ends its round if one runs, reports the round's outcome, and enters no other round of
        it. The outcome is sent before `Abandoned`, on which the coordinator decides the generation's open rounds. A
        second `Abandon` asks for the headers that the first one has left here.
        """
        generation = command.generation
        group = self._replica.generations.in_use
        if self._averaging.is_running and group is not None and group.generation == generation:
            self._apply_result()
        self._replica.generations.forget(generation)
        if not command.keeps_headers:
            for reported in self._headers.take_unreported(generation):
                self._session.send(rank_pb2.ConverseRequest(header_reported=reported))
        self._report_abandoned(generation, "", keeps_headers=command.keeps_headers)

    def _report_abandoned(self, generation: int, reason: str, *, keeps_headers: bool = True) -> None:
        self._rounds.abandon(generation)
        abandoned = rank_pb2.Abandoned(
            generation=generation, reason=sendable(reason[:MAX_REASON_CHARS]), keeps_headers=keeps_headers
        )
        self._session.send(rank_pb2.ConverseRequest(abandoned=abandoned))

    def _rest(self) -> None:
        """Waits for a command or a batch, and records the reason: no data, a round, or the limit."""
        started_s = time.perf_counter()
        starved = self._may_train and not self._is_out_of_work
        throttled = not self._is_out_of_work and self.local_step >= self._rounds.limit_step
        with self._control.wake:
            # Others may wait for a round that depends on this rank's last batches. The report is sent only when it is
            # allowed: at the end of each wait it would be sent for every batch.
            if self._meter.has_unreported:
                due_s = self._report_times.allowed_s - started_s
                if not self._control.wake.wait_for(self._has_something_to_do, timeout=max(0.0, due_s)):
                    self._report()
            self._control.wake.wait_for(self._has_something_to_do)
        ended_s = time.perf_counter()
        waited_ms = (ended_s - started_s) * 1000
        kind, detail = timeline.IDLE, 0
        if starved:
            kind = timeline.WAIT_DATA
            self._meter.add_data_wait(waited_ms)
        elif self._averaging.is_running:
            kind, detail = timeline.WAIT_ROUND, self._replica.entered.round
            self._stalled_ms += waited_ms
        elif throttled:
            kind, detail = timeline.WAIT_LIMIT, int(min(self._rounds.limit_step, 2**53))
            self._meter.throttled_ms += waited_ms
        if self._timeline is not None:
            self._timeline.add(kind, started_s, ended_s, detail)

    def _note(self, kind: int, started_s: float, detail: int) -> None:
        if self._timeline is not None:
            self._timeline.add(kind, started_s, time.perf_counter(), detail)

    def _note_batches(self) -> None:
        if self._timeline is not None:
            for start_s, end_s in self._replica.timer.take_intervals():
                self._timeline.add(timeline.BATCH, start_s, end_s, self._replica.epoch)

    def _has_something_to_do(self) -> bool:
        may_apply = self._holds_result or (self._averaging.is_running and self._averaging.is_unusual)
        return self._control.has_news or may_apply or (self._may_train and self._loader.is_ready)

    # Batches

    def _train(self) -> None:
        act = acts.TrainBatch(self.progress.samples, self._replica.rates.factor)
        self._group.send(act)
        epoch, started_s = self._replica.epoch, time.perf_counter()
        self._replica.train(act)
        if self._timeline is not None and self._replica.epoch != epoch:
            self._timeline.add(timeline.EPOCH, started_s, started_s, self._replica.epoch)
        self._note_batches()
        if self._report_times.is_due(time.perf_counter(), self.local_step):
            self._report()

    def _report(self) -> None:
        self._report_times.note(time.perf_counter(), self.local_step)
        report = self._meter.take_report()
        if (gauges := self._gauges.take()) is not None:
            if self._replica.device.type == "cpu":
                self._read_grad_norm()
            gauges.learning_rate = self._replica.view.lr
            if self._grad_norm is not None:
                gauges.gradient_norm = self._grad_norm
            if (norm := self._replica.parameter_norm) is not None:
                gauges.parameter_norm = norm
            gauges.prefetch_batches = self._loader.num_ready
            gauges.throttled_ms = self._meter.throttled_ms
            report.gauges.CopyFrom(gauges)
        self._session.send(rank_pb2.ConverseRequest(batches_trained=report))

    def _read_grad_norm(self) -> None:
        """Reads the last gradient norm; may synchronise with the device."""
        if self._replica.step.grad_norm is not None:
            self._grad_norm = float(self._replica.step.grad_norm)

    # Rounds

    def _enter(self, round_id: int, *, is_last: bool = False) -> None:
        """Takes the snapshot and starts averaging; for blocking averaging, also applies the result. With `is_last` the
        result is kept to be left as a draft.
        """
        if self._control.leaving is not None:  # the others may have left too, and the collective would wait for them
            raise Leave(self._control.leaving)
        # The loop waits for the device here, once per round: the round's compute time has to be complete.
        self._meter.add_times(self._replica.timer.finish())
        self._note_batches()
        self._read_grad_norm()
        if self._report_times.is_allowed(time.perf_counter()):
            self._report()
        generation = self._rounds.targets[round_id].generation
        may_be_checkpoint = self._rounds.enter(round_id, self.local_step) or is_last
        entered = rank_pb2.RoundEntered(round=round_id, generation=generation)
        self._session.send(rank_pb2.ConverseRequest(round_entered=entered))
        started_s = time.perf_counter()
        # a rank that is stopped while the coordinator is away leaves its last result as a draft
        is_away = not self._session.is_connected
        act = acts.EnterRound(self._replica.row(round_id, generation), may_be_checkpoint, keeps_result=is_away)
        self._group.send(act)
        self._replica.enter_round(act)
        self._stalled_ms = (time.perf_counter() - started_s) * 1000
        self._entered_s = started_s
        if not self._job.overlaps:
            self._apply_result()

    def _apply_result(self) -> None:
        """Puts the result into the model and reports it, or reports that the round has none."""
        started_s = time.perf_counter()
        generation = self._await_result()
        entered = self._replica.entered
        self._note(timeline.WAIT_ROUND, started_s, entered.round)
        self._note(timeline.AVERAGE, self._entered_s, entered.round)
        applied_s = time.perf_counter()
        newer_batches = self.local_step - entered.local_step
        self._group.send(acts.ApplyResult())
        try:
            result = self._replica.apply_result()
        except (RoundAborted, CollectiveFailed) as error:
            self._lose_round(generation, error)
            return
        averaged = result.averaged
        self._stalled_ms += (time.perf_counter() - started_s) * 1000
        self._note(timeline.APPLY, applied_s, entered.round)
        ack = rank_pb2.SyncAck(
            round=entered.round,
            generation=generation,
            collective_ms=averaged.collective_ms,
            stalled_ms=self._stalled_ms,
            divergence=averaged.divergence,
            sent_bytes=averaged.sent_bytes,
            digest=result.digest,
            work=entered.work.to_messages(),
            newer_batches=newer_batches,
            callback_errors=self._num_callback_errors,
        )
        self._headers.put(ack, averaged.rows)
        self._session.send(rank_pb2.ConverseRequest(sync_ack=ack))

    def _await_result(self) -> int:
        """Waits for the round's collective, aborted if its generation is abandoned; returns that generation."""
        group = self._replica.generations.in_use
        assert group is not None
        generation, control = group.generation, self._control

        def is_over() -> bool:
            return self._averaging.is_done or control.leaving is not None or generation in control.abandoned

        # No time limit: a slow rank may take as long as it needs. If a rank has died, the coordinator abandons the
        # generation, which ends the wait. Without a coordinator, a rank that is told to stop gives up after
        # `LAST_ROUND_S`.
        with control.wake:
            control.wake.wait_for(lambda: is_over() or self._stops_alone)
            if self._stops_alone:
                control.wake.wait_for(is_over, timeout=LAST_ROUND_S)
        if control.leaving is not None:
            raise Leave(control.leaving)
        if not self._averaging.is_done:
            self._group.send(acts.EndRound())
            self._replica.end_collective()
        return generation

    def _lose_round(self, generation: int, error: RoundAborted | CollectiveFailed) -> None:
        """Reports a round without a result. If its collective failed by itself, abandons the generation."""
        is_asked = generation in self._control.abandoned
        reason = f"generation {generation} was given up" if is_asked else str(error)
        entered = self._replica.entered
        failed = rank_pb2.RoundFailed(
            round=entered.round, generation=generation, reason=sendable(reason[:MAX_REASON_CHARS])
        )
        self._session.send(rank_pb2.ConverseRequest(round_failed=failed))
        if isinstance(error, CollectiveFailed) and not is_asked:
            self._report_abandoned(generation, reason)

    # Chores

    def _do_chore(self, outcome: rank_pb2.RoundOutcome) -> None:
        """Evaluates, saves or shows the round's result, which the flat buffers hold until the next round."""
        started_s = time.perf_counter()
        part = outcome.evaluate
        act = acts.UseResult(
            round=outcome.round,
            version=outcome.version,
            evaluates=outcome.HasField("evaluate"),
            epoch=part.epoch,
            offset=part.offset,
            size=part.size,
            calls_back=outcome.HasField("checkpoint") and self._job.checkpoint_fn is not None,
            saves_final=outcome.save_final,
        )
        self._group.send(act)
        self._replica.use_result(
            act, outcome.checkpoint, lambda done: self._report_evaluation(part.epoch, done, started_s)
        )
        if act.saves_final:
            saved = rank_pb2.FinalStateSaved(path=str(self._launch.model_path))
            self._session.send(rank_pb2.ConverseRequest(final_state_saved=saved))

    def _keep_best(self, order: rank_pb2.KeepBest) -> None:
        kept = rank_pb2.BestKept()
        try:
            keep_best(self._launch.model_path, order.checkpoint, restores=order.restores)
        except Exception as error:  # the job keeps its last model, whatever error the storage raised
            kept.error = sendable(f"the best model cannot be stored: {error}"[:MAX_REASON_CHARS])
            print(kept.error, flush=True)
        self._session.send(rank_pb2.ConverseRequest(best_kept=kept))

    def _make_metrics(self, order: rank_pb2.MakeMetrics) -> None:
        """Calls the job's `eval_metrics` with an evaluation's sums."""
        started_s = time.perf_counter()
        with self._replica.seen_in(order.epoch):
            made = make_metrics(self._job, tensors_of(order.tensors), order.names, self._launch.file_name)
        done = Evaluated({name: (value, 1) for name, value in made.items()})
        self._report_evaluation(order.epoch, done, started_s, is_made=True)

    def _report_evaluation(self, epoch: int, done: Evaluated, started_s: float, *, is_made: bool = False) -> None:
        duration_ms = (time.perf_counter() - started_s) * 1000
        self._note(timeline.EVALUATE, started_s, epoch)
        evaluated = evaluated_message(epoch, done, duration_ms, is_made=is_made)
        self._session.send(rank_pb2.ConverseRequest(evaluated=evaluated))


def _metrics(message: rank_pb2.EpochMetrics) -> EpochMetrics:
    return EpochMetrics(
        epoch=message.epoch,
        loss=message.loss,
        scalars=dict(message.scalars),
        metrics=dict(message.metrics),
        duration_s=message.duration_s,
        samples=message.samples,
        samples_per_s=message.samples / message.duration_s if message.duration_s else 0.0,
        rank_batches=tuple(message.rank_batches),
        rank_samples_per_s=tuple(message.rank_samples_per_s),
        attempt=message.attempt,
    )
