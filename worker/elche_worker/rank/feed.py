"""Batches of the leased samples, fetched ahead by a thread, in the order of the leases."""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from elche.permutation import permutation_slice

DEPTH = 4
"""Batches that are fetched ahead."""
BLOCK_BATCHES = 64
"""Batches whose indices are computed together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A slice of an epoch's permutation."""

    id: int
    epoch: int
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch of one epoch, on the host."""

    epoch: int
    size: int
    """Samples."""
    data: Any


class Feed:
    """Fetches batches on a thread. What the data set raises is raised by `take`. `wake` is called when one is ready."""

    def __init__(
        self,
        dataset: Any,
        *,
        dataset_size: int,
        batch_size: int,
        seed: int,
        collate_fn: Callable[[list[Any]], Any] | None,
        wake: Callable[[], None],
    ) -> None:
        self.num_leased = 0
        """Samples leased so far."""
        self._dataset = dataset
        self._dataset_size = dataset_size
        self._batch_size = batch_size
        self._seed = seed
        self._collate_fn = collate_fn
        self._wake = wake
        self._leases: deque[Lease] = deque()
        self._last_lease = 0
        self._ready: deque[Batch | BaseException] = deque()
        self._room = threading.Semaphore(DEPTH)
        self._wanted = threading.Semaphore(0)
        threading.Thread(target=self._run, name="feed", daemon=True).start()

    def add(self, lease: Lease) -> None:
        """One more lease, after those before it. A lease that came before changes nothing."""
        if lease.id > self._last_lease:
            self._last_lease = lease.id
            self.num_leased += lease.size
            self._leases.append(lease)
            self._wanted.release()

    @property
    def is_ready(self) -> bool:
        """Whether `take` has a batch."""
        return bool(self._ready)

    def take(self) -> Batch:
        """The next batch; only when one is ready."""
        item = self._ready.popleft()
        self._room.release()
        if isinstance(item, BaseException):
            raise item
        return item

    def _run(self) -> None:
        while True:
            self._wanted.acquire()
            try:
                self._fetch(self._leases.popleft())
            except BaseException as error:  # the user's data set raised: the loop raises it where it can be told
                self._ready.append(error)
                self._wake()
                return

    def _fetch(self, lease: Lease) -> None:
        block = BLOCK_BATCHES * self._batch_size
        for start in range(0, lease.size, block):
            indices = permutation_slice(
                seed=self._seed,
                epoch=lease.epoch,
                length=self._dataset_size,
                offset=lease.offset + start,
                size=min(block, lease.size - start),
            ).tolist()
            batches = [indices[at : at + self._batch_size] for at in range(0, len(indices), self._batch_size)]
            for chosen, data in zip(batches, self._loader(batches), strict=True):
                self._room.acquire()
                self._ready.append(Batch(lease.epoch, len(chosen), data))
                self._wake()

    def _loader(self, batches: list[list[int]]) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(self._seed)
        return DataLoader(self._dataset, batch_sampler=batches, collate_fn=self._collate_fn, generator=generator)
