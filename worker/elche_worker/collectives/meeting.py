"""Rendezvous of a script's processes: one store for all groups that they form, one after the other.

torch's own rendezvous serves one group per process. Ranks that form a second group before rank 0 has reopened the store
would read the first group's keys at the same address.
"""

import atexit
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, default_pg_timeout

from elche.errors import Misuse
from elche.output import notice
from elche_worker.process.alive import has_exited, remove_own
from elche_worker.process.parent import exited_ranks

ANSWER_S = 2.0
"""Seconds in which the process that has the store must answer."""
POLL_S = 0.05
"""Seconds between looks for the other ranks."""
NOTICE_S = 10.0
"""Seconds after which a rank that waits for others says so."""
LIMIT_S = default_pg_timeout.total_seconds()
"""Seconds in which all ranks have to come to the script's first trainer."""
STORE_OF_TORCHRUN = "TORCHELASTIC_USE_AGENT_STORE"
"""Set to "True" by torchrun where the store is its own, not that of the first rank's process."""
TOLD_BY = "ELCHE_RANK_PID"
"""Set to the id of the rank's process, for its children: their ends are not the rank's."""
TELL_LIMIT = timedelta(seconds=5)
"""Time in which torchrun's store must answer a process that ends."""
AS_MANY = "every rank has to set up as many trainers as the others"


class Meeting:
    """The store that the environment names (MASTER_ADDR, MASTER_PORT), and the processes that have not died."""

    _known: "dict[tuple[str, ...], Meeting]" = {}  # noqa: RUF012 of this process, which has one environment

    def __init__(self) -> None:
        self._store: Store | None = None
        self._address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._num_groups = 0
        """Groups formed so far. Their keys have this number, so that a group never reads an earlier one's keys."""
        self.number = int(os.environ["RANK"])
        """This process's rank at the start."""
        size = int(os.environ["WORLD_SIZE"])
        self.members = tuple(range(size))
        """Ranks at the start of the processes that have not died."""
        if os.environ.get(STORE_OF_TORCHRUN) == "True":
            store, _, _ = next(dist.rendezvous("env://"))
        else:  # as torch's own does, which would wait for the others in silence
            is_here = self.number == 0
            self._wait_until(lambda: is_here or self.is_there, lambda: [0])
            # `multi_tenant`: a script that calls init_process_group itself has the same address, and may share this
            # server.
            store = dist.TCPStore(*self._address, size, is_here, wait_for_workers=False, multi_tenant=True)
        self._store = PrefixStore("elche", store)
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
        """True if the store's process accepts connections: asked first, as torch logs many lines when it cannot."""
        try:
            with socket.create_connection(self._address, ANSWER_S):
                return True
        except OSError:
            return False

    def next(self) -> Store:
        """Waits until all ranks form their next group; returns its store. Raises `Misuse` when one ends instead."""
        self._num_groups += 1
        come = {number: f"group {self._num_groups} of {number}" for number in self.members}
        store = self._store
        assert store is not None
        try:
            store.set(come[self.number], "")
            self._wait_until(
                lambda: store.check(list(come.values())),
                lambda: [number for number, key in come.items() if not store.check([key])],
            )
        except RuntimeError as error:
            raise Misuse(
                f"{self._which}: the ranks cannot find each other any more, since rank 0 has ended or died; {AS_MANY} "
                f"({str(error)[:100]})"
            ) from None
        return PrefixStore(f"group {self._num_groups}", store)

    def _wait_until(self, are_there: Callable[[], bool], find_lacking: Callable[[], list[int]]) -> None:
        """Waits for the other ranks. Raises `Misuse` if one ends, or is too late for the script's first trainer."""
        began_s, has_printed = time.monotonic(), False
        while not are_there():
            lacking = find_lacking()
            for number in lacking:
                self._check_ended(number)
            waited_s = time.monotonic() - began_s
            names = ", ".join(map(str, lacking[:8]))
            if waited_s > NOTICE_S and lacking and not has_printed:
                has_printed = True
                notice(f"rank {self.number} waits in Trainer.setup for rank {names}")
            # Later trainers have no time limit: between two of them the script may train on one rank for hours.
            if waited_s > LIMIT_S and self._num_groups <= 1:
                raise Misuse(f"{self._which}: rank {names} has not come in {LIMIT_S:.0f} s; {AS_MANY}")
            time.sleep(POLL_S)

    def _check_ended(self, number: int) -> None:
        key = f"end of {number}"
        if self._store is not None and self._store.check([key]):
            raise Misuse(f"{self._which}: rank {number} has ended after {self._store.get(key).decode()}; {AS_MANY}")
        if number in exited_ranks() or has_exited(number):
            raise Misuse(f"{self._which}: rank {number} has exited without it; {AS_MANY}")

    @property
    def _which(self) -> str:
        return f"Trainer.setup, number {max(1, self._num_groups)} in this script"

    def _end(self, pid: int) -> None:
        """Tells the others that this process has ended, so that one that waits for it in `next` raises."""
        if os.getpid() == pid:  # not in a forked child, which inherits the handler
            # The process of rank 0, which has the store, may have ended before.
            with suppress(RuntimeError):
                assert self._store is not None
                self._store.set(f"end of {self.number}", str(self._num_groups))
                remove_own()


def _publish_end_without_trainer(pid: int) -> None:
    """Tells the others that this process has ended before its first trainer, for which they would wait."""
    if os.getpid() == pid and not Meeting._known:
        with suppress(RuntimeError, OSError):
            store, _, _ = next(dist.rendezvous("env://", timeout=TELL_LIMIT))
            PrefixStore("elche", store).set(f"end of {os.environ['RANK']}", "no trainer")


if os.environ.get(STORE_OF_TORCHRUN) == "True" and os.environ.setdefault(TOLD_BY, str(os.getpid())) == str(os.getpid()):
    atexit.register(_publish_end_without_trainer, os.getpid())
