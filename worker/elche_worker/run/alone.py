"""Trains a job on one device without a coordinator: the same file, the same order of samples, no rounds."""

import math
import threading
import time
from collections.abc import Callable, Iterator
from itertools import accumulate, count
from typing import Any

import torch
from torch import nn

from elche.errors import InvalidJob, JobFailed
from elche.evaluation import missing_metric, never_finite, note_finite, spoilt_metric
from elche.extent import Extent
from elche.output import notice
from elche.shards import shuffled_shards
from elche_worker.collectives.consistency import not_finite
from elche_worker.data.build import build_dataset, build_eval_dataset, build_order
from elche_worker.data.dataset import Shards
from elche_worker.data.lease_loader import LeasedPart, LeaseLoader, LoadedBatch
from elche_worker.data.prefetch import new_transfer
from elche_worker.data.sample_figures import look_at
from elche_worker.device.discovery import own_device
from elche_worker.device.kinds import kind_of
from elche_worker.device.rng import kept_random, seed_all
from elche_worker.device.streams import DeviceStreams, new_streams, pin_accumulators
from elche_worker.model.batch_size import is_auto, nominal_batch_size, rank_batch_size
from elche_worker.model.evaluation import evaluate, evaluate_part, metrics_of, rehearse, rehearse_modes
from elche_worker.model.layout import Layout
from elche_worker.model.mean import MeanOfModel, decay_of
from elche_worker.model.modes import eval_mode_notice, evaluated_weights
from elche_worker.model.own_state import build_own_state
from elche_worker.model.state import TrainedState
from elche_worker.model.step import Built, TrainStep, build_model
from elche_worker.outer import Average
from elche_worker.rank.view import View
from elche_worker.telemetry.meter import EpochSums
from elche_worker.user.callbacks import Callbacks, EpochMetrics, be_this_rank, this_rank
from elche_worker.user.device import Device
from elche_worker.user.job import JobDefinition
from elche_worker.user.loggers import Loggers
from elche_worker.user.scalars import wide
from elche_worker.user.schedule import LearningRates, Progress

FILE = "the job"
MEASURED_BATCHES = 2
"""Batches after which training's memory use is measured."""


def train_alone(
    job: JobDefinition, *, device: str = "auto", on_epoch: Callable[[int, dict[str, float]], None] | None = None
) -> TrainedState:
    """Trains all epochs; calls `on_epoch(epoch, metrics)` with the evaluation after each. Raises `InvalidJob`, and
    `JobFailed` when a metric that was finite before is not in the last evaluation.

    Returns the state of the best epoch if the job monitors a metric and restores it, else of the last one. Writes no
    checkpoints, for which a job needs a coordinator.
    """
    if job.shard is not None:
        raise InvalidJob(
            f"job.run() is one process, and group_size is {job.group_size}: use `elche run` or job.start(), or replace "
            "group_size by 1 and shard by None"
        )
    _check_has_no_rounds(job)
    chosen = own_device(device)
    target = torch.device(chosen.device)
    kind_of(target).select(target)
    streams = new_streams(target)
    with streams.compute():
        training = _Training(job, chosen, streams)
        try:
            training.rehearse()
            training.run(on_epoch)
        finally:
            training.end()
        return training.result()


def _check_has_no_rounds(job: JobDefinition) -> None:
    """Raises `InvalidJob` for what changes the model in rounds, of which there are none here."""
    is_outer = not isinstance(job.outer_optimizer, Average)
    for name, is_given in ("outer_optimizer", is_outer), ("after_round", job.after_round is not None):
        if is_given:
            raise InvalidJob(
                f"job.run() makes no rounds, so {name} would have no effect, and the model would be another: use "
                f"`elche run` or job.start(), or leave {name} out"
            )


class _Training:
    """A job's model, and what trains it. Callbacks see it as the only rank (`View`)."""

    def __init__(self, job: JobDefinition, chosen: Device, streams: DeviceStreams) -> None:
        target = torch.device(chosen.device)
        dataset, dataset_size = build_dataset(job, FILE)
        self._eval_dataset = build_eval_dataset(job, FILE)
        self._job, self._built = job, build_model(job, target, FILE)
        if text := eval_mode_notice(self._built.model, came_in_eval_mode=self._built.came_in_eval_mode):
            notice(text)
        batch_size = rank_batch_size(job, chosen, dataset_size)
        self._extent = Extent(
            dataset_size=dataset_size,
            batch_size=nominal_batch_size(job, dataset_size),
            epochs=job.epochs,
            drop_last=job.drop_last,
            max_steps=job.max_steps,
        )
        self._shard_sizes = dataset.sizes if isinstance(dataset, Shards) else (dataset_size,)
        self._lease_ids = count(1)
        self._wake = threading.Event()
        self._loader = _new_loader(job, dataset, dataset_size, batch_size, target, streams, self._wake)
        self._accumulators = pin_accumulators(self._built.model)
        self.model, self.optimizers, self.device = self._built.model, self._built.all_optimizers, target
        self.own_state = build_own_state(job, self.model, FILE)
        seed_all(job.seed)  # as rank 0 of a job does
        self._backs_off, room = is_auto(job, chosen), self._loader.make_room
        self._step = TrainStep(job, self._built, target, FILE, backs_off=self._backs_off, make_room=room)
        self._batch_size = batch_size
        self._rates = LearningRates(self.optimizers, schedule=job.schedule, scheduler=job.scheduler)
        if text := self._rates.epochs_notice(self._extent):
            notice(text)
        self._layout = Layout(self.model, self.optimizers, buffers=job.buffers)
        self._mean = MeanOfModel(self._layout, decay_of(job.ema, self._extent.batch_size))
        self._callbacks = Callbacks(kept_random)
        self.epoch, self.local_step, self.version = -1, 0, 0
        self._num_trained = 0
        """Samples trained."""
        # Not an attribute: a circle keeps the model in the memory of its device until Python looks for circles.
        be_this_rank(View(0, self, self._rates, self._callbacks))
        self._loggers = Loggers(job.loggers, f"alone-{time.strftime('%Y%m%d-%H%M%S')}")
        self._watch = _Watch(job)
        self._best: TrainedState | None = None

    @property
    def progress(self) -> Progress:
        """The part of the training that is done."""
        of, size = self._extent.total_samples, self._extent.batch_size
        return Progress(samples=self._num_trained, total_samples=of, batch_size=size)

    @property
    def _eval_batch_size(self) -> int:
        """Samples of an evaluated batch: what fits in memory, by what has fit so far."""
        return self._batch_size // self._step.num_parts or 1

    def rehearse(self) -> None:
        """Evaluates a batch and drops the outcome, so that a job that cannot be evaluated fails before it trains."""
        if self._job.evaluate is not None:
            rehearse_modes(self.model, FILE)
        if self._eval_dataset is None:
            return
        with self.own_state.on_trial():
            rehearse(
                self._job,
                self.model,
                self._eval_dataset,
                FILE,
                batch_size=self._eval_batch_size,
                backs_off=self._backs_off,
                optimizers=self.optimizers,
            )

    def run(self, on_epoch: Callable[[int, dict[str, float]], None] | None) -> None:
        """Trains and evaluates epochs, until the last one or until the job's patience is over."""
        for epoch in range(self._extent.num_epochs):
            started_s = time.perf_counter()
            sums = self._train(epoch)
            duration_s = time.perf_counter() - started_s
            self._layout.check()
            _report_skipped(epoch, sums)
            _check_finite(self._job, self.model, epoch)
            with self._mean.in_model():
                metrics = _evaluated(self._job, self._built, self._eval_dataset, self._eval_batch_size)
            epoch_metrics = _epoch_metrics(epoch, sums, metrics, duration_s)
            self._callbacks.call(self._job.metrics_fn, epoch_metrics)
            self._loggers.log(epoch_metrics)
            if on_epoch:
                on_epoch(epoch, metrics)
            self._watch.judge(metrics, epoch + 1)
            if self._watch.is_best and self._job.restore == "best":
                self._best = self._state()
            if self._watch.is_over:
                break

    def end(self) -> None:
        """Stops the loader and the loggers."""
        self._loader.stop()
        self._loggers.end()

    def result(self) -> TrainedState:
        """The trained state, of the best or the last epoch. Raises `JobFailed`; see `_Watch.end`."""
        self._watch.end()
        return self._best or self._state()

    def _train(self, epoch: int) -> EpochSums:
        self.epoch, sums = epoch, EpochSums()
        self._callbacks.call(self._job.epoch_fn, this_rank(), epoch, on_every_rank=True)
        self._layout.check()
        self._loader.plan()
        for offset, size in _parts_of(epoch, self._extent, self._shard_sizes, self._job.seed):
            self._loader.add(LeasedPart(id=next(self._lease_ids), epoch=epoch, offset=offset, size=size))
        for batch in _batches(self._loader, self._wake, self._extent.epoch_size(epoch)):
            if not self._rates.is_constant:
                self._rates.set(self.progress)
            data = self._loader.transfer.receive(batch.data, batch.event)
            if data is None:
                sums.add(EpochSums(0, batch.size, num_skipped=1))
            else:
                loss, scalars = self._step.run(data, batch.size)
                sums.add(EpochSums(1, batch.size, wide(loss), scalars))
            self._mean.move(batch.size)  # rounds count the samples of skipped batches, too
            self._num_trained += batch.size
            self.local_step += 1
            if self.local_step == MEASURED_BATCHES:
                self._loader.plan()
        return sums

    def _state(self) -> TrainedState:
        with self._mean.in_model(), evaluated_weights(self.optimizers):
            return TrainedState.of(self.model)


def _new_loader(
    job: JobDefinition,
    dataset: Any,
    dataset_size: int,
    batch_size: int,
    target: torch.device,
    streams: DeviceStreams,
    wake: threading.Event,
) -> LeaseLoader:
    loader = LeaseLoader(
        dataset,
        order=build_order(job, dataset, dataset_size, FILE),
        batch_size=batch_size,
        seed=job.seed,
        collate_fn=job.collate_fn,
        wake=wake.set,
        num_workers=job.num_workers,
        pins_memory=target.type == "cuda",
        transfer=new_transfer(target, streams),
        num_parts=job.accumulate,
    )
    if not job.num_workers and look_at(dataset, job.seed, collate_fn=job.collate_fn).is_for_one_thread:
        loader.fetch_in_step()
    return loader


def _report_skipped(epoch: int, sums: EpochSums) -> None:
    """Prints how many batches were skipped. Raises `InvalidJob` if none was trained in the first epoch."""
    if not sums.num_skipped:
        return
    if not sums.num_batches and epoch == 0:
        raise InvalidJob(
            f"{FILE}: nothing was trained in epoch {epoch + 1}: collate_fn or the data set gave None for every batch"
        )
    why = "collate_fn or the data set gave None for them"
    notice(f"skipped {sums.num_skipped} batches in epoch {epoch + 1}: {why}")


def _check_finite(job: JobDefinition, model: nn.Module, epoch: int) -> None:
    """Raises `JobFailed` for a model that is of no use, as a rank of a job fails it."""
    if job.nonfinite == "fail" and (name := not_finite(model)):
        raise JobFailed(
            f"{name} is not finite (NaN or infinity) after epoch {epoch + 1}; lower the learning rate or clip the "
            "gradients"
        )


def _epoch_metrics(epoch: int, sums: EpochSums, metrics: dict[str, float], duration_s: float) -> EpochMetrics:
    return EpochMetrics(
        epoch=epoch,
        loss=float(sums.loss_sum) / max(1, sums.num_batches),
        scalars={name: float(total) / count for name, (total, count) in sorted(sums.scalars.items())},
        metrics=metrics,
        duration_s=duration_s,
        samples=sums.num_samples,
        samples_per_s=sums.num_samples / duration_s,
        rank_batches=(sums.num_batches,),
        rank_samples_per_s=(sums.num_samples / duration_s,),
    )


def _parts_of(epoch: int, extent: Extent, sizes: tuple[int, ...], seed: int) -> Iterator[tuple[int, int]]:
    """Yields the start and size of each part of an epoch: one of all samples, or one per shard in the epoch's order."""
    starts, end = [0, *accumulate(sizes)], extent.epoch_size(epoch)
    for shard in shuffled_shards(sizes, seed=seed, epoch=epoch):
        size = min(sizes[shard], end - starts[shard])
        if size > 0:
            yield starts[shard], size


def _evaluated(job: JobDefinition, built: Built, eval_dataset: Any, batch_size: int) -> dict[str, float]:
    if not job.has_evaluation:
        return {}
    if eval_dataset is None:
        whole = evaluate(job, built.model, FILE, optimizers=built.all_optimizers)
    else:
        part = (job, built.model, eval_dataset, 0, len(eval_dataset), FILE)
        whole = evaluate_part(*part, batch_size=batch_size, optimizers=built.all_optimizers)
    return metrics_of(job, whole, FILE)


class _Watch:
    """Judges evaluations: finds the best by the monitored metric, and metrics that are not finite."""

    def __init__(self, job: JobDefinition) -> None:
        self._job = job
        self._best = math.inf
        self._num_since = 0
        self._metrics: dict[str, float] = {}
        self._last_finite: dict[str, int] = {}
        self.is_best = False
        """True if the last epoch is the best one so far."""

    def judge(self, metrics: dict[str, float], num_epochs: int) -> None:
        """Judges the evaluation after `num_epochs` epochs. Raises `InvalidJob` if it lacks the monitored metric."""
        self._metrics, self._last_finite = metrics, note_finite(metrics, self._last_finite, num_epochs)
        monitor = self._job.monitor
        if monitor is None:
            return
        if monitor not in metrics:
            raise InvalidJob(missing_metric(monitor, metrics))
        value = -metrics[monitor] if self._job.mode == "max" else metrics[monitor]
        self.is_best = math.isfinite(value) and value < self._best
        self._num_since = 0 if self.is_best else self._num_since + 1
        self._best = value if self.is_best else self._best

    def end(self) -> None:
        """Raises `JobFailed` if a metric of the final evaluation is finite no more; warns if one never was."""
        if spoilt := spoilt_metric(self._metrics, self._last_finite, self._job.monitor):
            raise JobFailed(spoilt)
        if odd := never_finite(self._metrics):
            notice(odd)

    @property
    def is_over(self) -> bool:
        """True if the metric has not improved for the job's patience."""
        return self._job.patience is not None and self._num_since >= self._job.patience


def _batches(loader: LeaseLoader, wake: threading.Event, num_samples: int) -> Iterator[LoadedBatch]:
    """Yields batches as they become ready, up to `num_samples` samples."""
    while num_samples > 0:
        if not loader.is_in_step:
            wake.wait()
            # Before it looks: a batch that comes meanwhile sets it again.
            wake.clear()
        while loader.is_ready:
            batch = loader.take()
            num_samples -= batch.size
            yield batch
