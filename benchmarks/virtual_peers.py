"""What others do with unequal devices, on the same virtual clock as `virtual_ranks`: every step and wait is said here.

`ddp`       gradients of equal batches are averaged after each (PyTorch DDP)
`uneven`    the same with batches in proportion to the devices' speeds, which somebody has measured
`local`     local SGD with steps in proportion to speed, tuned by hand; plain average
`diloco`    equal numbers of steps, then outer Nesterov(0.7, 0.9) (DiLoCo's settings)
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import TensorDataset
from virtual_ranks import FAST_MS, SYNC_MS, Point

from elche_worker import Progress, TrainingJob
from elche_worker.data.dataset import Shuffled
from elche_worker.device.rng import seed_all
from elche_worker.model.step import Built
from elche_worker.outer import Average, Nesterov, OuterOptimizer

KINDS = ("ddp", "uneven", "local", "diloco")
ROUND_STEPS = 23
"""Of the fast device, in a round of `local`; of each, in one of `diloco`."""


class Samples:
    """Batches of the job's samples, one after the other, to whichever device asks."""

    def __init__(self, job: TrainingJob, seed: int) -> None:
        dataset = job.dataset()
        assert isinstance(dataset, TensorDataset)
        self._tensors = dataset.tensors
        self._order = Shuffled(len(dataset), seed)
        self.epoch_size = len(dataset)
        self.total = len(dataset) * job.epochs
        self.taken = 0

    def take(self, size: int) -> list[torch.Tensor]:
        """At most `size` samples; none past an epoch's end."""
        epoch, offset = divmod(self.taken, self.epoch_size)
        size = min(size, self.epoch_size - offset)
        self.taken += size
        indices = self._order.indices(epoch, offset, size)
        return [one[indices] for one in self._tensors]


class Device:
    """A model with its optimizer."""

    def __init__(self, job: TrainingJob, seed: int, rank: int) -> None:
        self.job = job
        seed_all(seed)
        self.model = job.model()
        self.optimizers = Built(self.model, job.optimizer(self.model)).all_optimizers
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
        for group, base in zip(self.groups, self.base, strict=True):
            group["lr"] = base * factor
        if self.job.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.job.max_grad_norm)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    @property
    def values(self) -> torch.Tensor:
        return parameters_to_vector(self.model.parameters()).detach()

    def set(self, values: torch.Tensor) -> None:
        vector_to_parameters(values.clone(), self.model.parameters())


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
        batches = [batch for one in sizes if samples.taken < samples.total and len((batch := samples.take(one))[0])]
        total = sum(len(batch[0]) for batch in batches)
        for batch in batches:
            device.backward(batch, len(batch[0]) / total)
        device.step(factor(job, now, samples.total, total))
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
                batch = samples.take(size)
                device.backward(batch)
                device.step(factor(job, now, samples.total, size))
                made[at] += len(batch[0])
        average = sum(count / sum(made) * one.values for count, one in zip(made, devices, strict=True))
        number += 1
        outer.step(last, average, moments, number)
        last = average.clone()
        for device in devices:
            device.set(average)
        at_ms += max(one * FAST_MS * speed for one, speed in zip(steps, speeds, strict=True)) + SYNC_MS
        yield devices[0].model, at_ms / 1000


def factor(job: TrainingJob, samples: int, total: int, size: int) -> float:
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
