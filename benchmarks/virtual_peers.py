"""What others do with unequal devices, on the same virtual clock as `virtual_ranks`: every step and wait is said here.

`ddp`       gradients of equal batches are averaged after each (PyTorch DDP)
`uneven`    the same with batches in proportion to the devices' speeds, which somebody has measured
`local`     local SGD with steps in proportion to speed, tuned by hand; plain average
`diloco`    equal numbers of steps, then outer Nesterov(0.7, 0.9) (DiLoCo's settings)

A step that a job makes itself (`manual_optimization`) is made, in data parallelism, with the batches of all devices as
one. Buffers are the first device's in data parallelism, as in DDP; in local SGD statistics are averaged.
"""

from collections import defaultdict
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import torch
from torch.nn.utils import parameters_to_vector
from torch.utils.data import TensorDataset
from virtual_ranks import FAST_MS, SYNC_MS, InShards, ModelParts, Point, copy_flat

from elche_worker import Progress, TrainingJob
from elche_worker.data.dataset import Shuffled
from elche_worker.device.rng import seed_all
from elche_worker.model.step import Built
from elche_worker.outer import Average, Nesterov, OuterOptimizer

KINDS = ("ddp", "uneven", "local", "diloco")
ROUND_STEPS = 23
"""Of the fast device, in a round of `local`; of each, in one of `diloco`."""


class Samples:
    """Batches of the job's samples, one after the other, to whichever device asks; of shards, each device reads its
    own, and takes the next one at its end.
    """

    def __init__(self, job: TrainingJob, seed: int) -> None:
        dataset = job.dataset()
        assert isinstance(dataset, TensorDataset)
        self._tensors = dataset.tensors
        self._order = Shuffled(len(dataset), seed)
        self._indices: list[int] = []
        """Of the epoch, in order."""
        self.epoch_size = len(dataset)
        self.total = len(dataset) * job.epochs
        self.taken = 0
        self._shards = Shards(dataset.sizes, job.epochs, seed) if isinstance(dataset, InShards) else None

    def take(self, size: int, device: int = 0) -> list[torch.Tensor]:
        """At most `size` samples; none past an epoch's or a shard's end."""
        if self._shards is not None:
            indices = self._shards.take(size, device)
        else:
            epoch, offset = divmod(self.taken, self.epoch_size)
            if offset == 0:
                self._indices = self._order.indices(epoch, 0, self.epoch_size)
            indices = self._indices[offset : offset + size]
        self.taken += len(indices)
        return [one[indices] for one in self._tensors]


class Shards:
    """The samples of shards that devices read in order; shards are shuffled in every epoch."""

    def __init__(self, sizes: tuple[int, ...], num_epochs: int, seed: int) -> None:
        starts = [0, *accumulate(sizes)]
        self._left = [
            range(starts[one], starts[one + 1])
            for epoch in range(num_epochs)
            for one in Shuffled(len(sizes), seed).indices(epoch, 0, len(sizes))
        ]
        self._open: defaultdict[int, range] = defaultdict(lambda: range(0))

    def take(self, size: int, device: int) -> list[int]:
        """Of the device's shard; none where no other is left."""
        if not self._open[device] and self._left:
            self._open[device] = self._left.pop(0)
        indices, self._open[device] = self._open[device][:size], self._open[device][size:]
        return list(indices)


class Device:
    """A model with its optimizer."""

    def __init__(self, job: TrainingJob, seed: int, rank: int) -> None:
        self.job = job
        seed_all(seed)
        self.model = job.model()
        self.parts = ModelParts(self.model, job.buffers)
        self._built = Built(self.model, job.optimizer(self.model))
        self.optimizers = self._built.all_optimizers
        self.groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        self.base = [group["lr"] for group in self.groups]
        seed_all(seed + rank)
        self.rng = torch.get_rng_state()

    def backward(self, batch: list[torch.Tensor], share: float = 1.0) -> None:
        self.model.train()
        with torch.random.fork_rng():
            torch.set_rng_state(self.rng)
            loss = self.job.train_step(self.model, batch)
            assert isinstance(loss, torch.Tensor)
            (share * loss).backward()
            self.rng = torch.get_rng_state()

    def step(self, factor: float) -> None:
        self._set_rates(factor)
        if self.job.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.parts.trained, self.job.max_grad_norm)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def _set_rates(self, factor: float) -> None:
        for group, base in zip(self.groups, self.base, strict=True):
            group["lr"] = base * factor

    def train(self, batches: list[list[torch.Tensor]], factor: float) -> None:
        """One step with the batches of as many devices."""
        if self.job.manual_optimization:
            self._set_rates(factor)
            self.model.train()
            with torch.random.fork_rng():
                torch.set_rng_state(self.rng)
                self.job.train_step(
                    self.model, [torch.cat(parts) for parts in zip(*batches, strict=True)], self._built.optimizers
                )
                self.rng = torch.get_rng_state()
            return
        total = sum(len(batch[0]) for batch in batches)
        before = self._state()
        for number, batch in enumerate(batches):
            self.backward(batch, len(batch[0]) / total)
            if not number:
                after = self._state()
            if len(batches) > 1:
                self._set_state(before)
        if len(batches) > 1:
            self._set_state(after)
        self.step(factor)

    def _state(self) -> list[torch.Tensor]:
        return [*(one.clone() for one in self.parts.statistics), *self.parts.copies()]

    def _set_state(self, state: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for one, value in zip(self.parts.statistics, state, strict=False):
                one.copy_(value)
        self.parts.take(state[len(self.parts.statistics) :], with_own=True)

    @property
    def values(self) -> torch.Tensor:
        statistics = [one.reshape(-1) for one in self.parts.statistics]
        return torch.cat([parameters_to_vector(self.parts.trained).detach(), *statistics])

    def set(self, values: torch.Tensor) -> None:
        self.parts.set_trained(values[: self.parts.num_trained])
        copy_flat(self.parts.statistics, values[self.parts.num_trained :])


def data_parallel(job: TrainingJob, samples: Samples, speeds: list[float], seed: int, *, uneven: bool) -> Iterator[Any]:
    """(model, virtual seconds so far) after each step."""
    device, at_ms = Device(job, seed, 0), 0.0
    rates = [1 / speed for speed in speeds]
    size = job.batch_size
    assert isinstance(size, int)
    sizes = (
        [max(1, round(size * len(speeds) * rate / sum(rates))) for rate in rates] if uneven else [size] * len(speeds)
    )
    while samples.taken < samples.total:
        now = samples.taken
        taken = [samples.take(one, at) if samples.taken < samples.total else [] for at, one in enumerate(sizes)]
        batches = [batch for batch in taken if batch and len(batch[0])]
        device.train(batches, factor(job, now, samples.total))
        at_ms += max(one / size * FAST_MS * speed for one, speed in zip(sizes, speeds, strict=True)) + SYNC_MS
        yield device.model, at_ms / 1000


def rounds(
    job: TrainingJob, samples: Samples, speeds: list[float], seed: int, *, equal: bool, outer: OuterOptimizer, most: int
) -> Iterator[Any]:
    """(model, virtual seconds so far) after each round."""
    devices = [Device(job, seed, rank) for rank in range(len(speeds))]
    steps = [most if equal else max(1, round(most / speed)) for speed in speeds]
    last, at_ms, number = devices[0].values.clone(), 0.0, 0
    moments = [torch.zeros_like(last) for _ in range(outer.num_moments())]
    size = job.batch_size
    assert isinstance(size, int)
    while samples.taken < samples.total:
        made = [0] * len(devices)
        for step in range(max(steps)):
            for at, device in enumerate(devices):
                if (
                    step * steps[at] // max(steps) == (step + 1) * steps[at] // max(steps)
                    or samples.taken >= samples.total
                ):
                    continue
                now = samples.taken
                batch = samples.take(size, at)
                if len(batch[0]):
                    device.train([batch], factor(job, now, samples.total))
                    made[at] += len(batch[0])
        average = sum(count / sum(made) * one.values for count, one in zip(made, devices, strict=True))
        number += 1
        outer.step(last, average, moments, number)
        last = average.clone()
        sent = devices[0].parts.copies()
        for device in devices:
            device.set(average)
            device.parts.take(sent, with_own=False)
        at_ms += max(one * FAST_MS * speed for one, speed in zip(steps, speeds, strict=True)) + SYNC_MS
        yield devices[0].model, at_ms / 1000


def factor(job: TrainingJob, samples: int, total: int) -> float:
    if job.schedule is None:
        return 1.0
    assert isinstance(job.batch_size, int)
    return job.schedule(Progress(samples=samples, total_samples=total, batch_size=job.batch_size))


def train(job: TrainingJob, peer: str, speeds: list[float], *, seed: int, num_points: int = 10) -> list[Point]:
    """One run; the results on the way, the last one last."""
    samples = Samples(job, seed)
    kind, _, number = peer.partition(":")  # such as "local:46"
    most = int(number or ROUND_STEPS)
    ways = {
        "ddp": lambda: data_parallel(job, samples, speeds, seed, uneven=False),
        "uneven": lambda: data_parallel(job, samples, speeds, seed, uneven=True),
        "local": lambda: rounds(job, samples, speeds, seed, equal=False, outer=Average(), most=most),
        "diloco": lambda: rounds(job, samples, speeds, seed, equal=True, outer=Nesterov(), most=most),
    }
    points: list[Point] = []
    assert job.evaluate is not None
    for model, at_s in ways[kind]():
        if samples.taken >= samples.total or samples.taken * num_points >= (len(points) + 1) * samples.total:
            model.eval()
            with torch.no_grad():
                points.append(Point(at_s, samples.taken, dict(job.evaluate(model))))
    return points
