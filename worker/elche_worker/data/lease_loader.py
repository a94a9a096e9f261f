"""Fetches the batches of leased samples ahead of training, on a thread, in the order of the leases."""

import errno
import multiprocessing
import os
import resource
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from multiprocessing.util import get_temp_dir
from typing import Any

import torch
from torch.utils.data import DataLoader

from elche.errors import ElcheError, InvalidJob
from elche.timeline import COPY, FETCH
from elche_worker.data.dataset import Order
from elche_worker.data.fetching import Collate, Fetch, FetchError, Indices, begin_worker
from elche_worker.data.prefetch import DeviceTransfer
from elche_worker.device.transfer import InParts, num_bytes
from elche_worker.process.leaving import leaves_later
from elche_worker.process.parent import end_with_parent
from elche_worker.telemetry.timeline import SpanRecorder

SHARED_MEMORY = "/dev/shm"
"""Where worker processes put semaphores and tensors, on Linux."""
MAX_FOLDER_CHARS = 107 - len("/pymp-12345678/listener-12345678")
"""Most characters of the temporary folder: `multiprocessing` makes names of sockets in it, of at most 107."""
FILES_OF_A_BATCH = 8
"""Most files that a worker process has closed again when it could not send a batch, since it might open no more."""
DEPTH = 4
"""Batches that each worker process fetches ahead: `prefetch_factor` of the `DataLoader`, which has 2 by default."""
MAX_READY = 16
"""Most batches that wait in host memory to be trained."""
MAX_READY_BYTES = 256 << 20
"""Most bytes of waiting batches; a single one may be larger."""
BLOCK_BATCHES = 64
"""Batches whose indices are computed in one call."""
NONE_IN_GROUP = (
    "collate_fn gave None for a batch, and the processes of a replica group train each batch together: leave samples "
    "that cannot be trained out of the data set, or let collate_fn put others in their place"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedPart:
    """A slice of an epoch's permutation, in samples."""

    id: int
    """Rises from lease to lease, so that a lease that is delivered twice is recognised."""
    epoch: int
    offset: int
    size: int
    granted: int = 0
    """The coordinator's id; `id` numbers the parts in which its leases are begun."""


@dataclass(frozen=True, slots=True)
class LoadedBatch:
    """One batch of one epoch."""

    epoch: int
    size: int
    """Samples of the whole batch, over all processes of a replica group."""
    data: Any
    """None if the job gave None for it: the batch is skipped."""
    own_size: int
    """Samples of `data` that count; 0 if `data` only stands in for an empty part."""
    size_bytes: int = 0
    event: Any = None
    """Event after which the data is on the device; None if it needs no copy."""
    lease: int = 0
    """The coordinator's id of its lease."""
    offset: int = 0
    """Position of its first sample in the epoch's permutation."""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A batch to fetch."""

    epoch: int
    size: int
    """Samples of the whole batch, over all processes of a replica group."""
    indices: list[int]
    """Samples to fetch in this process."""
    own_size: int
    lease: int = 0
    offset: int = 0
    """Position of the whole batch's first sample in the epoch's permutation."""


LOST_WORDS = "DataLoader worker (pid"
"""In torch's messages on the death of a worker process; not in those on what user code raised in one."""


class WorkerLost(ElcheError, RuntimeError):
    """A `DataLoader` worker process has died. Errors of user code in one come as a `FetchError` instead."""

    @classmethod
    def of(cls, error: BaseException) -> BaseException:
        """Converts an error of the loader that shows a worker's death, by torch's message or a connection that is
        closed or gone; returns others unchanged.
        """
        # The socket through which a dead worker was to send a tensor is gone; other missing files have names.
        is_gone = isinstance(error, FileNotFoundError) and error.filename is None
        is_closed = is_gone or isinstance(error, EOFError | ConnectionError)
        is_lost = is_closed or "DataLoader worker" in str(error)
        words = next(iter(str(error).splitlines()), "") or type(error).__name__
        return cls(f"a worker process of the loader (num_workers) has died: {words}") if is_lost else error


def shows_lost_worker(error: BaseException) -> bool:
    """True if it shows the death of a worker process, of elche's loader or of one that user code has made: torch raises
    the latter wherever the main thread is.
    """
    return isinstance(error, WorkerLost) or (isinstance(error, RuntimeError) and LOST_WORDS in str(error))


def _of_workers(error: BaseException) -> BaseException:
    """Converts an error of a loader with worker processes: their death, or no space for them."""
    if (limit := _all_files_open()) and not (isinstance(error, OSError) and error.errno == errno.ENOSPC):
        return InvalidJob(
            f"a worker process of the loader (num_workers) has {limit} files open, the most that it may (ulimit -n): "
            "let the data set close what it opens for a sample, or give a higher limit where elche run or elche-worker "
            "is started"
        )
    is_full = isinstance(error, OSError) and error.errno == errno.ENOSPC
    if not is_full or not os.path.isdir(SHARED_MEMORY):
        return WorkerLost.of(error)
    free_mib = shutil.disk_usage(SHARED_MEMORY).free >> 20
    return InvalidJob(
        f"no space for the loader's worker processes (num_workers): {error}. {SHARED_MEMORY} on "
        f"{socket.gethostname()}, through which they send batches, has {free_mib} MiB left; if that is little, give it "
        "more (docker run --shm-size 1g; in compose shm_size), or set num_workers to 0"
    )


def _all_files_open() -> int:
    """The limit of open files that a worker process has reached, which then cannot send a batch; 0 if none has."""
    for worker in multiprocessing.active_children():
        with suppress(OSError, AttributeError):  # it has ended, or this is not Linux
            limit, _ = resource.prlimit(worker.pid or 0, resource.RLIMIT_NOFILE)
            if len(os.listdir(f"/proc/{worker.pid}/fd")) >= limit - FILES_OF_A_BATCH:
                return limit
    return 0


def _check_temporary_folder() -> None:
    """Raises `InvalidJob` if the path of the temporary folder leaves no room for the names of the sockets through which
    worker processes pass tensors: the loader would wait forever for the first batch.
    """
    given = tempfile.gettempdir()
    if len(os.fsencode(given)) <= MAX_FOLDER_CHARS:
        return
    if os.path.dirname(get_temp_dir()) == given:  # newer versions of Python choose a shorter one
        raise InvalidJob(
            f"the path of the temporary folder, {given}, is too long for sockets of worker processes (num_workers): it "
            f"has {len(os.fsencode(given))} characters, of at most {MAX_FOLDER_CHARS}. Set TMPDIR, such as to /tmp, "
            "where elche run or elche-worker is started, or set num_workers to 0"
        )


def part_of(size: int, position: int, num_parts: int) -> tuple[int, int]:
    """Start and end of one of nearly equal consecutive parts. The first ones are larger, so that the leader has one."""
    least, num_larger = divmod(size, num_parts)
    start = position * least + min(position, num_larger)
    return start, start + least + (position < num_larger)


class LeaseLoader:
    """Fetches batches on a thread. `take` raises what the data set raises; `wake` is called when a batch is ready.

    One `DataLoader` serves all leases. It asks its sampler for the next batch before it returns one that is fetched, so
    the sampler must never block: while nothing is leased it yields empty batches, which are dropped.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        order: Order,
        batch_size: int,
        collate_fn: Collate | None,
        transfer: DeviceTransfer | None = None,
        wake: Callable[[], None],
        num_workers: int = 0,
        seed: int = 0,
        pins_memory: bool = False,
        file_name: str = "",
        timeline: SpanRecorder | None = None,
        member: int = 0,
        group_size: int = 1,
        num_parts: int = 1,
    ) -> None:
        """`num_parts` is the number of parts in which batches go through the model."""
        self._member, self._group_size = member, group_size
        self._timeline = timeline
        self.num_leased = 0
        """Samples leased so far."""
        self._order = order
        self._batch_size = batch_size
        self.transfer = transfer or DeviceTransfer(torch.device("cpu"))
        self._wake = wake
        self._leases: deque[LeasedPart] = deque()
        """Leases whose first batch was not asked for yet."""
        self._last_lease = 0
        """Id of the newest lease."""
        self._blocks: Iterator[BatchRequest] = iter(())
        """Remaining batches of the lease that is being fetched."""
        self._wanted: deque[BatchRequest | None] = deque()
        """Batches that the DataLoader is fetching; None for an empty one."""
        self._ready: deque[LoadedBatch | BaseException] = deque()
        """Fetched batches, and errors to raise in their place. The loader's thread appends, the loop's thread takes:
        a deque needs no lock for that.
        """
        self._ready_bytes = 0
        """Size of the ready batches. Guarded by `_room`."""
        self._room = threading.Condition()
        """Notified when a batch was taken, or the depth has changed."""
        self._news = threading.Semaphore(0)
        """Counts leases that were added, so that the thread sleeps while nothing is leased and misses none."""
        self._is_stopped = False
        self._reading = threading.Lock()
        """Held by this loader's thread while it reads samples, and by `still`."""
        self.is_in_step = False
        """True if `take` itself fetches, see `fetch_in_step`."""
        self._num_left = 0
        """Batches that are leased and not taken, where `take` fetches."""
        if num_workers:
            _check_temporary_folder()
        placed = dataset if num_workers or collate_fn else self.transfer.place(dataset)
        fetch = Fetch(placed, collate_fn, file_name, seed, num_parts, tells_epoch=True)
        self._fetch_here = fetch
        pins_memory = pins_memory and placed is dataset  # a data set on the device cannot be pinned
        self._loader = _new_loader(fetch, self._next_indices, num_workers, pins_memory=pins_memory)
        has_begun = threading.Event()
        threading.Thread(target=self._run, args=(has_begun,), name="loader", daemon=True).start()
        has_begun.wait()

    def add(self, lease: LeasedPart) -> None:
        """Appends a lease; ignores one that was added before."""
        if lease.id > self._last_lease:
            self._last_lease = lease.id
            self.num_leased += lease.size
            self._leases.append(lease)
            if self.is_in_step:
                self._num_left += -(-lease.size // self._batch_size)
            else:
                self._news.release()

    def fetch_in_step(self) -> None:
        """Has `take` fetch each batch, on its caller's thread. Call it before the first lease, without `num_workers`.

        For data sets that draw random numbers: fetched on another thread, they and the model would draw from the same
        generators, and which of them gets which number would depend on time. And for those that one thread alone can
        read.
        """
        self.is_in_step = True

    def still(self) -> AbstractContextManager[Any]:
        """Context in which the data set is not read in this process, for user code that may read it itself: an
        evaluation on another part of the same open file would move that file's position under a fetch.
        """
        return nullcontext() if self._loader.num_workers else self._reading

    def set_batch_size(self, batch_size: int) -> None:
        """Sets the batch size. Call it before the first lease."""
        self._batch_size = batch_size

    @property
    def is_ready(self) -> bool:
        """True if `take` has a batch, or can fetch one."""
        return bool(self._ready) or self._num_left > 0

    @property
    def num_ready(self) -> int:
        """Batches that are ready."""
        return len(self._ready)

    def take(self) -> LoadedBatch:
        """The next batch. Call it only when `is_ready`."""
        if self.is_in_step and not self._ready:
            return self._fetch_next()
        item = self._ready.popleft()
        if isinstance(item, LoadedBatch):
            with self._room:
                self._ready_bytes -= item.size_bytes
                self._room.notify()
        if isinstance(item, BaseException):
            raise item
        return item

    def _fetch_next(self) -> LoadedBatch:
        """Fetches the next batch on the caller's thread (see `fetch_in_step`)."""
        self._num_left -= 1
        # puts the request for the next batch into `_wanted`
        self._next_indices()
        wanted = self._wanted.popleft()
        assert wanted is not None
        started_s = time.perf_counter()
        data = self._fetch_here.batch(wanted.indices)
        if self._timeline is not None:
            self._timeline.add(FETCH, started_s, time.perf_counter(), len(wanted.indices))
        if isinstance(data, FetchError):
            raise data.to_error()
        if self._group_size > 1 and _lacks_parts(data, wanted):
            raise InvalidJob(NONE_IN_GROUP)
        with self.transfer.stream():
            data, event = self.transfer.move(data)
        return LoadedBatch(wanted.epoch, wanted.size, data, wanted.own_size, 0, event, wanted.lease, wanted.offset)

    def fetch_any(self, num_samples: int) -> LoadedBatch:
        """A batch of the first samples for trials, fetched on this thread. It does not count as trained."""
        indices = self._order.indices(0, 0, min(self._batch_size, num_samples))
        wanted = self._part(0, indices)
        data = self._fetch_here.collate(self._fetch_here.__getitems__(wanted.indices))
        if isinstance(data, FetchError):
            raise data.to_error()
        return LoadedBatch(wanted.epoch, wanted.size, data, wanted.own_size)

    def stop(self) -> None:
        """Stops fetching, ends worker processes and drops ready batches."""
        self._is_stopped = True
        self._fetch_here.give_back()
        self._num_left = 0
        # The thread sleeps in one of two places: without leases, or without room.
        self._news.release()
        with self._room:
            self._ready.clear()
            self._room.notify()

    def plan(self) -> None:
        """Called between batches when more are to come: adapts the prefetch depth to the device's free memory."""
        self.transfer.plan()
        with self._room:
            self._room.notify()

    def make_room(self) -> bool:
        """Moves batches that wait on the device to the host; True if there were any. For the thread that takes."""
        ready = [(index, self._ready[index]) for index in range(len(self._ready))]  # another thread may append
        waiting = {index: one for index, one in ready if isinstance(one, LoadedBatch) and one.event is not None}
        moved = self.transfer.take_back([(one.data, one.event) for one in waiting.values()]) if waiting else []
        for (index, batch), data in zip(waiting.items(), moved, strict=True):
            self._ready[index] = replace(batch, data=data, event=None)
        return bool(moved)

    def _run(self, has_begun: threading.Event) -> None:
        try:
            # Worker processes are forked before other threads run: a lock that one holds during a fork stays locked in
            # the worker. Not on the main thread, in which torch's SIGCHLD handler would raise when a worker dies.
            try:
                # On the rank's device: the loader starts a thread that pins memory, on what is the device here, and a
                # new thread's is the first one, on which each rank would then take some hundred megabytes.
                with self.transfer.stream():
                    fetched = iter(self._loader)
            finally:
                has_begun.set()
            # until the first lease is added
            self._news.acquire()
            with self.transfer.stream():
                self._fetch(fetched)
        except BaseException as error:  # raised by `take`
            self._ready.append(_of_workers(error) if self._loader.num_workers else error)
            self._wake()

    def _fetch(self, fetched: Iterator[Any]) -> None:
        """Fetches batches until `stop`. Sleeps while nothing is leased or being fetched."""
        while not self._is_stopped:
            with self._reading:
                started_s = time.perf_counter()
                data = next(fetched)
            wanted = self._wanted.popleft()
            if wanted is not None and self._timeline is not None:
                self._timeline.add(FETCH, started_s, time.perf_counter(), len(wanted.indices))
            if wanted is not None:
                self._put(wanted, data)
            elif not any(self._wanted) and not self._leases:
                self._news.acquire()

    def _put(self, wanted: BatchRequest, data: Any) -> None:
        """Makes a fetched batch ready, on the device once there is room for it; or an error in its place."""
        if isinstance(data, FetchError):
            self._ready.append(data.to_error())
        elif self._group_size > 1 and _lacks_parts(data, wanted):
            self._ready.append(InvalidJob(NONE_IN_GROUP))
        else:
            size_bytes = num_bytes(data)
            with self._room:
                self._room.wait_for(lambda: self._has_room(size_bytes))
                if self._is_stopped:
                    return
                self._ready_bytes += size_bytes
            started_s = time.perf_counter()
            data, event = self.transfer.move(data)
            if self._timeline is not None and event is not None:
                self._timeline.add(COPY, started_s, time.perf_counter(), size_bytes)
            sizes = (wanted.size, data, wanted.own_size, size_bytes)
            self._ready.append(LoadedBatch(wanted.epoch, *sizes, event, wanted.lease, wanted.offset))
        self._wake()

    def _has_room(self, size_bytes: int) -> bool:
        if self._is_stopped or not self._ready:  # one batch always fits: a larger one than allowed would wait forever
            return True
        if (room := self.transfer.room) is not None:
            return room > 0
        return len(self._ready) < MAX_READY and self._ready_bytes + size_bytes <= MAX_READY_BYTES

    def _next_indices(self) -> list[int]:
        """Called by the DataLoader, on this loader's thread."""
        wanted = next(self._blocks, None)
        while wanted is None and self._leases:  # a lease may be empty
            self._blocks = self._cut(self._leases.popleft())
            wanted = next(self._blocks, None)
        self._wanted.append(wanted)
        return wanted.indices if wanted else []

    def _cut(self, lease: LeasedPart) -> Iterator[BatchRequest]:
        """The batches of a lease."""
        block = BLOCK_BATCHES * self._batch_size
        for start in range(0, lease.size, block):
            indices = self._order.indices(lease.epoch, lease.offset + start, min(block, lease.size - start))
            for at in range(0, len(indices), self._batch_size):
                part = self._part(lease.epoch, indices[at : at + self._batch_size])
                yield replace(part, lease=lease.granted, offset=lease.offset + start + at)

    def _part(self, epoch: int, indices: list[int]) -> BatchRequest:
        """This process's part of a batch; a process without a part fetches one sample that stands in for it."""
        start, end = part_of(len(indices), self._member, self._group_size)
        own = Indices(indices[start:end] or indices[:1], epoch, max(1, len(indices) // self._group_size))
        return BatchRequest(epoch, len(indices), own, end - start)


def _lacks_parts(data: Any, wanted: BatchRequest) -> bool:
    """True if the job gave None for a batch, or for a part of it."""
    num_samples = sum(size for _, size in data) if isinstance(data, InParts) else len(wanted.indices)
    return data is None or num_samples < len(wanted.indices)


def _new_loader(
    fetch: Fetch, next_indices: Callable[[], list[int]], num_workers: int, *, pins_memory: bool
) -> "DataLoader[Any]":
    return DataLoader(
        fetch,  # type: ignore[arg-type]  # it has what a loader needs of a Dataset
        # `_next_indices` never returns None, so that the sampler never ends.
        batch_sampler=iter(next_indices, None),
        collate_fn=fetch.collate,
        num_workers=num_workers,
        prefetch_factor=DEPTH if num_workers else None,
        worker_init_fn=_begin_worker(os.getpid()),
        multiprocessing_context="fork" if num_workers else None,  # spawned workers could not import the user's file
        pin_memory=pins_memory,
        # A loader draws a seed for its worker processes: from the default generator it would take one of training's
        # numbers.
        generator=torch.Generator().manual_seed(0),
    )


def _begin_worker(parent_pid: int) -> Callable[[int], None]:
    def begin(worker: int) -> None:
        end_with_parent(parent_pid)
        # All processes of a host get it where that is shut down, and the rank has work to commit first. A process that
        # is no rank ends its workers by it, and waits for them. No SIG_IGN: programs that the data set starts would
        # inherit that.
        if leaves_later():
            signal.signal(signal.SIGTERM, lambda *_: None)
        begin_worker(None, worker)

    return begin
