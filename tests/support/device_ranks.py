"""A rank's own parts on the simulated device, as its process builds them, without the loop that says when."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elche.v1 import rank_pb2
from elche_worker import TrainingJob
from elche_worker.collectives.operations import Collectives, SoloCollectives
from elche_worker.data.lease_loader import LeasedPart
from elche_worker.device.streams import CudaStreams
from elche_worker.rank.acts import EnterRound, ResolveCheckpoint, TrainBatch, UseResult
from elche_worker.rank.main import build
from elche_worker.rank.replica import Replica
from elche_worker.rank.replica_group import ReplicaGroup
from elche_worker.session.launch import Launch
from support.simulated_cuda import CPU, CUDA

BATCH_SIZE = 4


class Pair(SoloCollectives):
    """Stands for NCCL, which is not here, with two ranks alike: collectives go to the stream that is current."""

    size = 2

    def all_gather(self, row: torch.Tensor) -> list[torch.Tensor]:
        row = row.to(self.device)
        return [row, row.clone()]

    def all_to_all(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.clone()

    def all_reduce(self, tensor: torch.Tensor) -> None:
        tensor.mul_(2)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        tensor.add_(0)


def on_device() -> Collectives:
    return Pair(attempt=1, generation=1, device=CUDA)


def on_host() -> Collectives:
    """Stands for gloo, with two ranks alike."""
    return Pair(attempt=1, generation=1, device=CPU)


def alone() -> Collectives:
    return SoloCollectives(attempt=1, generation=1, device=CUDA)


class Samples:
    """Fetched one by one, so that they are not kept on the device."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((3,), float(index)), torch.tensor([float(index % 2)])


def model() -> nn.Module:
    frozen = nn.Linear(4, 4).requires_grad_(False)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), frozen, nn.Linear(4, 1))


def train_step(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return nn.functional.mse_loss(model(x), y)


def evaluate(model: nn.Module) -> dict[str, float]:
    return {"size": float(sum(one.detach().abs().sum() for one in model.parameters()))}


JOB = TrainingJob(
    model=model,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
    dataset=Samples,
    train_step=train_step,
    evaluate=evaluate,
    batch_size=BATCH_SIZE,
    epochs=4,
)


class Rank:
    """One rank's parts, as its process builds them, without the loop that says when."""

    def __init__(self, folder: Path, group: Collectives, **changes: Any) -> None:
        job = replace(JOB, **changes)
        launch = Launch(
            coordinator="127.0.0.1:1", secret="", job_id="job", rank=group.position, device=str(CUDA), label="",
            source="", file_name="train.py", output_dir=str(folder),
        )  # fmt: skip
        self._changed = threading.Condition()
        self.streams = CudaStreams(CUDA)
        self.said: list[rank_pb2.ConverseRequest] = []
        with self.streams.compute():
            parts, self._accumulators = build(
                launch, job, ReplicaGroup(), wake=self._wake, timeline=None, streams=self.streams
            )
            self.replica = Replica(
                launch, job, parts, channel=None, streams=self.streams, wake=self._wake, send=self.said.append  # type: ignore[arg-type]
            )  # fmt: skip
        self.replica.generations.in_use = group
        self.replica.model.train()
        self._num_rounds = self._num_leases = 0

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def lease(self, num_batches: int) -> None:
        size, self._num_leases = num_batches * BATCH_SIZE, self._num_leases + 1
        offset = (self._num_leases * size) % 200
        self.replica.take_lease(LeasedPart(id=self._num_leases, epoch=0, offset=offset, size=size))

    def train(self, num_batches: int) -> None:
        self.lease(num_batches)
        for _ in range(num_batches):
            with self._changed:
                assert self._changed.wait_for(lambda: self.replica.loader.is_ready, timeout=400)
            self.replica.train(TrainBatch(0, 1.0))

    def enter(self, *, may_be_checkpoint: bool = False) -> None:
        self._num_rounds += 1
        self.replica.enter_round(EnterRound(self.replica.row(self._num_rounds, 1), may_be_checkpoint=may_be_checkpoint))

    def hold(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.replica.averaging.is_done, timeout=400)
        self.replica.apply_result()

    def round(self, *, meanwhile: int = 0, may_be_checkpoint: bool = False) -> None:
        """Trains two batches, enters, trains on meanwhile, and takes the result in."""
        self.train(2)
        self.enter(may_be_checkpoint=may_be_checkpoint)
        self.train(meanwhile)
        self.hold()

    def look(self, **what: bool) -> None:
        asked = {"evaluates": False, "calls_back": False, "saves_final": False, **what}
        self.replica.use_result(UseResult(round=self._num_rounds, version=1, epoch=0, offset=0, size=0, **asked))

    def write(self) -> None:
        order = rank_pb2.WriteCheckpoint(name=f"v{self._num_rounds}", training="{}")
        self.replica.resolve_checkpoint(ResolveCheckpoint(self._num_rounds, self._num_rounds, is_written=True), order)


@contextmanager
def new_rank(folder: Path, group: Collectives, **changes: Any) -> Iterator[Rank]:
    rank = Rank(folder, group, **changes)
    with rank.streams.compute():
        yield rank
        rank.replica.loader.stop()


GROUPS = {"on the device": on_device, "over gloo": on_host, "alone": alone}
