"""The collectives of a replay's rounds: real ones, between ranks of one process, that fail where they failed."""

import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed import HashStore

from elche_worker.collectives.operations import CollectiveFailed, Collectives, SoloCollectives
from elche_worker.collectives.process_group import ProcessGroupCollectives
from elche_worker.model.layout import CPU
from elche_worker.rank.acts import JoinGeneration
from elche_worker.replaying.recording import RecordedAveraging, RoundKey

LOOPBACK = "127.0.0.1:1"
"""A peer to which the route is the loopback interface."""


class Exchange:
    """Where the ranks of a relayed generation leave their tensors for each other."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size)
        self._left: list[Any] = [None] * size

    def swap(self, position: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor, in order of position."""
        self._left[position] = tensor
        self._barrier.wait()
        found = list(self._left)
        # Again: without it a rank would leave its next tensor before another one has read this one.
        self._barrier.wait()
        return found


class Added(Collectives):
    """Sums in order of position, as the coordinator's relay computes them (backend "cpu")."""

    def __init__(self, exchange: Exchange, act: JoinGeneration) -> None:
        self.position, self.size = act.position, act.world_size
        self.attempt, self.generation = act.attempt, act.generation
        self.device = CPU
        self._exchange = exchange

    def all_gather(self, row: torch.Tensor) -> list[torch.Tensor]:
        return self._exchange.swap(self.position, row.clone())

    def all_reduce(self, tensor: torch.Tensor) -> None:
        first, *others = self._exchange.swap(self.position, tensor.clone())
        total = first.clone()
        for one in others:
            total += one
        tensor.copy_(total)

    def all_to_all(self, rows: torch.Tensor) -> torch.Tensor:
        found = self._exchange.swap(self.position, rows.clone())
        return torch.stack([one[self.position] for one in found])

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        found = self._exchange.swap(self.position, tensor.clone())
        if source != self.position:
            tensor.copy_(found[source])


class ReplayedMeeting:
    """Where the ranks of one generation meet."""

    def __init__(self, size: int) -> None:
        self._store = HashStore()
        self._exchange = Exchange(size)

    def collectives(self, act: JoinGeneration, device: torch.device) -> Collectives:
        """One rank's collectives. Waits for the others."""
        attempt, generation = act.attempt, act.generation
        if act.world_size == 1:
            home = device if device.type == "cuda" else CPU
            return SoloCollectives(attempt=attempt, generation=generation, device=home)
        if act.backend == "cpu":
            return Added(self._exchange, act)
        return ProcessGroupCollectives(
            self._store,
            backend="gloo",
            attempt=attempt,
            generation=generation,
            position=act.position,
            size=act.world_size,
            peer=LOOPBACK,
            device=device,
        )


class Repeated(Collectives):
    """A rank's collectives, which fail in the rounds that the rank has lost: where nobody has a result, before or after
    the header; else at the end, when the others have theirs.
    """

    def __init__(
        self, name: str, act: JoinGeneration, inner: Collectives | None, rounds: Mapping[RoundKey, RecordedAveraging]
    ) -> None:
        """`inner` is None for a generation that never met, as one of its ranks was lost before."""
        self.position, self.size = act.position, act.world_size
        self.attempt, self.generation = act.attempt, act.generation
        self.device = CPU if inner is None else inner.device
        self._name, self._inner, self._rounds = name, inner, rounds
        self._round: RecordedAveraging | None = None
        self._num_gathered = 0

    def begin(self, round_id: int) -> None:
        self._round, self._num_gathered = self._rounds[self.generation, round_id], 0
        if not self._round.results and not (self._round.has_header and self._inner is not None):
            raise self._lost()
        self._real.begin(round_id)

    def all_gather(self, row: torch.Tensor) -> list[torch.Tensor]:
        self._go_on()
        rows = self._real.all_gather(row)
        self._num_gathered += 1
        assert self._round is not None
        own = self._round.lost.get(self._name)
        if not self._round.results and not (own is not None and own.has_header):
            raise self._lost()
        return rows

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self._go_on()
        self._real.all_reduce(tensor)

    def all_to_all(self, rows: torch.Tensor) -> torch.Tensor:
        self._go_on()
        return self._real.all_to_all(rows)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        self._go_on()
        self._real.broadcast(tensor, source)

    def finish(self) -> None:
        assert self._round is not None
        if self._name in self._round.lost:
            raise self._lost()
        self._real.finish()

    @property
    def _real(self) -> Collectives:
        assert self._inner is not None
        return self._inner

    def _go_on(self) -> None:
        """Of a round that nobody has a result of, only the header was exchanged."""
        assert self._round is not None
        if self._num_gathered and not self._round.results:
            raise self._lost()

    def _lost(self) -> CollectiveFailed:
        assert self._round is not None
        return CollectiveFailed(f"{self._round.words} was lost in the recorded run")
