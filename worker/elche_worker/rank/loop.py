"""The training loop of one rank: batches, rounds when they are due, and chores between them."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import grpc
import torch

from elche import timeline
from elche.extent import Extent
from elche.v1 import rank_pb2
from elche_worker.callbacks import Callbacks, EpochMetrics
from elche_worker.checkpoint import About, Kept, Loaded, Target
from elche_worker.job import TrainingJob
from elche_worker.loggers import Loggers
from elche_worker.rank.averaging import Averaging, AveragingOptions, Row
from elche_worker.rank.control import Control, Rounds
from elche_worker.rank.feed import Batch, Feed, Lease
from elche_worker.rank.gauges import Gauges
from elche_worker.rank.group import Alone, Group, RoundAborted
from elche_worker.rank.launch import Launch
from elche_worker.rank.layout import Layout
from elche_worker.rank.meter import Meter, RoundWork
from elche_worker.rank.process_group import ProcessGroup
from elche_worker.rank.relay import Relay
from elche_worker.rank.session import Session
from elche_worker.rank.store import CoordinatorStore
from elche_worker.rank.streams import Streams
from elche_worker.rank.timeline import Timeline
from elche_worker.rank.timing import new_timer
from elche_worker.rank.writer import State, Writer
from elche_worker.schedule import LearningRates, Progress
from elche_worker.state import save_state
from elche_worker.step import Built, TrainStep, evaluate, evaluate_part

REPORT_EVERY_S = 0.05
"""Progress reports are at least this far apart."""

LOGGERS_GRACE_S = 2.0
"""How long a rank that leaves waits for the job's loggers."""

MAX_REASON_CHARS = 1000


class Leave(Exception):
    """The rank is to leave; not an error of its own."""


@dataclass(frozen=True, slots=True)
class Entered:
    """The round that the rank has entered last, and its own part of it."""

    round: int
    local_step: int
    cut: int
    """Samples that its snapshot contains."""
    is_finite: bool
    work: RoundWork
    state: dict[str, Any] | None = None
    """What a checkpoint needs of the time of the snapshot, when the result may become one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a rank trains with, built from the user's file."""

    built: Built
    layout: Layout
    feed: Feed
    extent: Extent
    batch_size: int
    """Samples in this rank's batches."""
    backs_off: bool = False
    """Whether a batch goes in more parts when there is no memory for it."""
    eval_dataset: Any = None
    loaded: Loaded | None = None
    """The checkpoint to go on from."""
    timeline: Timeline | None = None
    """Where the rank notes what it does when."""


class Loop:
    """One rank's model, optimizer and data, driven by what the coordinator says."""

    def __init__(
        self,
        launch: Launch,
        job: TrainingJob,
        parts: Parts,
        *,
        control: Control,
        session: Session,
        channel: grpc.Channel,
        streams: Streams,
    ) -> None:
        self._launch = launch
        self._job = job
        self._model = parts.built.model
        self._optimizers = parts.built.all_optimizers
        self._layout = parts.layout
        self._feed = parts.feed
        self._extent = parts.extent
        self._eval_dataset = parts.eval_dataset
        self._control = control
        self._session = session
        self._channel = channel
        self._device = torch.device(launch.device)
        self._timeline = parts.timeline
        self._timer = new_timer(self._device, keeps_intervals=parts.timeline is not None)
        self._meter = Meter(reads_losses=self._device.type == "cpu")
        self._gauges = Gauges(self._device)
        self._grad_norm: float | None = None
        self._rounds = Rounds()
        outer: Any = job.outer_optimizer
        options = AveragingOptions(weighting=job.weighting, nonfinite=job.nonfinite, compress=job.compress, outer=outer)
        self._batch_size = parts.batch_size
        self._step = TrainStep(job, parts.built, self._device, launch.file_name, backs_off=parts.backs_off)
        self._rates = LearningRates(self._optimizers, schedule=job.schedule, scheduler=job.scheduler)
        self._averaging = Averaging(
            parts.layout, options, wake=control.notify, streams=streams, measures_divergence=job.policy != "sync"
        )
        self._entered = Entered(0, 0, 0, True, RoundWork())
        self._entered_s = 0.0
        self._stalled_ms = 0.0
        """Time that the present round has kept the rank from training."""
        self._chores: list[rank_pb2.RoundOutcome] = []
        self._group: Group | None = None
        self._version = 0
        """Version that the model holds; 0 until the first round."""
        self._result_step = 0
        """Batches that the result in the scratch contains."""
        self._base_samples = 0
        """Samples of all ranks in the checkpoint that the job goes on from."""
        self._result_samples = 0
        """Samples of all ranks in the result, and of this rank since its incarnation began."""
        self._result_cut = 0
        self._reported_s = 0.0
        self._epoch = -1
        self._callbacks = Callbacks()
        self._loggers = Loggers(job.loggers, launch.job_id)
        self._view = View(self)
        self._state = State(launch.rank, parts.built, parts.layout, self._step, self._averaging.reduction, job.seed)
        self._kept: dict[int, Kept] = {}
        """Round to what its checkpoint needs, until its outcome is told."""
        self._writer = Writer(*_place(launch, job, parts.layout), session.send, parts.timeline)
        if parts.loaded is not None:
            self._resume(parts.loaded)

    def _resume(self, loaded: Loaded) -> None:
        training = loaded.manifest["training"]
        self._version = training["version"]
        self._base_samples = self._result_samples = training["samples"]
        self._state.restore(loaded, torch.device("cpu"), self._version)
        self._rates.reset()

    @property
    def local_step(self) -> int:
        """Batches trained."""
        return self._meter.local_step

    @property
    def progress(self) -> Progress:
        """How far the job is, as far as this rank knows."""
        return Progress(
            samples=self._result_samples + self._meter.num_processed - self._result_cut,
            total_samples=self._extent.total_samples,
            batch_size=self._extent.batch_size,
        )

    def run(self) -> None:
        """Trains until the coordinator says to leave; raises `Leave` then, and what user code raises."""
        self._model.train()
        while True:
            if self._control.has_news:
                self._take_in()
            due = self._rounds.due(self.local_step, is_out_of_work=self._is_out_of_work)
            if self._averaging.is_done and self.local_step >= self._rounds.apply_step:
                self._hold()
            elif self._chores:
                self._do_chore(self._chores.pop(0))
            elif due is not None and not self._averaging.is_running:
                self._enter(due)
            elif self._may_train and self._feed.is_ready:
                self._train(self._feed.take())
            else:
                self._rest()

    @property
    def _is_out_of_work(self) -> bool:
        return self._meter.num_processed == self._feed.num_leased

    @property
    def _may_train(self) -> bool:
        is_replayed = self._averaging.is_running and self._rounds.apply_step > -inf
        limit = min(self._rounds.limit_step, self._rounds.apply_step) if is_replayed else self._rounds.limit_step
        return self._version > 0 and self._group is not None and self.local_step < limit

    # Commands

    def _take_in(self) -> None:
        for command in self._control.take():
            match command.WhichOneof("message"):
                case "sync_now":
                    self._rounds.learn(command.sync_now)
                case "start_epoch":
                    plan = command.start_epoch
                    self._feed.add(
                        Lease(
                            id=plan.lease,
                            epoch=plan.epoch,
                            offset=plan.partition_offset,
                            size=plan.partition_size,
                        )
                    )
                case "round_outcome":
                    self._learn_outcome(command.round_outcome)
                case "epoch_metrics":
                    self._take_metrics(_metrics(command.epoch_metrics))
                case "throttle":
                    self._rounds.throttle_step = command.throttle.limit_step
                case "form_group":
                    self._form_group(command.form_group)
        if self._control.leaving is not None:
            raise Leave(self._control.leaving)

    def _take_metrics(self, metrics: EpochMetrics) -> None:
        """For the job's callback, here, and its loggers, on their thread; then says that they have it."""
        self._callbacks.call(self._job.metrics_fn, metrics)

        def say_so() -> None:
            num_errors = self._callbacks.num_errors + self._loggers.num_errors
            taken = rank_pb2.EpochMetricsTaken(epoch=metrics.epoch, callback_errors=num_errors)
            self._session.send(rank_pb2.ConverseRequest(epoch_metrics_taken=taken))

        self._loggers.log(metrics, say_so, is_last=metrics.epoch == self._job.epochs - 1)

    def say_last_words(self) -> None:
        """What is left to be told when the rank leaves: to loggers, and of the timeline."""
        self._loggers.end(LOGGERS_GRACE_S)
        if self._timeline is not None:
            self._timeline.stop()

    def _learn_outcome(self, outcome: rank_pb2.RoundOutcome) -> None:
        """The round is committed: what was kept of it is written, or is of no use."""
        calls_back = outcome.HasField("checkpoint") and self._job.checkpoint_fn is not None
        if not calls_back:
            self._write(outcome)
        if outcome.HasField("evaluate") or outcome.save_final or calls_back:
            self._chores.append(outcome)

    def _write(self, outcome: rank_pb2.RoundOutcome) -> None:
        kept = self._kept.pop(outcome.round, None)
        if outcome.HasField("checkpoint"):
            kept = kept or self._state.keep(self._state.at_entry())  # not foreseen: moments are a few batches newer
            self._writer.write(outcome.version, outcome.checkpoint, kept, self._state)
        elif kept is not None:
            self._state.give_back(kept)

    def _form_group(self, command: rank_pb2.FormGroup) -> None:
        self._rates.scale = 1 + self._job.lr_scale_ratio * (command.world_size - 1)
        self._writer.num_ranks = command.world_size
        started_s = time.perf_counter()
        self._group = self._new_group(command)
        self._note(timeline.GROUP, started_s, command.generation)
        ready = rank_pb2.GroupReady(generation=command.generation)
        self._session.send(rank_pb2.ConverseRequest(group_ready=ready))

    def _new_group(self, command: rank_pb2.FormGroup) -> Group:
        attempt, generation = command.attempt, command.generation
        if command.world_size == 1:
            return Alone(attempt=attempt, generation=generation, device=torch.device("cpu"))
        position, size = command.position, command.world_size
        secret = self._launch.secret
        if command.backend == "cpu":
            return Relay(self._channel, secret, attempt=attempt, generation=generation, position=position, size=size)
        return ProcessGroup(
            CoordinatorStore(self._channel, secret),
            backend=command.backend,
            attempt=attempt,
            generation=generation,
            position=position,
            size=size,
            peer=self._launch.coordinator,
            device=self._device,
        )

    def _rest(self) -> None:
        """Waits for a command or a batch; time without data while it could train is counted."""
        started_s = time.perf_counter()
        starved = self._may_train and not self._is_out_of_work
        throttled = not self._is_out_of_work and self.local_step >= self._rounds.limit_step
        with self._control.wake:
            if self._meter.has_unreported:  # somebody may wait for it; but no more often than otherwise
                due_s = self._reported_s + REPORT_EVERY_S - started_s
                if not self._control.wake.wait_for(self._has_something_to_do, timeout=max(0.0, due_s)):
                    self._report()
            self._control.wake.wait_for(self._has_something_to_do)
        ended_s = time.perf_counter()
        waited_ms = (ended_s - started_s) * 1000
        if self._timeline is not None:
            self._note_rest(started_s, ended_s, starved=starved, throttled=throttled)
        if starved:
            self._meter.add_data_wait(waited_ms)
        elif self._averaging.is_running:
            self._stalled_ms += waited_ms
        elif throttled:
            self._meter.throttled_ms += waited_ms

    def _note_rest(self, started_s: float, ended_s: float, *, starved: bool, throttled: bool) -> None:
        assert self._timeline is not None
        if starved:
            self._timeline.add(timeline.WAIT_DATA, started_s, ended_s)
        elif self._averaging.is_running:
            self._timeline.add(timeline.WAIT_ROUND, started_s, ended_s, self._entered.round)
        elif throttled:
            self._timeline.add(timeline.WAIT_LIMIT, started_s, ended_s, int(min(self._rounds.limit_step, 2**53)))
        else:
            self._timeline.add(timeline.IDLE, started_s, ended_s)

    def _note(self, kind: int, started_s: float, detail: int) -> None:
        if self._timeline is not None:
            self._timeline.add(kind, started_s, time.perf_counter(), detail)

    def _note_batches(self) -> None:
        if self._timeline is not None:
            for start_s, end_s in self._timer.take_intervals():
                self._timeline.add(timeline.BATCH, start_s, end_s, self._epoch)

    def _has_something_to_do(self) -> bool:
        is_held = self._averaging.is_done and self.local_step >= self._rounds.apply_step
        return self._control.has_news or is_held or (self._may_train and self._feed.is_ready)

    # Batches

    def _train(self, batch: Batch) -> None:
        data = self._feed.mover.receive(batch.data, batch.event)
        if batch.epoch != self._epoch:
            self._epoch = batch.epoch
            self._callbacks.call(self._job.epoch_fn, self._view, batch.epoch)
        if not self._rates.is_constant:
            self._rates.set(self.progress)
        self._timer.start()
        started_s = time.perf_counter()
        loss, scalars = self._step.run(data, batch.size)
        if self._launch.slow_factor > 1:
            self._slow_down(started_s)
        self._timer.stop()
        self._meter.add_batch(batch.epoch, batch.size, loss, scalars)
        self._meter.add_times(self._timer.take())
        self._note_batches()
        if time.perf_counter() - self._reported_s >= REPORT_EVERY_S:
            self._report()

    def _slow_down(self, started_s: float) -> None:
        """Stands for a slower device: the batch takes `slow_factor` times as long as it did."""
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        time.sleep((time.perf_counter() - started_s) * (self._launch.slow_factor - 1))

    def _report(self) -> None:
        self._reported_s = time.perf_counter()
        report = self._meter.take_report()
        if (gauges := self._gauges.take()) is not None:
            if self._device.type == "cpu":
                self._read_grad_norm()
            gauges.learning_rate = self._view.lr
            if self._grad_norm is not None:
                gauges.gradient_norm = self._grad_norm
            gauges.prefetch_batches = self._feed.num_ready
            gauges.throttled_ms = self._meter.throttled_ms
            report.gauges.CopyFrom(gauges)
        self._session.send(rank_pb2.ConverseRequest(batches_trained=report))

    def _read_grad_norm(self) -> None:
        """Waits for the device, unless that has been done."""
        if self._step.grad_norm is not None:
            self._grad_norm = float(self._step.grad_norm)

    # Rounds

    def _enter(self, round_id: int) -> None:
        """Takes the snapshot and starts averaging; trains on meanwhile if that is allowed."""
        assert self._group is not None
        self._meter.add_times(self._timer.finish())
        self._note_batches()
        self._read_grad_norm()
        if time.perf_counter() - self._reported_s >= REPORT_EVERY_S:
            self._report()
        is_kept = self._rounds.enter(round_id, self.local_step)
        entered = rank_pb2.RoundEntered(round=round_id, generation=self._group.generation)
        self._session.send(rank_pb2.ConverseRequest(round_entered=entered))
        started_s = time.perf_counter()
        overlaps = self._job.overlaps
        row = self._row(self._group, round_id)
        self._state.settle()
        at_entry = self._state.at_entry() if is_kept else None
        is_finite = self._averaging.start(self._group, row, keeps_snapshot=overlaps)
        self._entered = Entered(
            round_id, self.local_step, self._meter.num_processed, is_finite, self._meter.take_work(), at_entry
        )
        self._stalled_ms = (time.perf_counter() - started_s) * 1000
        self._entered_s = started_s
        if not overlaps or not is_finite:
            self._hold()

    def _hold(self) -> None:
        """Brings the result into the model and says so, or that the round is given up."""
        assert self._group is not None
        started_s = time.perf_counter()
        with self._control.wake:
            self._control.wake.wait_for(lambda: self._averaging.is_done or self._control.leaving is not None)
        if self._control.leaving is not None:
            raise Leave(self._control.leaving)
        self._note(timeline.WAIT_ROUND, started_s, self._entered.round)
        self._note(timeline.AVERAGE, self._entered_s, self._entered.round)
        applied_s = time.perf_counter()
        try:
            averaged = self._averaging.complete(has_newer_steps=self.local_step != self._entered.local_step)
        except RoundAborted as aborted:
            self._give_up(str(aborted))
            return
        self._version = averaged.version
        self._result_step, self._result_cut = self._entered.local_step, self._entered.cut
        self._result_samples = self._base_samples + sum(row.cut for row in averaged.rows)
        if not self._entered.is_finite:
            self._forget_moments()
        newer_batches = self.local_step - self._entered.local_step
        self._look_at_result()
        if self.local_step:
            self._feed.mover.measure()
        self._stalled_ms += (time.perf_counter() - started_s) * 1000
        self._note(timeline.APPLY, applied_s, self._entered.round)
        ack = rank_pb2.SyncAck(
            round=self._entered.round,
            generation=self._group.generation,
            header=[_header_row(row) for row in averaged.rows],
            collective_ms=averaged.collective_ms,
            stalled_ms=self._stalled_ms,
            divergence=averaged.divergence,
            sent_bytes=averaged.sent_bytes,
            digest=self._digest() if self._launch.verify_rounds else None,
            work=self._entered.work.to_messages(),
            newer_batches=newer_batches,
            callback_errors=self._callbacks.num_errors + self._loggers.num_errors,
        )
        self._session.send(rank_pb2.ConverseRequest(sync_ack=ack))

    def _look_at_result(self) -> None:
        """What is done with the result as it is: kept for a checkpoint, and shown to the job's hook."""
        at_entry = self._entered.state
        if self._job.after_round is not None or (at_entry is not None and self._job.optimizer_state != "local"):
            with self._result_in_model():
                if at_entry is not None:
                    self._state.keep_moments(at_entry)
                self._callbacks.call(self._job.after_round, self._model, self._version)
        if at_entry is not None:
            self._writer.wait_for_room(lambda: self._control.leaving is not None)
            self._kept[self._entered.round] = self._state.keep(at_entry)

    def _give_up(self, reason: str) -> None:
        """The round is lost, not its work: that belongs to the next one."""
        assert self._group is not None
        self._meter.put_back(self._entered.work)
        failed = rank_pb2.RoundFailed(
            round=self._entered.round, generation=self._group.generation, reason=reason[:MAX_REASON_CHARS]
        )
        self._session.send(rank_pb2.ConverseRequest(round_failed=failed))

    def _forget_moments(self) -> None:
        """Of parameters that were not finite; unless the round has replaced them as well."""
        if self._job.optimizer_state == "local":
            for optimizer in self._optimizers:
                optimizer.state.clear()

    def _digest(self) -> int:
        """Of what must be equal on all ranks: the parameters, or, when they have moved on, the round's result."""
        return self._layout.result_digest() if self._job.overlaps else self._layout.digest()

    def _row(self, group: Group, round_id: int) -> Row:
        return Row(
            attempt=group.attempt,
            generation=group.generation,
            round=round_id,
            layout_hash=self._layout.hash,
            weight=self._meter.work.weight,
            finite=1,
            cut=self._meter.num_processed,
            local_step=self._meter.local_step,
            compute_us=round(self._meter.work.compute_ms * 1000),
            version=self._version,
        )

    # Chores

    def _do_chore(self, outcome: rank_pb2.RoundOutcome) -> None:
        """Evaluates, or writes, the round's result, which the scratch holds until the next round."""
        with self._result_in_model():
            if outcome.HasField("evaluate"):
                self._evaluate(outcome.evaluate)
            if outcome.HasField("checkpoint"):
                self._callbacks.call(self._job.checkpoint_fn, outcome.version, self._model)
                if self._job.checkpoint_fn is not None:
                    self._write(outcome)  # only now: the job does not end before its callback has
            if outcome.save_final:
                save_state(self._model, self._launch.model_path)
                saved = rank_pb2.FinalStateSaved(path=str(self._launch.model_path))
                self._session.send(rank_pb2.ConverseRequest(final_state_saved=saved))

    @contextmanager
    def _result_in_model(self) -> Iterator[None]:
        has_newer_steps = self.local_step != self._result_step
        if has_newer_steps:
            self._state.settle()
            self._layout.swap()
        yield
        if has_newer_steps:
            self._layout.swap()

    def _evaluate(self, part: rank_pb2.Evaluate) -> None:
        started_s = time.perf_counter()
        job, model, file_name = self._job, self._model, self._launch.file_name
        if part.size:
            fits = max(1, self._batch_size // self._step.num_parts)
            sums = evaluate_part(job, model, self._eval_dataset, part.offset, part.size, file_name, batch_size=fits)
        else:
            sums = evaluate(job, model, file_name)
        duration_ms = (time.perf_counter() - started_s) * 1000
        self._note(timeline.EVALUATE, started_s, part.epoch)
        messages = {name: rank_pb2.ScalarSum(sum=float(total), count=count) for name, (total, count) in sums.items()}
        evaluated = rank_pb2.Evaluated(epoch=part.epoch, sums=messages, duration_ms=duration_ms)
        self._session.send(rank_pb2.ConverseRequest(evaluated=evaluated))


class View:
    """The rank as its callbacks see it: an `elche_worker.callbacks.Rank`."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    @property
    def model(self) -> torch.nn.Module:
        return self._loop._model

    @property
    def rank(self) -> int:
        return self._loop._launch.rank

    @property
    def device(self) -> str:
        return self._loop._launch.device

    @property
    def local_step(self) -> int:
        return self._loop.local_step

    @property
    def version(self) -> int:
        return self._loop._version

    @property
    def epoch(self) -> int:
        return self._loop._epoch

    @property
    def lr(self) -> float:
        return float(self._loop._optimizers[0].param_groups[0]["lr"])

    @property
    def lr_factor(self) -> float:
        return self._loop._rates.factor

    @lr_factor.setter
    def lr_factor(self, factor: float) -> None:
        self._loop._rates.factor = factor


def _place(launch: Launch, job: TrainingJob, layout: Layout) -> tuple[Target, About]:
    """Where the job's checkpoints go, and what they say of it."""
    root = job.checkpoint_dir or str(Path(launch.output_dir) / "checkpoints")
    about = About(
        job=launch.job_id,
        file_name=launch.file_name,
        source=launch.source,
        settings=launch.settings,
        tensors=layout.model_tensors,
    )
    return Target(f"{root.rstrip('/')}/{launch.job_id}"), about


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
    )


def _header_row(row: Row) -> rank_pb2.HeaderRow:
    return rank_pb2.HeaderRow(
        weight=row.weight,
        cut=row.cut,
        local_step=row.local_step,
        compute_us=row.compute_us,
        finite=bool(row.finite),
        version=row.version,
    )
