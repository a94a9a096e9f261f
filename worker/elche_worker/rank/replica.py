"""One process's model, or its part of one: trains, averages, evaluates and saves it.

The rank's loop decides when. In a replica group each process has a `Replica`: the leader's loop sends each act (`acts`)
to the others before it carries it out, and they carry out the same act (`follower`). So all processes of the group are
in the same method whenever they exchange something within the group.
"""

import faulthandler
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import torch

from elche.errors import JobFailed
from elche.v1 import rank_pb2
from elche_worker.collectives.averaging import Averaging
from elche_worker.collectives.header import AveragingOptions, Row
from elche_worker.collectives.operations import CollectiveFailed, Collectives, OperationStuck, RoundAborted
from elche_worker.data.lease_loader import LeasedPart
from elche_worker.device.faults import Cause, fault_of, is_out_of_memory
from elche_worker.device.kinds import kind_of
from elche_worker.device.rng import capture_rng_state, kept_random, restore_rng_state
from elche_worker.device.streams import DeviceStreams
from elche_worker.model.checkpoint import About, CheckpointTarget, Loaded, weights_of
from elche_worker.model.evaluation import Evaluated, evaluate, evaluate_part, rehearse, rehearse_modes
from elche_worker.model.frozen import LeftOut
from elche_worker.model.layout import Layout
from elche_worker.model.mean import decay_of, ema_notice, mean_in_model
from elche_worker.model.modes import Switches, evaluated_weights
from elche_worker.model.norms import ParameterNorm
from elche_worker.model.savable import check_savable, check_state
from elche_worker.model.state import save_weights
from elche_worker.model.step import TrainStep, merge_of
from elche_worker.rank.acts import EnterRound, JoinGeneration, ResolveCheckpoint, TrainBatch, UseResult
from elche_worker.rank.audited import Audited, keep_source, start_of
from elche_worker.rank.checkpoint_capture import CheckpointCapture
from elche_worker.rank.checkpoint_writer import CheckpointWriter
from elche_worker.rank.connect import connect
from elche_worker.rank.digest_times import DigestTimes
from elche_worker.rank.generations import Generations
from elche_worker.rank.join_state import JoinState
from elche_worker.rank.parts import AppliedResult, EnteredRound, Parts, ResultExtent
from elche_worker.rank.replica_group import MEMBER_SEED, T
from elche_worker.rank.round_checkpoints import RoundCheckpoints
from elche_worker.rank.round_memory import RoundMemory
from elche_worker.rank.view import View
from elche_worker.session.launch import Launch
from elche_worker.session.stopped import claim
from elche_worker.telemetry.audit import AuditLog
from elche_worker.telemetry.meter import Meter, RoundWork
from elche_worker.telemetry.slowdown import Slowdown
from elche_worker.telemetry.timing import new_timer
from elche_worker.user.callbacks import Callbacks, be_this_rank
from elche_worker.user.events import record_event
from elche_worker.user.job import JobDefinition
from elche_worker.user.own_counts import OwnCounts
from elche_worker.user.schedule import LearningRates, Progress

ABORT_PATIENCE_S = 0.5
"""Seconds for which a rank that leaves waits for the abort of a collective."""
STUCK_S = 10.0
"""Seconds after which an aborted collective is stuck; most return within some 10 ms."""
SAVE_S = 600.0
"""Seconds for which a final model that cannot be written is tried again."""
AGAIN_S = 1.0
"""Seconds between two attempts."""


class Replica:
    """The model and its training. Calls `wake` when a batch or a result is ready."""

    def __init__(
        self,
        launch: Launch,
        job: JobDefinition,
        parts: Parts,
        *,
        channel: grpc.Channel,
        streams: DeviceStreams,
        wake: Callable[[], None],
        send: Callable[[rank_pb2.ConverseRequest], None],
        is_over: Callable[[], bool] = bool,
        note_built: Callable[[], None] | None = None,
        meet: Callable[[JoinGeneration], Collectives] | None = None,
    ) -> None:
        """`is_over` returns True when the rank is leaving, which ends waits. `note_built` is called on another thread
        when the build of a generation's group has ended. `meet` builds a group otherwise than with the ranks that the
        coordinator names.
        """
        self._is_over = is_over
        self._streams = streams
        self.launch = launch
        self._job = job
        self._parts = parts
        self.model = parts.built.model
        self.optimizers = parts.built.all_optimizers
        self.layout = parts.layout
        self.loader = parts.loader
        self.replica_group = parts.group
        self.own_state = parts.own_state
        self.device = torch.device(launch.device)
        self.generations = Generations(
            meet or (lambda act: connect(act, launch, job, channel, self.device)),
            wake if note_built is None else note_built,
        )
        self._slowdown = Slowdown(launch.slow_factor)
        self.timer = new_timer(self.device, keeps_intervals=parts.timeline is not None)
        self.meter = Meter(reads_losses=self.device.type == "cpu")
        self._norm = ParameterNorm(parts.layout, self.device)
        options = _averaging_options(job, parts)
        self.averaging = Averaging(
            parts.layout,
            options,
            wake=wake,
            streams=streams,
            measures_divergence=job.traits.measures_divergence,
            agree=parts.group.agree,
        )
        self._round_memory = RoundMemory(
            job.memory, parts.loader.transfer, parts.layout.size_bytes * self.averaging.num_copies(job.overlaps)
        )
        self.step = TrainStep(
            job,
            parts.built,
            self.device,
            launch.file_name,
            backs_off=parts.backs_off,
            make_room=parts.loader.make_room,
            order_change=self.averaging.order_change,
        )
        self.rates = LearningRates(self.optimizers, schedule=job.schedule, scheduler=job.scheduler)
        self._own_counts = OwnCounts(self.model, self.optimizers)
        self._join_state = JoinState(self.rates, Switches(self.model), self.own_state)
        self._digests = DigestTimes(is_always=launch.verify_rounds)
        self.entered = EnteredRound(0, 0, 0, RoundWork())
        self._was_discarded = False
        """True if this rank's values were left out of the last round."""
        self.version = 0
        """Version that the model holds; 0 until the first round. It is sent in headers: ranks with an older version
        than the newest are newcomers and have no weight.
        """
        self._result = ResultExtent(0, 0, 0)
        """The training in the last result, to which `progress` adds what was trained since."""
        self._is_after_round = False
        """True while `after_round` runs."""
        self._has_result = False
        """True if the round that was entered last has a result, and it was applied."""
        self._leased: Counter[int] = Counter()
        """By epoch: samples leased and not trained."""
        self.epoch = -1
        """Epoch of the batch that was trained last; -1 before the first."""
        self._begun_epoch = -1
        """The last epoch for which `epoch_fn` was called in this process."""
        self.callbacks = Callbacks(kept_random)
        self.view = View(launch.rank, self, self.rates, self.callbacks)
        be_this_rank(self.view)
        self._left_out = LeftOut(self.model, parts.layout, keeps=job.save_frozen)
        writer = CheckpointWriter(*_place(launch, job, parts.layout), send, parts.timeline, parts.pieces)
        self.checkpoints = RoundCheckpoints(self._new_capture(), writer)
        if parts.loaded is not None:
            self._resume(parts.loaded)
        # After the resume: the file's head says from which version and samples this process goes on.
        self.audit = Audited(self._new_audit(options) if job.audit and parts.group.is_leader else None, options)

    def _new_capture(self) -> CheckpointCapture:
        parts, reduction = self._parts, self.averaging.reduction
        seed = self._job.seed + MEMBER_SEED * self.launch.member
        step, rates, streams, left_out = self.step, self.rates, self._streams, self._left_out
        of = self.launch.rank, parts.built, parts.layout
        return CheckpointCapture(*of, step, reduction, rates, seed, streams, left_out, parts.own_state)

    def _new_audit(self, options: AveragingOptions) -> AuditLog:
        """The file of what this rank trains, besides its other files."""
        launch, loaded = self.launch, self._parts.loaded
        resumed = "" if loaded is None else loaded.path
        samples = self._result.samples
        head = start_of(launch, self._parts.extent, options, resumed=resumed, version=self.version, samples=samples)
        folder = Path(launch.output_dir) / "audit" / launch.job_id
        log = AuditLog(folder / f"rank-{launch.rank}-{launch.incarnation}.bin", head)
        keep_source(folder, launch.source)
        return log

    def _resume(self, loaded: Loaded) -> None:
        training = loaded.manifest["training"]
        self.version = training["version"]
        self._result = ResultExtent(0, 0, training["samples"])
        is_leader = self.replica_group.is_leader
        self.checkpoints.capture.restore(loaded, self.version, is_leader=is_leader)
        if text := ema_notice(self._job.ema, has_mean=bool(loaded.mean)):
            print(f"elche: {text}", flush=True)

    @property
    def local_step(self) -> int:
        """Batches trained."""
        return self.meter.local_step

    @property
    def parameter_norm(self) -> float | None:
        """L2 norm of the trained parameters, as last measured; None before the first measurement."""
        return self.replica_group.parameter_norm(self._norm.value)

    @property
    def progress(self) -> Progress:
        """The job's progress, as far as this rank knows it; while `after_round` runs, that of the result."""
        if self._is_after_round:
            return self._progress(self._result.samples)
        return self._progress(self._result.samples + self.meter.num_processed - self._result.cut)

    def _progress(self, samples: int) -> Progress:
        extent = self._parts.extent
        return Progress(samples=samples, total_samples=extent.total_samples, batch_size=extent.batch_size)

    @property
    def has_newer_steps(self) -> bool:
        """True if batches were trained since the round was entered."""
        return self.local_step != self.entered.local_step

    def take_lease(self, lease: LeasedPart) -> None:
        """Fetches the samples of one more slice of an epoch."""
        self.loader.plan()
        self.loader.add(lease)
        self._leased[lease.epoch] += lease.size

    def join_generation(self, act: JoinGeneration) -> None:
        """Begins to connect to the generation's other ranks, on a thread; training goes on meanwhile."""
        self.generations.build(act)

    def finish_build(self, generation: int) -> str:
        """Waits until all processes of the rank are connected, or one has failed; returns why it has, or ""."""
        problems = self.replica_group.exchange(self.generations.finish(generation))
        problem = next(filter(None, problems), "")
        if problem:
            self.generations.forget(generation)
        return str(problem)

    def end_collective(self) -> None:
        """Aborts a collective that waits for other ranks; `apply_result` then returns or raises the round's outcome.

        Raises `OperationStuck` if the collective does not return within `STUCK_S`.
        """
        if not self.averaging.abort(STUCK_S):
            faulthandler.dump_traceback(2)  # the stacks, to the rank's log
            raise OperationStuck(
                f"round {self.entered.round} was aborted, and its collective has not returned within {STUCK_S:.0f} s: "
                "this rank exits"
            )

    def leave(self) -> None:
        """Stops fetching, and aborts a collective that still waits for other ranks."""
        self.loader.stop()
        self.averaging.abort(ABORT_PATIENCE_S)

    def rehearse(self, *, warms_up: bool) -> None:
        """Checks that checkpoints and the trained model can be written and read. Where ranks share evaluations,
        evaluates a batch and drops the outcome (protocol P12.10). With `warms_up`, also trains a batch without effect.
        """
        check_savable(self.model, self.optimizers, self._left_out.names)
        check_state(self.optimizers)
        with self.own_state.on_trial():
            self._rehearse_functions(warms_up=warms_up)

    def _rehearse_functions(self, *, warms_up: bool) -> None:
        if (dataset := self._parts.eval_dataset) is not None:
            with _lost_peers_converted():
                fits, backs_off = self._eval_batch_size, self._parts.backs_off
                rehearse(
                    self._job,
                    self.model,
                    dataset,
                    self.launch.file_name,
                    batch_size=fits,
                    backs_off=backs_off,
                    optimizers=self.optimizers,
                )
            self._reshard()
        elif self._job.evaluate is not None:
            rehearse_modes(self.model, self.launch.file_name)
        if warms_up:
            self.warm_up()

    # Batches

    def warm_up(self) -> None:
        """Trains a batch and drops its effects, before any other rank waits for this one (protocol P19.2)."""
        # Warming up compiles, autotunes and loads kernels, and allocates memory. If a rank did so with its first batch,
        # all others would wait for it in the first round.
        state = capture_rng_state()  # first, since the data set may draw random numbers too
        batch = self.loader.fetch_any(self._parts.extent.dataset_size)
        data = self.loader.transfer.receive(batch.data, None)
        if data is not None:
            with _lost_peers_converted():
                self.replica_group.train(self.step.warm_up, data, batch)
        self._streams.finish_compute()
        restore_rng_state(state)

    def train(self, act: TrainBatch) -> None:
        """Trains the batch that is ready, or this process's part of it. A batch whose data is None is only counted."""
        asked_s = time.perf_counter()
        batch = self.loader.take()
        if self.loader.is_in_step:
            self.meter.add_data_wait((time.perf_counter() - asked_s) * 1000)
        data = self._with_room(lambda: self.loader.transfer.receive(batch.data, batch.event))
        if not self.replica_group.is_leader:  # callbacks may have set the factor on the leader only
            self.rates.factor = act.factor
        if batch.epoch != self.epoch:
            self._begin_epoch(batch.epoch)
        if not self.rates.is_constant:
            self.rates.set(self._progress(act.samples))
        self._leased[batch.epoch] -= batch.size
        if data is None:
            self.meter.skip_batch(batch.epoch, batch.size)
            self.audit.batch(batch, step=self.local_step, is_skipped=True)
            return
        self.timer.start()
        started_s = time.perf_counter()
        with _lost_peers_converted(), self._own_counts.batch():
            loss, scalars = self.replica_group.train(self.step.run, data, batch)
        if self._slowdown.is_on and self.replica_group.is_leader:
            self._slow_down(started_s)
        self.timer.stop()
        self.meter.add_batch(batch.epoch, batch.size, loss, scalars, batch.own_size / batch.size)
        self.audit.batch(batch, step=self.local_step, is_skipped=False)
        self._norm.note_batch(self.local_step - self.entered.local_step)
        if self.local_step - self.meter.num_skipped == 1:  # the first step has made the optimizers' state
            check_state(self.optimizers)
        times_ms = self.timer.take()
        if self.replica_group.is_leader:  # the others report to nobody
            self.meter.add_times(times_ms)

    def _with_room(self, run: Callable[[], T]) -> T:
        """Calls `run`; if memory runs out, once more when the batches that wait on the device have left it. Not in a
        replica group, whose processes make equally many calls of collectives.
        """
        try:
            return run()
        except Exception as error:
            if self.replica_group.size > 1 or not is_out_of_memory(error) or not self.loader.make_room():
                raise
        # Outside the handler: there the error's traceback still holds tensors on the device.
        kind_of(self.device).empty_cache()
        return run()

    def _begin_epoch(self, epoch: int) -> None:
        """Calls `epoch_fn` for each epoch since the last one that this process has begun. Epochs without a batch for
        this process count too: the function's changes in them, such as unfreezing layers, would otherwise be missing
        here.
        """
        if epoch <= self._begun_epoch:  # leases of two epochs may alternate at an epoch's end
            self.epoch = epoch
            return
        had = self.rates.to_json()
        self.averaging.order_change()  # the callback may change parameters
        for begun in range(self._begun_epoch + 1 if self._begun_epoch >= 0 else epoch, epoch + 1):
            self.epoch = self._begun_epoch = begun
            self._call_epoch_fn(begun, had)
        self.layout.check()
        self.replica_group.share_learning_rates(self.rates)

    def _call_epoch_fn(self, epoch: int, had: dict[str, Any]) -> None:
        """Calls `epoch_fn`. `had` has the learning rates from before the call. If these come from a checkpoint, or from
        the source of a round, for which the function was called for this epoch already, they are restored afterwards: a
        function that multiplies rates must take effect once.
        """
        self.callbacks.call(self._job.epoch_fn, self.view, epoch, on_every_rank=True)
        if epoch <= self.rates.epoch:
            self.rates.restore(had)
        self.rates.epoch = max(self.rates.epoch, epoch)

    def _slow_down(self, started_s: float) -> None:
        """Simulates a slower device: the batch takes `slow_factor` times as long."""
        self._streams.finish_compute()
        self._slowdown.sleep(time.perf_counter() - started_s)

    # Rounds

    def enter_round(self, act: EnterRound) -> EnteredRound:
        """Takes the snapshot and starts averaging, in the generation that the row names."""
        is_new_group = self._use_generation(act.row.generation)
        # If no leased samples of an epoch are left here, this round may complete it, and its result may be evaluated.
        ends_leases = any(not self._leased[epoch] for epoch in self.meter.work.epochs)
        # `finish_copy`: the last round's checkpoint may still be copied out of the flat buffers that this round fills.
        self._reshard()
        self.checkpoints.capture.finish_copy()
        self.replica_group.share_buffers(self.layout)
        at_entry = self.checkpoints.capture.capture_at_entry() if act.may_be_checkpoint else None
        row = replace(act.row, layout_hash=self.layout.hash)
        # Written before the collective: if this rank is killed in it, the others may have its values all the same.
        self.audit.entered(row)
        group = self.generations.standing(row.generation)
        self.averaging.place = self._round_memory.place(group, self.local_step)
        self.averaging.start(
            group,
            row,
            keeps_snapshot=self._job.overlaps,
            # Only a rank that is alone looks at this: these are the results that may be asked for later (P4.10).
            keeps_result=act.may_be_checkpoint or act.keeps_result or is_new_group or ends_leases,
            state=self._join_state.give(),
        )
        self._has_result = False
        self.entered = EnteredRound(
            row.round, self.local_step, self.meter.num_processed, self.meter.take_work(), at_entry
        )
        return self.entered

    def _use_generation(self, generation: int) -> bool:
        """Uses a generation's group; returns True if it was not in use before."""
        act = self.generations.use(generation)
        if act is not None:
            self._join_state.begin_generation()
            self.rates.scale = 1 + self._job.lr_scale_ratio * (act.world_size - 1)
            self.checkpoints.writer.num_ranks = act.world_size
            self.audit.joined(act)
        return act is not None

    def row(self, round_id: int, generation: int) -> Row:
        """This rank's row of a round's header."""
        return Row(
            attempt=self.generations.standing(generation).attempt,
            generation=generation,
            round=round_id,
            layout_hash=self.layout.hash,
            weight=self.meter.work.weight,
            finite=1,  # set by `averaging` once the values are checked
            cut=self.meter.num_processed,
            local_step=self.meter.local_step,
            compute_us=round(self.meter.work.compute_ms * 1000),
            version=self.version,
            samples=self._result.samples,
        )

    def apply_result(self) -> AppliedResult:
        """Puts the round's result into the model.

        Raises `RoundAborted` or `CollectiveFailed` when there is none; its work then goes into the next round.
        """
        self._reshard()
        try:
            averaged = self.averaging.complete(has_newer_steps=self.has_newer_steps)
        except (RoundAborted, CollectiveFailed):
            self.meter.put_back(self.entered.work)
            if (group := self.generations.in_use) is not None:
                has_header = self.averaging.reduction.has_header
                self.audit.lost(generation=group.generation, round_id=self.entered.round, has_header=has_header)
            raise
        self.version = averaged.version
        self._join_state.take(averaged.state)
        self._result = ResultExtent(self.entered.local_step, self.entered.cut, averaged.samples)
        self._has_result = True
        # a single time may be due to a bad batch
        if not averaged.is_finite or (averaged.is_discarded and self._was_discarded):
            self._forget_moments()
        self._was_discarded = averaged.is_discarded
        self._left_out.check(row.frozen for row in averaged.rows)
        digest = self._digests.digest(self.entered.round, self._digest) if len(averaged.rows) > 1 else None
        averaged, digest = self.replica_group.combine(averaged, digest, self.entered.work, self._norm.value)
        self.audit.received(averaged, round_id=self.entered.round, digest=digest)
        self._show_result(has_work=any(row.weight for row in averaged.rows))
        self.averaging.take_own()
        if self.loader.transfer.room is None:  # free memory may not be measured yet
            self.loader.plan()
        return AppliedResult(averaged, digest)

    def _show_result(self, *, has_work: bool) -> None:
        """Captures the result for a checkpoint, and calls `after_round` if any rank's work is in it."""
        at_entry = self.entered.state
        if self._job.after_round is not None or (at_entry is not None and self._job.optimizer_state != "local"):
            with self._result_in_model():
                if at_entry is not None:
                    self.checkpoints.capture.recapture_moments(at_entry)
                if has_work:
                    self._call_after_round()
        if at_entry is not None:
            if self.replica_group.is_leader:
                self.checkpoints.writer.wait_for_room(self._is_over)
            self.checkpoints.capture_result(self.entered.round, at_entry)

    def _call_after_round(self) -> None:
        """Calls `after_round`. Its changes to the model are applied to the result too; newer steps are kept."""
        if self._job.after_round is None:
            return
        self.checkpoints.capture.finish_copy()
        self.averaging.take_own()  # before the callback, whose changes stay
        before = self.layout.copied_tensors() if self.has_newer_steps else None
        self._is_after_round = True
        self.callbacks.call(self._job.after_round, self.model, self.version, on_every_rank=True)
        self._is_after_round = False
        self._reshard()
        self.layout.take_changes(before)

    def _forget_moments(self) -> None:
        """Clears the optimizer's state, unless rounds average it. Called after this rank's parameters were not finite,
        or were left out twice in a row, since the state is then probably wrong too. Otherwise it stays: without it the
        next steps are worse.
        """
        if self._job.optimizer_state == "local":
            for optimizer in self.optimizers:
                optimizer.state.clear()

    def _digest(self) -> int:
        """Digest of the values that must be equal on all ranks: the parameters or, if rounds overlap, the result."""
        return self.layout.result_digest() if self._job.overlaps and self.layout.has_result else self.layout.digest()

    def _reshard(self) -> None:
        """Frees parameters that the last forward pass has gathered, so that the model consists of its shards again."""
        if self._parts.built.sharded is not None:
            self._parts.built.sharded.reshard()

    # Committed rounds

    def resolve_checkpoint(self, act: ResolveCheckpoint, write: rank_pb2.WriteCheckpoint | None = None) -> None:
        """Writes the checkpoint captured of the round, or discards it. Only the leader has `write`."""
        if act.is_written:
            self._reshard()
        self.checkpoints.resolve(act, write, self._round_held)

    def use_result(
        self,
        act: UseResult,
        write: rank_pb2.WriteCheckpoint | None = None,
        on_evaluated: Callable[[Evaluated], None] | None = None,
    ) -> None:
        """Evaluates, saves or passes to callbacks the round's result, which the flat buffers hold until the next round.
        Calls `on_evaluated` with the outcome of an evaluation.
        """
        self._reshard()
        self.audit.used(act)
        self.averaging.order_change()
        if act.calls_back:
            self.checkpoints.capture_late(act.round, self._round_held)
        with self._result_in_model(), self.loader.still():
            if act.evaluates:
                done = self._evaluate(act)
                if on_evaluated is not None:
                    on_evaluated(done)
            if act.calls_back:
                self.callbacks.call(self._job.checkpoint_fn, act.version, self.model)
                # Written after the callback: the job may end once its checkpoint is written.
                self.resolve_checkpoint(ResolveCheckpoint(act.round, act.version, is_written=True), write)
            if act.saves_final:
                self._save_final()

    @property
    def _round_held(self) -> int:
        """The round entered last, if its result is in the flat buffers or the model; else 0."""
        is_in_model = self.local_step == self._result.local_step
        return self.entered.round if is_in_model or self.layout.has_result else 0

    def keep_result(self) -> None:
        """Leaves the model with the last round's result, without newer steps. Nothing may follow but looking at it."""
        if self.has_newer_steps and self._has_result and self.layout.has_result:
            self.layout.swap()

    def leave_draft(self) -> tuple[int, str]:
        """Writes the result of the round entered last as a draft of a checkpoint, unless another rank of this host
        does. Returns the round and the draft's folder; (0, "") without a draft. Raises the storage's errors.
        """
        held = self._round_held if self._has_result else 0
        group, target = self.generations.in_use, self.checkpoints.writer.target
        # A job's own state is what its epoch callbacks have made of it, and only the lowest rank's are called.
        is_mine = not self.own_state.objects or self.launch.rank == 0
        if not held or group is None or not is_mine or self.replica_group.size > 1 or not target.is_local:
            return 0, ""
        if not claim(Path(self.launch.output_dir), self.launch.job_id, group.attempt, held):
            return 0, ""
        return held, str(self.checkpoints.write_draft(held))

    @contextmanager
    def _result_in_model(self) -> Iterator[None]:
        """Context in which the model has the round's result instead of newer steps. A rank that is alone may not have
        kept the result, since it could not know that it would be needed (protocol P12.3): the newer steps then stay.
        """
        has_newer_steps = self.local_step != self._result.local_step and self.layout.has_result
        # `swap` waits for the copy: else this rank's newer steps would get into the checkpoint.
        if has_newer_steps:
            self.checkpoints.capture.finish_copy()
            self.layout.swap()
        # No `finally`: an error in here ends the rank, whose model nobody reads any more.
        yield
        self._reshard()
        if has_newer_steps:
            self.layout.swap()

    def _evaluate(self, act: UseResult) -> Evaluated:
        job, file_name, dataset = self._job, self.launch.file_name, self._parts.eval_dataset
        fits = self._eval_batch_size
        with _lost_peers_converted(), self._mean_in_model(), self.seen_in(act.epoch):
            if not act.size:
                return self._with_room(lambda: evaluate(job, self.model, file_name, optimizers=self.optimizers))
            part = (job, self.model, dataset, act.offset, act.size, file_name)
            return self._with_room(lambda: evaluate_part(*part, batch_size=fits, optimizers=self.optimizers))

    @contextmanager
    def seen_in(self, epoch: int) -> Iterator[None]:
        """Context in which functions of the job see this as the rank's epoch: that of an evaluation. The rank may have
        trained batches of the next one, or none since it was started.
        """
        trained, self.epoch = self.epoch, epoch
        try:
            yield
        finally:
            self.epoch = trained

    @property
    def _eval_batch_size(self) -> int:
        """Samples per evaluation batch: as many as go through the model at once in training."""
        return max(1, self._parts.batch_size // self.step.num_parts)

    def _mean_in_model(self) -> AbstractContextManager[None]:
        """Context in which the model has the moving average of the weights, if the job has one."""
        return mean_in_model(self.layout, self.averaging.reduction.mean())

    def _save_final(self) -> None:
        self._reshard()
        with self._mean_in_model(), evaluated_weights(self.optimizers):
            weights = weights_of(self.model, is_kept=self.replica_group.is_leader, without=self._left_out.names)
        if self.replica_group.is_leader:
            _save_patiently(weights, self.launch.model_path, self._left_out.digest)


def _save_patiently(weights: Mapping[str, torch.Tensor], path: Path, frozen: str) -> None:
    """Writes the final model. A full disk, or what else keeps it from being written, has `SAVE_S` to pass, since
    nobody can get a training back that ends without its model. Raises `JobFailed` then.
    """
    began_s, has_warned = time.monotonic(), False
    while True:
        try:
            save_weights(weights, path, frozen)
            return
        except OSError as error:
            problem = f"the final model cannot be written to {path}: {error.strerror or error}"
            if time.monotonic() - began_s > SAVE_S:
                raise JobFailed(problem) from error
            if not has_warned:
                has_warned = True
                print(f"elche: {problem}; this is tried again for {SAVE_S / 60:g} minutes", flush=True)
                record_event(f"tried again for {SAVE_S / 60:g} minutes: {problem}")
        time.sleep(AGAIN_S)


@contextmanager
def _lost_peers_converted() -> Iterator[None]:
    """Wraps user code that may use collectives, of a sharded model or its own. Raises `CollectiveFailed` for errors
    that show a lost peer, on which the job goes on; other errors fail the job.
    """
    try:
        yield
    except RuntimeError as error:
        if fault_of(error) is Cause.PEER:
            raise CollectiveFailed(f"a collective of the job's own has failed: {error}") from error
        raise


def _averaging_options(job: JobDefinition, parts: Parts) -> AveragingOptions:
    outer: Any = job.outer_optimizer
    return AveragingOptions(
        weighting=job.weighting,
        merge=merge_of(job, parts.built, parts.extent),
        nonfinite=job.nonfinite,
        outliers=job.outliers,
        compress=job.compress,
        outer=outer,
        decay=decay_of(job.ema, parts.extent.batch_size),
        overlaps=job.overlaps,
    )


def _place(launch: Launch, job: JobDefinition, layout: Layout) -> tuple[CheckpointTarget, About]:
    """Returns the place of the job's checkpoints, and the job's fields of their manifests."""
    root = job.checkpoint_dir or str(Path(launch.output_dir) / "checkpoints")
    about = About(
        job=launch.job_id,
        file_name=launch.file_name,
        source=launch.source,
        settings=launch.settings,
        tensors=layout.model_tensors,
    )
    return CheckpointTarget(f"{root.rstrip('/')}/{launch.job_id}"), about
