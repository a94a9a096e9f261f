"""The threads of a process group that end the process: `ProcessGroupNCCL::Watchdog` and `::HeartbeatMonitor`."""

import os
import struct
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore

from support.late_streams import Latch, start_thread
from support.nccl.communicator import Communicator
from support.nccl.settings import Settings
from support.nccl.work import WorkNCCL

POLL_S = 0.1
"""`kWatchdogThreadSleepMillis`."""
DUMP_KEY = "exception_dump"
"""`kStoreDumpKey`, in the store without any prefix."""
ERROR_KEY = "remote_error"
"""`kStoreErrorSignalKey`, in the group's own store."""
should_dump = Latch()
"""`shouldDump_`, of all groups of the process, and for good."""


@dataclass(kw_only=True)
class Shared:
    """What a group's threads share with it. They do not keep the group alive, whose destructor ends them."""

    store: Any
    rank: int
    number: int
    """`local_id_`: how many groups this process had made before."""
    settings: Settings
    name: str = ""
    works: list[WorkNCCL] = field(default_factory=list)
    communicators: dict[str, Communicator] = field(default_factory=dict)
    """`devNCCLCommMap_`."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    terminated: Latch = field(default_factory=Latch)
    """`terminateProcessGroup_`."""
    monitor_ends: Latch = field(default_factory=Latch)
    """`terminateHeartbeatMonitorThread_`."""
    beats: int = 1

    @property
    def global_store(self) -> Any:
        """`globalStore_`: the store without prefixes (`PrefixStore::getUnderlyingNonPrefixStore`), so that its keys are
        those of all groups of all ranks. Asked for anew each time: a reference would keep a Python store alive, and the
        real one has but its C++ half.
        """
        store: Any = self.store
        return store._underlying_non_prefix_store if isinstance(self.store, PrefixStore) else store

    def say(self, text: str) -> None:
        print(f"[PG ID {self.number} PG GUID {self.name} Rank {self.rank}] {text}", file=sys.stderr, flush=True)

    def abort_communicators(self) -> None:
        """`PG::abortComms`: only those that are made. One that is being made is not known yet."""
        with self.lock:
            communicators = list(self.communicators.values())
        for one in communicators:
            one.abort()


def start(shared: Shared) -> Latch | None:
    """Starts both, unless waits block (the constructor of PG): then nothing watches. What tells the watchdog's end."""
    if shared.settings.blocks_in_wait:
        return None
    ended = Latch()
    start_thread(_run, (shared, ended))
    return ended


def _run(shared: Shared, ended: Latch) -> None:
    """`Watchdog::run`: what is thrown here leaves the thread, and `std::terminate` sends SIGABRT. Unless errors are not
    to be thrown again: then the watchdog has ended, and nobody watches.
    """
    start_thread(_monitor, (shared,))
    try:
        _watch(shared)
    except Exception as error:
        shared.say(f"Process group watchdog thread terminated with exception: {error}")
        if shared.settings.rethrows or str(error).startswith("CUDA Error"):
            os.abort()
    ended.set()


def _watch(shared: Shared) -> None:
    """`Watchdog::runLoop`."""
    while not shared.terminated.is_set() or shared.works:
        shared.terminated.wait(POLL_S)
        shared.beats += 1
        for work in list(shared.works):
            if work.error is None:
                work.is_overdue()  # also one that has ended since this thread last looked
            if work.error is not None:
                _tell_and_throw(shared, work)
            if work.is_completed():
                with shared.lock:
                    shared.works.remove(work)
            shared.beats += 1
        if shared.terminated.is_set() and shared.works:
            time.sleep(POLL_S)


def _tell_and_throw(shared: Shared, work: WorkNCCL) -> None:
    """The middle of `Watchdog::runLoop`. Whatever the handling of errors is, all ranks of the job are asked for a dump,
    and this thread sleeps for four times what a dump may take.
    """
    shared.say(f" failure detected by watchdog at work sequence id: {work.seq}: {work.error}")
    if shared.settings.propagates:
        _signal(shared, shared.store, f"{ERROR_KEY}:{shared.name}")
    _signal(shared, shared.global_store, DUMP_KEY)
    should_dump.set()
    time.sleep(shared.settings.dump_ms * 4 / 1000)
    if shared.settings.cleans_up:
        shared.abort_communicators()
    work.handle(tears_down=shared.settings.tears_down, say=shared.say)


def _signal(shared: Shared, store: Any, key: str) -> None:
    """`PG::broadcastSignal`."""
    try:
        store.set(key, struct.pack("i", shared.rank))
    except Exception as error:
        shared.say(f"Failed to broadcast signal {key} through TCPStore. Error: {error}")


def _monitor(shared: Shared) -> None:
    """`HeartbeatMonitor::runLoop`. That of the process's first group also looks for a timeout, of this process or, in
    the job's store, of another; any ends the process when its watchdog has stood still.
    """
    settings = shared.settings
    looks = settings.dumps and shared.number == 0
    last_beats, looked_s = 0, time.monotonic()
    while True:
        if shared.monitor_ends.wait(settings.coordination_ms / 1000 if looks else settings.heartbeat_s):
            return
        if looks and (should_dump.is_set() or _is_asked(shared)):
            should_dump.set()
            reason = "collective timeout or exception"
            break
        if time.monotonic() - looked_s >= settings.heartbeat_s:
            looked_s = time.monotonic()
            if shared.beats == last_beats:
                should_dump.set()
                reason = "ProcessGroupNCCL watchdog hang"
                break
            last_beats = shared.beats
    _end_process(shared, reason)


def _is_asked(shared: Shared) -> bool:
    try:
        return bool(shared.global_store.check([DUMP_KEY]))
    except Exception as error:
        shared.say(f'Failed to check the "should dump" flag on TCPStore, with error: {error}')
        return False


def _end_process(shared: Shared, reason: str) -> None:
    """The end of `HeartbeatMonitor::runLoop`, with `PG::terminateProcess`, which is `LOG(FATAL)`: SIGABRT."""
    if not shared.monitor_ends.is_set():
        time.sleep(shared.settings.heartbeat_s)
    if shared.monitor_ends.is_set():
        return
    if shared.settings.monitors:
        shared.say(f"Terminating the process after attempting to dump debug info, due to {reason}.")
        os.abort()
    shared.say(f"ProcessGroupNCCL monitor thread is disabled, but would have terminated the process due to {reason}.")
