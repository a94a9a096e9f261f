"""Fetches a loop's batches again where a worker process of the loader was killed, as the kernel does when memory is
short: it is the host's fault, and the loop has no part in it.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from elche.output import notice
from elche_worker.data.lease_loader import WorkerLost

MOST_LOST = 3
"""Deaths of worker processes without a batch between them, after which there is an error: the program has a part in
them.
"""


class Owed:
    """A batch sampler that begins with what was asked for and did not come, where it is iterated again."""

    def __init__(self, wanted: Iterable[list[int]]) -> None:
        self._wanted = wanted
        self._rest: Iterator[list[int]] = iter(())
        self._owed: deque[list[int]] = deque()

    def begin(self) -> None:
        """Begins with the sampler's first batch."""
        self._rest, self._owed = iter(self._wanted), deque()

    def note_come(self) -> None:
        """The oldest batch that was asked for has come."""
        self._owed.popleft()

    def __iter__(self) -> Iterator[list[int]]:
        yield from list(self._owed)
        for one in self._rest:
            self._owed.append(one)
            yield one


def refetched(new_loader: Callable[[bool], "DataLoader[Any]"], owed: Owed) -> Iterator[Any]:
    """Yields the batches of a loader that asks `owed` for indices. `new_loader(is_lost)` returns it, anew if worker
    processes of the one before were lost. Raises `WorkerLost` where new ones do not help.
    """
    owed.begin()
    num_lost = 0
    while True:
        loader = new_loader(num_lost > 0)
        try:
            for data in _quiet(iter(loader)):
                owed.note_come()
                num_lost = 0
                yield data
            return
        except Exception as error:
            lost = WorkerLost.of(error) if loader.num_workers else error
            num_lost += 1
            if not isinstance(lost, WorkerLost):
                raise
            if num_lost > MOST_LOST:
                raise lost from None
            notice(f"{lost}: others are started, and fetch its batches")


def _quiet(fetched: Any) -> Iterator[Any]:
    """The iterator of a loader, of whose worker processes torch's signal handler does not know: it would raise where
    the main thread happens to be, within the user's step, say. The iterator itself sees their deaths, too.
    """
    if getattr(fetched, "_worker_pids_set", False):
        torch._C._remove_worker_pids(id(fetched))
        fetched._worker_pids_set = False
    iterator: Iterator[Any] = fetched
    return iterator
