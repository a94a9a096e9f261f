"""The training loop of one rank: batches, rounds when they are due, and chores between them."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
import torch

from elche.v1 import rank_pb2
from elche_worker.job import TrainingJob
from elche_worker.rank.averaging import Averaging, AveragingOptions, Row
from elche_worker.rank.control import Control, Rounds
from elche_worker.rank.feed import Batch, Feed, Lease
from elche_worker.rank.group import Alone, Group, RoundAborted
from elche_worker.rank.launch import Launch
from elche_worker.rank.layout import Layout
from elche_worker.rank.meter import Meter, RoundWork
from elche_worker.rank.process_group import ProcessGroup
from elche_worker.rank.relay import Relay
from elche_worker.rank.session import Session
from elche_worker.rank.store import CoordinatorStore
from elche_worker.rank.streams import Streams
from elche_worker.rank.timing import new_timer
from elche_worker.rank.transfer import to_device
from elche_worker.state import save_state
from elche_worker.step import LearningRates, TrainStep, evaluate

REPORT_EVERY_S = 0.05
"""Progress reports are at least this far apart."""

MAX_REASON_CHARS = 1000


class Leave(Exception):
    """The rank is to leave; not an error of its own."""


@dataclass(frozen=True, slots=True)
class Entered:
    """The round that the rank has entered last, and its own part of it."""

    round: int
    local_step: int
    is_finite: bool
    work: RoundWork


class Loop:
    """One rank's model, optimizer and data, driven by what the coordinator says."""

    def __init__(
        self,
        launch: Launch,
        job: TrainingJob,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        layout: Layout,
        *,
        feed: Feed,
        control: Control,
        session: Session,
        channel: grpc.Channel,
        streams: Streams,
    ) -> None:
        self._launch = launch
        self._job = job
        self._model = model
        self._optimizer = optimizer
        self._layout = layout
        self._feed = feed
        self._control = control
        self._session = session
        self._channel = channel
        self._device = torch.device(launch.device)
        self._timer = new_timer(self._device)
        self._meter = Meter(reads_losses=self._device.type == "cpu")
        self._rounds = Rounds()
        options = AveragingOptions(
            weighting=job.weighting, nonfinite=job.nonfinite, compress=job.compress, outer=job.outer_optimizer
        )
        self._step = TrainStep(job, model, optimizer, self._device, launch.file_name)
        self._base_rates = [group["lr"] for group in optimizer.param_groups]
        self._rates = LearningRates(optimizer, self._base_rates, job.schedule, 1.0)
        self._global_step = 0
        """Batches of all ranks in the result that the model has."""
        self._averaging = Averaging(
            layout, options, wake=control.notify, streams=streams, measures_divergence=job.policy != "sync"
        )
        self._entered = Entered(0, 0, True, RoundWork())
        self._stalled_ms = 0.0
        """Time that the present round has kept the rank from training."""
        self._chores: list[rank_pb2.RoundOutcome] = []
        self._group: Group | None = None
        self._version = 0
        """Version that the model holds; 0 until the first round."""
        self._result_step = 0
        """Batches that the result in the scratch contains."""
        self._reported_s = 0.0

    @property
    def local_step(self) -> int:
        """Batches trained."""
        return self._meter.local_step

    def run(self) -> None:
        """Trains until the coordinator says to leave; raises `Leave` then, and what user code raises."""
        self._model.train()
        while True:
            if self._control.has_news:
                self._take_in()
            due = self._rounds.due(self.local_step, is_out_of_work=self._is_out_of_work)
            if self._averaging.is_done:
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
        return self._version > 0 and self.local_step < self._rounds.limit_step

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
                    self._global_step = max(self._global_step, command.round_outcome.global_step)
                    if command.round_outcome.HasField("evaluate_epoch") or command.round_outcome.save_final:
                        self._chores.append(command.round_outcome)
                case "throttle":
                    self._rounds.throttle_step = command.throttle.limit_step
                case "form_group":
                    self._form_group(command.form_group)
        if self._control.leaving is not None:
            raise Leave(self._control.leaving)

    def _form_group(self, command: rank_pb2.FormGroup) -> None:
        scale = 1 + self._job.lr_scale_ratio * (command.world_size - 1)
        self._rates = LearningRates(self._optimizer, self._base_rates, self._job.schedule, scale)
        self._group = self._new_group(command)
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
        with self._control.wake:
            if self._meter.has_unreported:  # somebody may wait for it; but no more often than otherwise
                due_s = self._reported_s + REPORT_EVERY_S - started_s
                if not self._control.wake.wait_for(self._has_something_to_do, timeout=max(0.0, due_s)):
                    self._report()
            self._control.wake.wait_for(self._has_something_to_do)
        waited_ms = (time.perf_counter() - started_s) * 1000
        if starved:
            self._meter.add_data_wait(waited_ms)
        elif self._averaging.is_running:
            self._stalled_ms += waited_ms

    def _has_something_to_do(self) -> bool:
        return self._control.has_news or self._averaging.is_done or (self._may_train and self._feed.is_ready)

    # Batches

    def _train(self, batch: Batch) -> None:
        data = to_device(batch.data, self._device)
        self._rates.set(self._global_step + self.local_step - self._result_step)
        self._timer.start()
        started_s = time.perf_counter()
        loss, scalars = self._step.run(data, batch.size)
        if self._launch.slow_factor > 1:
            self._slow_down(started_s)
        self._timer.stop()
        self._meter.add_batch(batch.epoch, batch.size, loss, scalars)
        self._meter.add_times(self._timer.take())
        if time.perf_counter() - self._reported_s >= REPORT_EVERY_S:
            self._report()

    def _slow_down(self, started_s: float) -> None:
        """Stands for a slower device: the batch takes `slow_factor` times as long as it did."""
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        time.sleep((time.perf_counter() - started_s) * (self._launch.slow_factor - 1))

    def _report(self) -> None:
        self._reported_s = time.perf_counter()
        self._session.send(rank_pb2.ConverseRequest(batches_trained=self._meter.take_report()))

    # Rounds

    def _enter(self, round_id: int) -> None:
        """Takes the snapshot and starts averaging; trains on meanwhile if that is allowed."""
        assert self._group is not None
        self._meter.add_times(self._timer.finish())
        if time.perf_counter() - self._reported_s >= REPORT_EVERY_S:
            self._report()
        self._rounds.enter(round_id)
        entered = rank_pb2.RoundEntered(round=round_id, generation=self._group.generation)
        self._session.send(rank_pb2.ConverseRequest(round_entered=entered))
        started_s = time.perf_counter()
        overlaps = self._job.overlaps
        row = self._row(self._group, round_id)
        is_finite = self._averaging.start(self._group, row, keeps_snapshot=overlaps)
        self._entered = Entered(round_id, self.local_step, is_finite, self._meter.take_work())
        self._stalled_ms = (time.perf_counter() - started_s) * 1000
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
        try:
            averaged = self._averaging.complete(has_newer_steps=self.local_step != self._entered.local_step)
        except RoundAborted as aborted:
            self._give_up(str(aborted))
            return
        self._version = averaged.version
        self._result_step = self._entered.local_step
        self._global_step = sum(row.local_step for row in averaged.rows)
        if not self._entered.is_finite:
            self._forget_moments()
        self._stalled_ms += (time.perf_counter() - started_s) * 1000
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
        )
        self._session.send(rank_pb2.ConverseRequest(sync_ack=ack))

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
            self._optimizer.state.clear()

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
            if outcome.HasField("evaluate_epoch"):
                self._evaluate(outcome.evaluate_epoch)
            if outcome.save_final:
                save_state(self._model, self._launch.model_path)
                saved = rank_pb2.FinalStateSaved(path=str(self._launch.model_path))
                self._session.send(rank_pb2.ConverseRequest(final_state_saved=saved))

    @contextmanager
    def _result_in_model(self) -> Iterator[None]:
        has_newer_steps = self.local_step != self._result_step
        if has_newer_steps:
            self._layout.swap()
        yield
        if has_newer_steps:
            self._layout.swap()

    def _evaluate(self, epoch: int) -> None:
        started_s = time.perf_counter()
        metrics = evaluate(self._job, self._model, self._launch.file_name)
        duration_ms = (time.perf_counter() - started_s) * 1000
        evaluated = rank_pb2.Evaluated(epoch=epoch, metrics=metrics, duration_ms=duration_ms)
        self._session.send(rank_pb2.ConverseRequest(evaluated=evaluated))


def _header_row(row: Row) -> rank_pb2.HeaderRow:
    return rank_pb2.HeaderRow(
        weight=row.weight,
        cut=row.cut,
        local_step=row.local_step,
        compute_us=row.compute_us,
        finite=bool(row.finite),
        version=row.version,
    )
