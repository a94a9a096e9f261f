"""Rendezvous of a script's processes: one store for all groups that they form, one after the other.

torch's own rendezvous serves one group per process. Ranks that form a second group before rank 0 has reopened the store
would read the first group's keys at the same address.
"""

import atexit
import os
import socket
import time
from contextlib import suppress

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from elche.errors import Misuse

ANSWER_S = 2.0
"""Seconds in which the process that has the store must answer."""
POLL_S = 0.05
"""Seconds between looks for the other ranks."""


class Meeting:
    """The store that the environment names (MASTER_ADDR, MASTER_PORT), and the processes that have not died."""

    _known: "dict[tuple[str, ...], Meeting]" = {}  # noqa: RUF012 of this process, which has one environment

    def __init__(self) -> None:
        self._address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store, rank, size = next(dist.rendezvous("env://"))
        self._store: Store = PrefixStore("elche", store)
        self.number = int(rank)
        """This process's rank at the start."""
        self.members = tuple(range(int(size)))
        """Ranks at the start of the processes that have not died."""
        self._num_groups = 0
        """Groups formed so far. Their keys have this number, so that a group never reads an earlier one's keys."""
        atexit.register(self._end, os.getpid())

    @classmethod
    def of_environment(cls) -> "Meeting":
        """The process's only meeting, made of its environment."""
        names = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
        key = tuple(os.environ.get(name, "") for name in names)
        if key not in cls._known:
            cls._known[key] = cls()
        return cls._known[key]

    @property
    def is_there(self) -> bool:
        """True if the process that has the store accepts connections. Asked first, since torch logs many lines when it
        cannot connect.
        """
        try:
            with socket.create_connection(self._address, ANSWER_S):
                return True
        except OSError:
            return False

    def next(self) -> Store:
        """Waits until all are about to form their next group; returns the store for it. Raises `Misuse` when one has
        ended before.
        """
        self._num_groups += 1
        come = [f"group {self._num_groups} of {number}" for number in self.members]
        try:
            self._store.set(f"group {self._num_groups} of {self.number}", "")
            while not self._store.check(come):
                self._check_ended()
                time.sleep(POLL_S)
        except RuntimeError as error:
            raise Misuse(
                f"Trainer.setup, number {self._num_groups} in this script: the ranks cannot find each other any more, "
                f"since rank 0 has ended or died; every rank has to set up as many trainers as the others "
                f"({str(error)[:100]})"
            ) from None
        return PrefixStore(f"group {self._num_groups}", self._store)

    def _check_ended(self) -> None:
        for number in self.members:
            key = f"end of {number}"
            if self._store.check([key]):
                raise Misuse(
                    f"Trainer.setup, number {self._num_groups} in this script: rank {number} has ended after "
                    f"{self._store.get(key).decode()}; every rank has to set up as many trainers as the others"
                )

    def _end(self, pid: int) -> None:
        """Tells the others that this process has ended, so that one that waits for it in `next` raises."""
        if os.getpid() == pid:  # not in a forked child, which inherits the handler
            with suppress(RuntimeError):
                self._store.set(f"end of {self.number}", str(self._num_groups))
