"""Ranks without a coordinator: real models, loaders and gloo groups, and the test in their loops' place."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from elche.v1 import rank_pb2
from elche_worker.data.lease_loader import LeasedPart
from elche_worker.device.streams import DeviceStreams
from elche_worker.model.checkpoint import Loaded, load, new_whole
from elche_worker.rank.acts import EnterRound, JoinGeneration, ResolveCheckpoint, TrainBatch
from elche_worker.rank.parts import AppliedResult
from elche_worker.rank.replica import Replica
from elche_worker.user.schedule import Progress
from support.solo import BATCH_SIZE, JOB, launch, parts_of


@dataclass
class Rank:
    """One replica, and what its job's schedule was asked."""

    replica: Replica
    ready: threading.Semaphore
    """Counts the batches that the loader has brought."""
    asked: list[Progress] = field(default_factory=list)
    num_leased: int = 0
    generation: int = 0
    """Which its next round is in."""

    def join(self, generation: int, position: int, size: int, *, attempt: int = 1) -> None:
        """Meets the other ranks of a generation."""
        self.replica.join_generation(JoinGeneration(attempt, generation, position, size, "gloo"))
        assert not self.replica.finish_build(generation)
        self.generation = generation

    def train(self, num_batches: int) -> None:
        """Leases and trains so many batches, each at the position that the replica says it is at."""
        if not num_batches:
            return
        size = num_batches * BATCH_SIZE
        self.replica.take_lease(LeasedPart(id=self.num_leased + 1, epoch=0, offset=self.num_leased, size=size))
        self.num_leased += size
        for _ in range(num_batches):
            assert self.ready.acquire(timeout=400)
            self.replica.train(TrainBatch(self.replica.progress.samples, self.replica.rates.factor))

    def enter(self, round_id: int, *, may_be_checkpoint: bool = False) -> None:
        """Takes the snapshot and starts the averaging."""
        row = self.replica.row(round_id, self.generation)
        self.replica.enter_round(EnterRound(row, may_be_checkpoint=may_be_checkpoint))

    @property
    def lr(self) -> float:
        """With which the last batch was trained."""
        return float(self.replica.optimizers[0].param_groups[0]["lr"])


class World:
    """Ranks with a thread each."""

    def __init__(self, ranks: list[Rank]) -> None:
        self.ranks = ranks
        self._threads = ThreadPoolExecutor(len(ranks))

    def all(self, act: Callable[[int, Rank], Any]) -> list[Any]:
        """What each rank returns, all at once."""
        return [one.result() for one in [self._threads.submit(act, at, rank) for at, rank in enumerate(self.ranks)]]

    def join(self, attempt: int) -> None:
        """All ranks meet in one group."""
        size = len(self.ranks)
        self.all(lambda at, rank: rank.join(1, at, size, attempt=attempt))

    def round(self, round_id: int, *newer: int) -> list[AppliedResult]:
        """One round, during which ranks may train newer batches."""
        self.all(lambda at, rank: rank.enter(round_id))
        for rank, num_batches in zip(self.ranks, newer, strict=False):
            rank.train(num_batches)
        held: list[AppliedResult] = self.all(lambda at, rank: rank.replica.apply_result())
        return held


Make = Callable[..., World]


def new_rank(folder: Path, rank: int, stack: ExitStack, loaded: Loaded | None = None, **changes: Any) -> Rank:
    asked: list[Progress] = []

    def schedule(progress: Progress) -> float:
        asked.append(progress)
        return 1.0

    job = replace(JOB, schedule=schedule, **changes) if "scheduler" not in changes else replace(JOB, **changes)
    ready = threading.Semaphore(0)
    parts = stack.enter_context(parts_of(job, ready.release))
    nobody: Any = None
    replica = Replica(
        launch(folder, rank),
        job,
        replace(parts, loaded=loaded),
        channel=nobody,
        streams=DeviceStreams(),
        wake=lambda: None,
        send=lambda message: None,
    )
    return Rank(replica, ready, asked)


def weight(rank: Rank) -> torch.Tensor:
    model: Any = rank.replica.model
    return model.weight.detach().clone()  # type: ignore[no-any-return]


def write(replica: Replica, round_id: int, training: str = "{}") -> list[rank_pb2.ConverseRequest]:
    """Begins the checkpoint of a round that has just been committed; returns what is told when it is over."""
    told: list[rank_pb2.ConverseRequest] = []
    replica.checkpoints.writer._send = told.append
    order = rank_pb2.WriteCheckpoint(name=f"{round_id}-00000002", training=training)
    replica.resolve_checkpoint(ResolveCheckpoint(round_id, round_id, is_written=True), order)
    return told


def written(replica: Replica, round_id: int, training: str = "{}") -> Loaded:
    """The checkpoint of a round that has just been committed, when it is whole."""
    told = write(replica, round_id, training)
    replica.checkpoints.writer._thread.shutdown(wait=True)
    assert told[-1].HasField("checkpoint_saved"), told
    return load(told[-1].checkpoint_saved.path, new_whole)
