"""Trains a job on one device, without a coordinator: the same file, the same order of samples, no rounds."""

import threading
from collections.abc import Callable, Iterator

import torch

from elche_worker.devices import choose_devices
from elche_worker.job import TrainingJob
from elche_worker.loading import build_dataset
from elche_worker.rank.feed import Batch, Feed, Lease
from elche_worker.rank.transfer import to_device
from elche_worker.state import TrainedState
from elche_worker.step import LearningRates, TrainStep, build_model, evaluate

FILE = "the job"


def train_alone(
    job: TrainingJob, *, device: str = "auto", on_epoch: Callable[[int, dict[str, float]], None] | None = None
) -> TrainedState:
    """Trains all epochs; calls `on_epoch(epoch, metrics)` with the evaluation after each. Raises `InvalidJob`."""
    target = torch.device(choose_devices(device, 1)[0].device)
    dataset, dataset_size = build_dataset(job, FILE)
    model, optimizer = build_model(job, target, FILE)
    kept_size = dataset_size - dataset_size % job.batch_size if job.drop_last else dataset_size
    wake = threading.Event()
    feed = Feed(
        dataset,
        dataset_size=dataset_size,
        batch_size=job.batch_size,
        seed=job.seed,
        collate_fn=job.collate_fn,
        wake=wake.set,
        num_workers=job.num_workers,
    )
    step = TrainStep(job, model, optimizer, target, FILE)
    rates = LearningRates(optimizer, [group["lr"] for group in optimizer.param_groups], job.schedule, 1.0)
    try:
        position = 0
        model.train()
        for epoch in range(job.epochs):
            feed.add(Lease(id=epoch + 1, epoch=epoch, offset=0, size=kept_size))
            for batch in _batches(feed, wake, kept_size):
                rates.set(position)
                position += 1
                step.run(to_device(batch.data, target), batch.size)
            metrics = evaluate(job, model, FILE) if job.evaluate else {}
            if on_epoch:
                on_epoch(epoch, metrics)
    finally:
        feed.stop()
    return TrainedState.of(model)


def _batches(feed: Feed, wake: threading.Event, num_samples: int) -> Iterator[Batch]:
    """Batches as they become ready, until they make `num_samples`."""
    while num_samples > 0:
        wake.wait()
        wake.clear()
        while feed.is_ready:
            batch = feed.take()
            num_samples -= batch.size
            yield batch
