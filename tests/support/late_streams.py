"""What is queued on streams of the simulated device and has not run yet.

A library's kernel, such as a collective, ends some time after it was queued. What comes after it on a stream, or on
another that waits for it, runs then, in order, and not on the thread that has queued it: that goes on at once. A thread
that waits for the device, or reads a value of it, waits for all this.
"""

import _thread
import atexit
import itertools
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

_calls: dict[int, tuple[Callable[..., None], tuple[Any, ...]]] = {}
_numbers = itertools.count()
_letting_go = threading.Lock()
atexit.register(_letting_go.acquire)


def start_thread(run: Callable[..., None], given: tuple[Any, ...]) -> None:
    """For what is the device, not the program: the device does not watch such a thread, which must not use what it does
    watch (`threading.Condition`, of which `threading.Event` consists).
    """
    number = next(_numbers)
    _calls[number] = run, given
    _thread.start_new_thread(_run, (number,))


def _run(number: int) -> None:
    """Calls what the thread is for, and lets go of it, unless the interpreter ends: the last reference to a process
    group that a thread drops then aborts the process, since PyTorch's destructor releases the interpreter's lock.
    """
    run, given = _calls[number]
    try:
        run(*given)
    finally:
        del run, given
        with _letting_go:
            del _calls[number]


class Latch:
    """As `threading.Event`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        if not self._is_set:
            self._is_set = True
            self._lock.release()

    def clear(self) -> None:
        if self._is_set:
            self._lock.acquire()
            self._is_set = False

    def wait(self, timeout: float = -1) -> bool:
        if self._lock.acquire(timeout=timeout):
            self._lock.release()
        return self._is_set


class Late:
    """By stream and time: what has not ended. `lock` is the device's: the garbage collector, which may run while it is
    held, takes that for buffers that nobody has any more, and with a lock of its own two threads waited for each other.
    """

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self._pending: dict[tuple[str, int], Latch] = {}
        self._queues: dict[str, queue.SimpleQueue[Callable[[], None]]] = {}

    def add(self, stream: str, time: int, ended: Latch) -> None:
        """What was queued there at that time ends with the event."""
        with self._lock:
            self._pending[stream, time] = ended

    def before(self, clock: Mapping[str, int]) -> list[Latch]:
        """What comes before a moment and has not ended."""
        if not self._pending:
            return []
        with self._lock:
            self._pending = {at: ended for at, ended in self._pending.items() if not ended.is_set()}
            return [ended for (stream, time), ended in self._pending.items() if clock.get(stream, 0) >= time]

    def wait(self, clock: Mapping[str, int]) -> bool:
        """Waits for all that comes before; whether there was anything."""
        before = self.before(clock)
        for ended in before:
            ended.wait()
        return bool(before)

    def defer(self, stream: str, time: int, before: list[Latch], run: Callable[[], None]) -> None:
        """Runs something of a stream when all before it has ended."""
        ended = Latch()

        def later() -> None:
            for one in before:
                one.wait()
            run()
            ended.set()

        self.add(stream, time, ended)
        if stream not in self._queues:
            self._queues[stream] = queue.SimpleQueue()
            start_thread(self._serve, (stream,))
        self._queues[stream].put(later)

    def _serve(self, stream: str) -> None:
        while True:
            self._queues[stream].get()()


def again(func: Any, args: Any, kwargs: Any, values: Any) -> Callable[[], None]:
    """Computes an operation whose results were made of values that were not there yet, into the same tensors; one that
    changes its arguments has made none.
    """
    made = [one for one in tree_flatten(values)[0] if isinstance(one, torch.Tensor)]

    def run() -> None:
        results = [one for one in tree_flatten(func(*args, **kwargs))[0] if isinstance(one, torch.Tensor)]
        for tensor, result in zip(made, results, strict=bool(made)):
            tensor.copy_(result)

    return run
