"""What one process does with its model, or with its part of one: trains, averages, evaluates, keeps and writes it.

The loop of a rank says when. In a replica group each process has a `Replica`, the leader's loop tells the others what
it does with its own (`acts`), and they do the same (`follower`): where a method exchanges something within the group,
all its processes are in it.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import grpc
import torch
import torch.distributed as dist

from elche.extent import Extent
from elche.v1 import rank_pb2
from elche_worker.collectives.averaging import Average, Averaging, AveragingOptions, Row
from elche_worker.collectives.operations import Alone, Group
from elche_worker.collectives.process_group import ProcessGroup
from elche_worker.collectives.relay import Relay
from elche_worker.collectives.store import CoordinatorStore
from elche_worker.data.lease_loader import Feed, Lease
from elche_worker.device.streams import Streams
from elche_worker.model.checkpoint import About, Kept, Loaded, Target, weights_of
from elche_worker.model.layout import CPU, Layout
from elche_worker.model.norms import ParameterNorm, of_parts
from elche_worker.model.state import save_weights
from elche_worker.model.step import Built, TrainStep, evaluate, evaluate_part
from elche_worker.rank.acts import Enter, Join, Look, Settle, TakeLease, Train
from elche_worker.rank.checkpoint_writer import State, Writer
from elche_worker.rank.replica_group import MEMBER_SEED, Members
from elche_worker.rank.view import View
from elche_worker.session.launch import Launch
from elche_worker.telemetry.meter import Meter, RoundWork
from elche_worker.telemetry.timeline import Timeline
from elche_worker.telemetry.timing import new_timer
from elche_worker.user.callbacks import Callbacks, be_this_rank
from elche_worker.user.job import JobDefinition
from elche_worker.user.scalars import Sum
from elche_worker.user.schedule import LearningRates, Progress
from elche_worker.user.strategy import Strategy

ABORT_PATIENCE_S = 0.5
"""How long a rank that leaves waits for the end of a collective that it gives up."""

if TYPE_CHECKING:
    from elche_worker.rank.pieces import Pieces


@dataclass(frozen=True, slots=True)
class Entered:
    """The round that was entered last, and this process's part of it."""

    round: int
    local_step: int
    cut: int
    """Samples that its snapshot contains."""
    is_finite: bool
    work: RoundWork
    state: dict[str, Any] | None = None
    """What a checkpoint needs of the time of the snapshot, when the result may become one."""


@dataclass(frozen=True, slots=True)
class Held:
    """A round's result, which is in the model."""

    averaged: Average
    digest: int | None
    """Of what must be equal on all ranks, where that is looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a rank trains with, built from the user's file."""

    built: Built
    layout: Layout
    dataset: Any
    feed: Feed
    extent: Extent
    members: Members
    pieces: "Pieces | None" = None
    """What writes a divided model."""
    batch_size: int
    """Samples in this rank's batches."""
    backs_off: bool = False
    """Whether a batch goes in more parts when there is no memory for it."""
    eval_dataset: Any = None
    loaded: Loaded | None = None
    """The checkpoint to go on from."""
    timeline: Timeline | None = None
    """Where the rank notes what it does when."""


class Replica:
    """The model, what trains it, and what has become of it. `wake` is called when a batch or a result is there."""

    def __init__(
        self,
        launch: Launch,
        job: JobDefinition,
        parts: Parts,
        *,
        channel: grpc.Channel,
        streams: Streams,
        wake: Callable[[], None],
        tell: Callable[[rank_pb2.ConverseRequest], None],
        is_over: Callable[[], bool] = bool,
    ) -> None:
        """`is_over` says that the rank is to leave, so that nothing is waited for."""
        self._is_over = is_over
        self._streams = streams
        self._launch = launch
        self._job = job
        self._built = parts.built
        self.model = parts.built.model
        self.optimizers = parts.built.all_optimizers
        self.layout = parts.layout
        self.feed = parts.feed
        self._extent = parts.extent
        self._eval_dataset = parts.eval_dataset
        self.members = parts.members
        self._channel = channel
        self.device = torch.device(launch.device)
        self.timer = new_timer(self.device, keeps_intervals=parts.timeline is not None)
        self.meter = Meter(reads_losses=self.device.type == "cpu")
        self._norm = ParameterNorm(parts.layout, self.device)
        self._group_norm: float | None = None
        """Of the whole model, where a replica group has divided it: as of its last round."""
        outer: Any = job.outer_optimizer
        options = AveragingOptions(weighting=job.weighting, nonfinite=job.nonfinite, compress=job.compress, outer=outer)
        self._batch_size = parts.batch_size
        self.step = TrainStep(job, parts.built, self.device, launch.file_name, backs_off=parts.backs_off)
        self.rates = LearningRates(self.optimizers, schedule=job.schedule, scheduler=job.scheduler)
        self.averaging = Averaging(
            parts.layout,
            options,
            wake=wake,
            streams=streams,
            measures_divergence=job.policy != "sync",
            agree=lambda holds: all(self.members.exchange(bool(holds))),
        )
        self.entered = Entered(0, 0, 0, True, RoundWork())
        self.group: Group | None = None
        self.version = 0
        """Version that the model holds; 0 until the first round."""
        self._result_step = 0
        """Batches that the result in the scratch contains."""
        self._base_samples = 0
        """Samples of all ranks in the checkpoint that the job goes on from."""
        self._result_samples = 0
        """Samples of all ranks in the result, and of this rank since its incarnation began."""
        self._result_cut = 0
        self.epoch = -1
        self.callbacks = Callbacks()
        self.view = View(launch.rank, self, self.rates, self.callbacks)
        seed = job.seed + MEMBER_SEED * launch.member
        be_this_rank(self.view)
        self._state = State(
            launch.rank, parts.built, parts.layout, self.step, self.averaging.reduction, self.rates, seed, streams
        )
        self._kept: dict[int, Kept] = {}
        """Round to what its checkpoint needs, until its outcome is told."""
        self.writer = Writer(*_place(launch, job, parts.layout), tell, parts.timeline, parts.pieces)
        if parts.loaded is not None:
            self._resume(parts.loaded)

    def _resume(self, loaded: Loaded) -> None:
        training = loaded.manifest["training"]
        self.version = training["version"]
        self._base_samples = self._result_samples = training["samples"]
        self._state.restore(loaded, torch.device("cpu"), self.version, is_leader=self.members.position == 0)

    @property
    def local_step(self) -> int:
        """Batches trained."""
        return self.meter.local_step

    @property
    def parameter_norm(self) -> float | None:
        """Of the trained parameters, lately; None while it is not known."""
        return self._norm.value if self.members.size == 1 else self._group_norm

    @property
    def progress(self) -> Progress:
        """How far the job is, as far as this rank knows."""
        return self._progress(self._result_samples + self.meter.num_processed - self._result_cut)

    def _progress(self, samples: int) -> Progress:
        return Progress(samples=samples, total_samples=self._extent.total_samples, batch_size=self._extent.batch_size)

    @property
    def has_newer_steps(self) -> bool:
        """Whether batches were trained since the round was entered."""
        return self.local_step != self.entered.local_step

    def take_lease(self, lease: TakeLease) -> None:
        """A slice is to be trained."""
        self.feed.plan()
        self.feed.add(Lease(id=lease.id, epoch=lease.epoch, offset=lease.offset, size=lease.size))

    def join(self, order: Join) -> None:
        """Builds the generation's group: of a divided model, of the processes of equal position in all groups."""
        self.rates.scale = 1 + self._job.lr_scale_ratio * (order.world_size - 1)
        self.writer.num_ranks = order.world_size
        self.group = self._new_group(order)
        self.members.exchange(None)  # the others' stand, too

    def _new_group(self, order: Join) -> Group:
        attempt, generation = order.attempt, order.generation
        if order.world_size == 1 and self._job.backend != "nccl":
            return Alone(
                attempt=attempt, generation=generation, device=self.device if self.device.type == "cuda" else CPU
            )
        position, size = order.position, order.world_size
        secret = self._launch.secret
        if order.backend == "cpu":
            return Relay(self._channel, secret, attempt=attempt, generation=generation, position=position, size=size)
        return ProcessGroup(
            CoordinatorStore(self._channel, secret),
            backend=order.backend,
            attempt=attempt,
            generation=generation,
            position=position,
            size=size,
            peer=self._launch.coordinator,
            device=self.device,
            member=self.members.position,
        )

    def leave(self) -> None:
        """No more batches, and no collective that still waits for others."""
        self.feed.stop()
        if self.group is not None:
            self.averaging.abort(self.group, ABORT_PATIENCE_S)

    # Batches

    def train(self, order: Train) -> None:
        """Trains the batch that is ready, or this process's part of it."""
        batch = self.feed.take()
        data = self.feed.mover.receive(batch.data, batch.event)
        if self.members.position:
            self.rates.factor = order.factor
        if batch.epoch != self.epoch:
            self.epoch = batch.epoch
            self.callbacks.call(self._job.epoch_fn, self.view, batch.epoch, on_every_rank=True)
            if self.members.size > 1:
                self.rates.restore(self.members.exchange(self.rates.to_json())[0])
        if not self.rates.is_constant:
            self.rates.set(self._progress(order.samples))
        self.timer.start()
        started_s = time.perf_counter()
        fraction = batch.own_size / batch.size
        loss, scalars = self._train_part(data, batch.size, batch.own_size)
        if self._launch.slow_factor > 1 and self.members.position == 0:
            self._slow_down(started_s)
        self.timer.stop()
        self.meter.add_batch(batch.epoch, batch.size, loss, scalars, fraction)
        self._norm.note_batch(self.local_step - self.entered.local_step)
        times_ms = self.timer.take()
        if self.members.position == 0:  # the others report to nobody
            self.meter.add_times(times_ms)

    def _train_part(self, data: Any, size: int, own_size: int) -> tuple[torch.Tensor, dict[str, Sum]]:
        """`fully_shard` takes the mean over processes: each counts as much as its part of the batch is large."""
        num_members = self.members.size
        if num_members == 1:
            return self.step.run(data, size)
        weight = num_members * own_size / size
        return self.step.run(data, max(1, own_size), weight=weight, max_parts=max(1, size // num_members))

    def _slow_down(self, started_s: float) -> None:
        """Stands for a slower device: the batch takes `slow_factor` times as long as it did."""
        self._streams.finish_compute()
        time.sleep((time.perf_counter() - started_s) * (self._launch.slow_factor - 1))

    # Rounds

    def enter(self, order: Enter) -> Entered:
        """Takes the snapshot and starts averaging."""
        assert self.group is not None
        self._rest()
        self._state.settle()
        if self.members.size > 1:
            self._share_buffers()
        at_entry = self._state.at_entry() if order.is_kept else None
        row = replace(order.row, layout_hash=self.layout.hash)
        is_finite = self.averaging.start(self.group, row, keeps_snapshot=self._job.overlaps)
        self.entered = Entered(
            order.round, self.local_step, self.meter.num_processed, is_finite, self.meter.take_work(), at_entry
        )
        return self.entered

    def row(self, round_id: int) -> Row:
        """What the rank brings into a round."""
        assert self.group is not None
        return Row(
            attempt=self.group.attempt,
            generation=self.group.generation,
            round=round_id,
            layout_hash=self.layout.hash,
            weight=self.meter.work.weight,
            finite=1,
            cut=self.meter.num_processed,
            local_step=self.meter.local_step,
            compute_us=round(self.meter.work.compute_ms * 1000),
            version=self.version,
        )

    def hold(self) -> Held:
        """Brings the round's result into the model. Raises `RoundAborted` when it is given up: its work belongs to
        the next one then.
        """
        self._rest()
        averaged = self.averaging.complete(has_newer_steps=self.has_newer_steps)
        self.version = averaged.version
        self._result_step, self._result_cut = self.entered.local_step, self.entered.cut
        self._result_samples = self._base_samples + sum(row.cut for row in averaged.rows)
        if not self.entered.is_finite:
            self._forget_moments()
        digest = self._digest() if self._launch.verify_rounds else None
        if self.members.size > 1:
            averaged, digest = self._combine(averaged, digest)
        self._look_at_result()
        if self.feed.mover.room is None:  # perhaps not measured yet
            self.feed.plan()
        return Held(averaged, digest)

    def _combine(self, averaged: Average, digest: int | None) -> tuple[Average, int | None]:
        """What the whole group holds: when one process has this, all have the round's result."""
        part = self.entered.work.part() if self.members.position else []
        told = self.members.exchange([averaged.distance, digest, part, averaged.sent_bytes, self._norm.value])
        distances, digests, parts, sent_bytes, norms = zip(*told, strict=True)
        self._group_norm = of_parts(norms, self._num_copies)
        if self.members.position == 0:
            for one in parts:
                self.entered.work.add_part(one)
        if averaged.distance is not None:
            changed, size = (sum(one[at] ** 2 for one in distances) ** 0.5 for at in (0, 1))
            averaged = replace(averaged, distance=(changed, size))
        if digest is not None:
            digest = sum((2 * at + 1) * one for at, one in enumerate(digests)) % 2**64
        return replace(averaged, sent_bytes=sum(sent_bytes)), digest

    @property
    def _num_copies(self) -> int:
        """Processes of the group that hold the same part of the model."""
        return self.members.size // cast(Strategy, self._job.shard).num_shards(self.members.size)

    def _look_at_result(self) -> None:
        """What is done with the result as it is: kept for a checkpoint, and shown to the job's hook."""
        at_entry = self.entered.state
        if self._job.after_round is not None or (at_entry is not None and self._job.optimizer_state != "local"):
            with self._result_in_model():
                if at_entry is not None:
                    self._state.keep_moments(at_entry)
                self.callbacks.call(self._job.after_round, self.model, self.version, on_every_rank=True)
        if at_entry is not None:
            if self.members.position == 0:
                self.writer.wait_for_room(self._is_over)
            self._kept[self.entered.round] = self._state.keep(at_entry)

    def _forget_moments(self) -> None:
        """Of parameters that were not finite; unless the round has replaced them as well."""
        if self._job.optimizer_state == "local":
            for optimizer in self.optimizers:
                optimizer.state.clear()

    def _digest(self) -> int:
        """Of what must be equal on all ranks: the parameters, or, when they have moved on, the round's result."""
        return self.layout.result_digest() if self._job.overlaps else self.layout.digest()

    def _rest(self) -> None:
        """Frees what the last forward may have left gathered: only then are a process's own rows its model."""
        if self._built.sharded is not None:
            self._built.sharded.reshard()

    @torch.no_grad()
    def _share_buffers(self) -> None:
        """Makes the group's buffers alike: each process has seen other samples. Averages of its members, or, of what
        cannot be averaged, the leader's.
        """
        buffers = [entry for entry in self.layout.entries if not entry.is_trained]
        averaged = [entry.tensor for entry in buffers if entry.kind != "source"]
        if averaged:
            flat = torch.cat([one.reshape(-1).double() for one in averaged])
            dist.all_reduce(flat)
            parts = torch.split(flat.div_(self.members.size), [one.numel() for one in averaged])
            for one, part in zip(averaged, parts, strict=True):
                one.copy_(part.view(one.shape))
        for entry in buffers:
            if entry.kind == "source":
                raw = entry.tensor.contiguous().reshape(-1).view(torch.uint8)
                dist.broadcast(raw, src=0)
                entry.tensor.copy_(raw.view(entry.dtype).view(entry.shape))

    # What is done with a round's result once it is committed

    def settle(self, order: Settle, write: rank_pb2.WriteCheckpoint | None = None) -> None:
        """Writes what was kept of the round, or forgets it. The leader knows what to write."""
        kept = self._kept.pop(order.round, None)
        if order.is_written:
            self._rest()
            kept = kept or self._state.keep(self._state.at_entry())  # not foreseen: moments are a few batches newer
            self.writer.write(order.version, write, kept, self._state)
        elif kept is not None:
            self._state.give_back(kept)

    def look(
        self,
        order: Look,
        write: rank_pb2.WriteCheckpoint | None = None,
        tell: Callable[[dict[str, Sum]], None] | None = None,
    ) -> None:
        """Evaluates, shows or writes the round's result, which the scratch holds until the next round; `tell` is
        called with the evaluation's sums.
        """
        self._rest()
        if order.calls_back and order.round not in self._kept:  # not foreseen; and soon the scratch has something else
            self._kept[order.round] = self._state.keep(self._state.at_entry())
        with self._result_in_model():
            if order.evaluates:
                sums = self._evaluate(order)
                if tell is not None:
                    tell(sums)
            if order.calls_back:
                self.callbacks.call(self._job.checkpoint_fn, order.version, self.model)
                # Only now: the job does not end before its callback has.
                self.settle(Settle(order.round, order.version, is_written=True), write)
            if order.saves_final:
                self._save_final()

    @contextmanager
    def _result_in_model(self) -> Iterator[None]:
        has_newer_steps = self.local_step != self._result_step
        if has_newer_steps:
            self._state.settle()
            self.layout.swap()
        yield
        self._rest()
        if has_newer_steps:
            self.layout.swap()

    def _evaluate(self, order: Look) -> dict[str, Sum]:
        job, file_name = self._job, self._launch.file_name
        if not order.size:
            return evaluate(job, self.model, file_name)
        fits = max(1, self._batch_size // self.step.num_parts)
        return evaluate_part(job, self.model, self._eval_dataset, order.offset, order.size, file_name, batch_size=fits)

    def _save_final(self) -> None:
        self._rest()
        weights = weights_of(self.model, is_kept=self.members.position == 0)
        if self.members.position == 0:
            save_weights(weights, self._launch.model_path)


def _place(launch: Launch, job: JobDefinition, layout: Layout) -> tuple[Target, About]:
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
