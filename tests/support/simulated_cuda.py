"""A CUDA device in the host's memory, which notes every operation and finds those that nothing has put in order.

While `Device.in_use` lasts, tensors can be on `cuda:0`: they compute as those of the CPU do, and say that they are on
the device. `torch.cuda`'s streams and events are the device's own, so that what runs is the code that runs on a GPU.
What each operation reads and writes is what torch's dispatcher says of it: nothing is declared by hand.

Streams and threads have vector clocks. Work that a thread queues comes after what the thread has done; a stream comes
after another where it waits for it or for an event; a thread comes after a stream where it waits for that. What is read
must come after its last write, what is written after its last write and all reads since, and memory that is given back
must not be in use on another stream than the one it was taken on, unless it was lent to that (`record_stream`).

What is queued is done at once, unless it comes after something that is late (`late_streams`).
"""

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from support.late_streams import Latch, Late, again

CUDA, CPU = torch.device("cuda:0"), torch.device("cpu")
DEFAULT = "the default stream"
GB = 10**9

Clock = dict[str, int]


def join(clock: Clock, other: Clock) -> None:
    for timeline, time in other.items():
        clock[timeline] = max(clock.get(timeline, 0), time)


@dataclass(frozen=True, slots=True)
class Access:
    """One operation, as one line of a story."""

    timeline: str
    time: int
    what: str

    def __str__(self) -> str:
        return f"{self.what} on {self.timeline}"

    @property
    def is_host(self) -> bool:
        return self.timeline.startswith("thread")


@dataclass(eq=False, slots=True, weakref_slot=True)
class Buffer:
    """Memory of one storage."""

    name: str
    taken_on: str
    is_pinned: bool = False
    written: Access | None = None
    reads: list[Access] = field(default_factory=list)
    lent: dict[str, int] = field(default_factory=dict)


class OnDevice(torch.Tensor):
    """A tensor on the device: `inner` has its values."""

    inner: torch.Tensor
    buffer: Buffer
    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_meta = property(lambda self: False)  # type: ignore[assignment]

    @staticmethod
    def of(inner: torch.Tensor, buffer: Buffer) -> "OnDevice":
        new: Any = torch.Tensor._make_wrapper_subclass
        tensor = new(
            OnDevice, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device="meta",
        )  # fmt: skip
        tensor.inner, tensor.buffer = inner, buffer
        return tensor  # type: ignore[no-any-return]

    def untyped_storage(self) -> Any:
        return self.inner.untyped_storage()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __getitem__(self, index: Any) -> Any:
        """Of a list torch would make a tensor on the device that it takes this one to be on, which has no values."""
        return super().__getitem__(torch.tensor(index) if isinstance(index, list) else index)

    def record_stream(self, stream: Any) -> None:
        device().lend(self.buffer, stream)

    def __repr__(self, **more: Any) -> str:
        return f"OnDevice({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return device().run(func, args, kwargs or {})


class Mode(TorchDispatchMode):
    """Shows the device what threads do."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return device().run(func, args, kwargs or {})


class Stream:
    """`torch.cuda.Stream`."""

    def __init__(self, device: Any = None, name: str = "") -> None:
        self.name = name or f"stream {len(_current()[0].clocks)}"
        _current()[0].clock(self.name)

    def wait_stream(self, other: "Stream") -> None:
        device().order(self.name, device().moment(other.name))

    def wait_event(self, event: "Event") -> None:
        device().order(self.name, event.moment)

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        device().host_waits(device().moment(self.name))

    def query(self) -> bool:
        return self.record_event().query()


class Event:
    """`torch.cuda.Event`."""

    def __init__(self, *, blocking: bool = False, **options: Any) -> None:
        self._is_blocking = blocking
        self.moment: Clock = {}
        self.at_s = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self.moment = device().moment((stream or device().stream).name)
        self.at_s = perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or device().stream).wait_event(self)

    def synchronize(self) -> None:
        if not self._is_blocking:  # CUDA's default: a core of the host computes nothing else
            device().problems.setdefault(f"the host spins until an event has come in {_where()}")
        device().host_waits(self.moment)

    def query(self) -> bool:
        """Only what the host has waited for is known to be done."""
        device().check()
        if device().late.before(self.moment):
            return False
        own = device().clock(device().thread)
        return all(own.get(timeline, 0) >= time for timeline, time in self.moment.items())

    def elapsed_time(self, other: "Event") -> float:
        """In milliseconds, by when the host has recorded them: what is queued is done at once, unless it is late."""
        return (other.at_s - self.at_s) * 1000


@dataclass
class Memory:
    """What the device says of its memory, in bytes."""

    free: int = 50 * GB
    total: int = 100 * GB
    reserved: int = 0
    allocated: int = 0
    peak: int = 0
    fraction: float = 1.0
    """Part of it that this process may use."""


class Device:
    """Notes what is done, and what is wrong with it in `problems`."""

    def __init__(self) -> None:
        self.problems: dict[str, None] = {}
        """In order, each once."""
        self.clocks: dict[str, Clock] = {}
        self.memory = Memory()
        self.error = ""
        """What has broken it, in CUDA's words: each call that waits for it, or asks an event, raises that."""
        self.live_bytes = self.peak_bytes = 0
        """Of storages on the device."""
        self.num_operations: dict[str, int] = {}
        """By stream."""
        self.num_waits: dict[str, int] = {}
        """By thread of the host."""
        self.run_collective: Callable[[Any, Any, dict[str, Any]], Any] | None = None
        """Runs a collective of torch's process groups on tensors of the device, if there is something that can."""
        self._lock = threading.RLock()
        self.late = Late(self._lock)
        self._local = threading.local()
        self._numbers = count(1)
        self._host: dict[int, tuple[Buffer, Any]] = {}
        """Of the host, by address; what was seen stays, so that no address comes twice."""
        self._kept: list[Any] = []

    # Time

    def clock(self, timeline: str) -> Clock:
        return self.clocks.setdefault(timeline, {timeline: 0})

    @property
    def thread(self) -> str:
        if not hasattr(self._local, "thread"):
            self._name_thread("main")
        return str(self._local.thread)

    def _name_thread(self, name: str) -> None:
        self._local.thread = f"thread {name}.{next(self._numbers)}"

    @property
    def stream(self) -> Stream:
        return getattr(self._local, "stream", None) or Stream(name=DEFAULT)

    @contextmanager
    def on(self, stream: Stream | None, *, anew: bool = False) -> Iterator[None]:
        """The stream is current; None changes nothing, or with `anew` makes it the default one, as on a new thread."""
        before = getattr(self._local, "stream", None)
        self._local.stream = stream if stream is not None or anew else before
        try:
            yield
        finally:
            self._local.stream = before

    def moment(self, timeline: str) -> Clock:
        """All that comes before what is done there from now on."""
        with self._lock:
            moment = dict(self.clock(timeline))
            join(moment, self.clock(self.thread))
            return moment

    def order(self, timeline: str, moment: Clock) -> None:
        with self._lock:
            join(self.clock(timeline), moment)

    @property
    def is_in_use(self) -> bool:
        """True within `in_use`, if no other device is used within that."""
        return _devices[-1:] == [self]

    def check(self) -> None:
        """`C10_CUDA_CHECK`: the error of any kernel, in whatever call asks next, on whichever thread."""
        if self.error:
            raise RuntimeError(f"CUDA error: {self.error}")

    def host_waits(self, moment: Clock) -> bool:
        """The thread waits; whether there was anything to wait for."""
        self.check()
        self.order(self.thread, moment)
        return self.late.wait(moment)

    # What is done

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs an operation on the values, and notes it. The thread waits where the host does."""
        if func.namespace == "c10d":
            return self._collective(func, args, kwargs)
        self._local.waits = False
        result = self._run(func, args, kwargs)
        if self._local.waits and self.late.wait(self.clock(self.thread)) and not isinstance(result, torch.Tensor):
            return func(*_map(_plain, args), **_map(_plain, kwargs))  # a number, of values that are there now
        return result

    def _collective(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if not any(isinstance(one, OnDevice) for one in _tensors(args, kwargs)):
            return func(*args, **kwargs)
        assert self.run_collective is not None, func
        return self.run_collective(func, args, kwargs)

    def launch(self, name: str, reads: Any, writes: Any, stream: Stream, ended: Latch) -> tuple[list[Latch], Event]:
        """Queues a library's kernel, which ends with `ended`. What has not ended before it, and an event after it."""
        func = SimpleNamespace(_schema=SimpleNamespace(name=name))
        with self._lock, self.on(stream):
            before = self.late.before(self.moment(stream.name))
            self._note(func, [self._buffer(one) for one in reads], [self._buffer(one) for one in writes], True, False)
            self.late.add(stream.name, self.clock(stream.name)[stream.name], ended)
            event = Event()
            event.record(stream)
            return before, event

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        schema = _schema_of(func)
        with self._lock:
            given = _tensors(args, kwargs)
            target = kwargs.get("device")
            is_device = any(isinstance(one, OnDevice) for one in given)
            to_device = is_device if target is None else torch.device(target).type == "cuda"
            self._check_together(func, given)
            plain = dict(kwargs)
            is_pinned = bool(plain.pop("pin_memory", False)) or schema.name == "aten::_pin_memory"
            plain = _map(_plain, plain)
            written = _tensors(*(args[place] for place in schema.written if place < len(args)))
            on_device = is_device or to_device
            before = self.late.before(self.moment(self.stream.name)) if on_device else []
            if before and written:
                values: Any = written[0]
            else:
                values = args[0].clone() if is_pinned and given else func(*_map(_plain, args), **plain)
            if not written and schema.is_view:
                return (
                    _map(lambda one: OnDevice.of(one, given[0].buffer) if _is_bare(one) else one, values)
                    if is_device
                    else values
                )
            new = [one for one in _tensors(values) if _is_bare(one)] if not written else []
            made = {id(one): self._new(one, to_device, is_pinned) for one in new}
            buffers = [self._buffer(one) for one in written] + list(made.values())
            reads = [self._buffer(one) for one in given if one.numel() and not any(one is other for other in written)]
            reads = [] if schema.is_form else reads
            waits = self._waits(func, args, kwargs, values, on_device)
            self._note(func, reads, buffers, on_device, waits)
            self._local.waits = waits
            if before and not schema.is_form:
                run = again(func, _map(_plain, args), plain, None if written else values)
                self.late.defer(self.stream.name, self.clock(self.stream.name)[self.stream.name], before, run)
            if written:
                return args[0] if schema.num_returns == 1 else None
            return _map(lambda one: OnDevice.of(one, made[id(one)]) if to_device and _is_bare(one) else one, values)

    def _check_together(self, func: Any, given: list[torch.Tensor]) -> None:
        mixed = {isinstance(one, OnDevice) for one in given if one.dim()}
        if len(mixed) > 1 and not any(word in func._schema.name for word in ("copy", "index")):
            raise RuntimeError(f"{func}: expected all tensors to be on the same device, but found cuda:0 and cpu")

    def _waits(self, func: Any, args: Any, kwargs: Any, values: Any, is_device: bool) -> bool:
        """Whether the host waits for the operation."""
        if not is_device:
            return False
        if not _tensors(values):
            return bool(func._schema.returns) and values is not None
        tensors = _tensors(args)
        hosts = [one for one in tensors if not isinstance(one, OnDevice) and one.dim() and one.numel()]
        is_copy = func._schema.name in ("aten::copy_", "aten::_to_copy")
        if is_copy and func._schema.name == "aten::copy_" and len(args) > 2:
            kwargs = {**kwargs, "non_blocking": args[2]}
        if not is_copy or not kwargs.get("non_blocking", False):
            crosses = len({isinstance(one, OnDevice) for one in tensors}) > 1 or kwargs.get("device") is not None
            return bool(hosts) or (is_copy and crosses)
        target = kwargs.get("device")
        goes_out = func._schema.name == "aten::_to_copy" and target is not None and torch.device(target).type == "cpu"
        return goes_out or any(not self._buffer(one).is_pinned for one in hosts)

    def _new(self, tensor: torch.Tensor, on_device: bool, is_pinned: bool) -> Buffer:
        name = f"a tensor {tuple(tensor.shape)} made in {_where()}"
        buffer = Buffer(name, self.stream.name if on_device else self.thread, is_pinned)
        if on_device:
            self._kept.append(tensor.untyped_storage())
            self._take(tensor.untyped_storage().nbytes())
            weakref.finalize(buffer, self._take, -tensor.untyped_storage().nbytes())
            weakref.finalize(buffer, self._check_freed, name, buffer.taken_on, buffer.reads, buffer.lent)
        else:
            self._host[tensor.untyped_storage().data_ptr()] = (buffer, tensor.untyped_storage())
        return buffer

    def _buffer(self, tensor: torch.Tensor) -> Buffer:
        if isinstance(tensor, OnDevice):
            return tensor.buffer
        address = tensor.untyped_storage().data_ptr()
        if address not in self._host:
            buffer = Buffer(f"a tensor {tuple(tensor.shape)} of the host", self.thread)
            self._host[address] = (buffer, tensor.untyped_storage())
        return self._host[address][0]

    def _note(self, func: Any, reads: list[Buffer], writes: list[Buffer], on_device: bool, waits: bool) -> None:
        thread, timeline = self.thread, self.stream.name if on_device else self.thread
        own, of_thread = self.clock(timeline), self.clock(thread)
        of_thread[thread] += 1
        join(own, of_thread)
        own[timeline] += 1
        self.num_operations[timeline] = self.num_operations.get(timeline, 0) + 1
        access = Access(timeline, own[timeline], f"{func._schema.name.removeprefix('aten::')} in {_where()}")
        if timeline == DEFAULT:
            self.problems.setdefault(f"{access}")
        for buffer in reads:
            self._check(access, own, "reads", buffer, [buffer.written])
        for buffer in writes:
            self._check(access, own, "writes", buffer, [buffer.written, *buffer.reads])
        for buffer in writes:
            buffer.written = access
            buffer.reads.clear()
        for buffer in reads:
            buffer.reads.append(access)
        if waits:
            self.num_waits[thread] = self.num_waits.get(thread, 0) + 1
            join(of_thread, own)

    def _check(self, access: Access, own: Clock, verb: str, buffer: Buffer, others: list[Access | None]) -> None:
        for other in others:
            if other is None or (other.is_host and access.is_host) or own.get(other.timeline, 0) >= other.time:
                continue
            did = "written" if other is buffer.written else "read"
            self.problems.setdefault(f"{access} {verb} {buffer.name}, {did} by {other}: nothing orders them")

    # Memory

    def _take(self, size_bytes: int) -> None:
        with self._lock:
            self.live_bytes += size_bytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def lend(self, buffer: Buffer, stream: Stream) -> None:
        with self._lock:
            buffer.lent[stream.name] = self.clock(stream.name)[stream.name]

    def _check_freed(self, name: str, taken_on: str, reads: list[Access], lent: dict[str, int]) -> None:
        """Whoever takes this memory next on its stream comes after what is queued there, and what the host knows."""
        with self._lock:
            known = self.moment(taken_on)
            for read in reads:
                if read.is_host or read.timeline in (taken_on, *lent):
                    continue
                if known.get(read.timeline, 0) < read.time:
                    self.problems.setdefault(f"{name} is given back on {taken_on}, and not yet read by {read}")

    # Its use

    @contextmanager
    def in_use(self, monkeypatch: pytest.MonkeyPatch) -> Iterator["Device"]:
        """`torch.cuda` is this device."""
        changed = {
            "_lazy_init": lambda: None,
            "set_device": lambda device: None,
            "get_device_name": lambda device=None: "NVIDIA Simulated",
            "get_device_properties": lambda device=None: SimpleNamespace(total_memory=self.memory.total),
            "Stream": Stream,
            "Event": Event,
            "stream": self.on,
            "current_stream": lambda device=None: self.stream,
            "default_stream": lambda device=None: Stream(name=DEFAULT),
            "synchronize": lambda device=None: self.problems.setdefault(
                f"the whole device is waited for in {_where()}"
            ),
            "empty_cache": lambda: self.problems.setdefault(f"the cache is emptied in {_where()}"),
            "reset_peak_memory_stats": lambda device=None: setattr(self.memory, "peak", self.memory.allocated),
            "mem_get_info": lambda device=None: (self.memory.free, self.memory.total),
            "memory_allocated": lambda device=None: self.memory.allocated,
            "memory_reserved": lambda device=None: self.memory.reserved,
            "max_memory_allocated": lambda device=None: self.memory.peak,
            "get_per_process_memory_fraction": lambda device=None: self.memory.fraction,
        }
        with monkeypatch.context() as patch:
            for name, value in changed.items():
                patch.setattr(torch.cuda, name, value)
            patch.setattr(threading.Thread, "start", _unbound(self._start))
            patch.setattr(ThreadPoolExecutor, "submit", _unbound(self._submit))
            patch.setattr(Future, "result", _unbound(self._result))
            patch.setattr(threading.Condition, "__enter__", _unbound(self._enter))
            patch.setattr(threading.Condition, "__exit__", _unbound(self._exit))
            overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
            torch.__future__.set_overwrite_module_params_on_conversion(True)
            _devices.append(self)
            try:
                with Mode():
                    yield self
            finally:
                _devices.remove(self)
                torch.__future__.set_overwrite_module_params_on_conversion(overwrites)

    @contextmanager
    def in_order(self, monkeypatch: pytest.MonkeyPatch) -> Iterator["Device"]:
        """In use; the test fails, with the whole story, where something is not in order."""
        with self.in_use(monkeypatch):
            yield self
        if self.problems:
            pytest.fail("\n".join(self.problems), pytrace=False)

    # How threads come after each other

    def _start(self, thread: threading.Thread, *, start: Any = threading.Thread.start) -> None:
        run, moment = thread.run, self.moment(self.thread)

        def begin() -> None:
            self._name_thread(thread.name)
            self.order(self.thread, moment)
            with Mode():
                run()

        thread.run = begin  # type: ignore[method-assign]
        start(thread)

    def _submit(self, pool: Any, call: Any, *args: Any, submit: Any = ThreadPoolExecutor.submit, **more: Any) -> Any:
        moment = self.moment(self.thread)

        def begin() -> Any:
            self.order(self.thread, moment)
            try:
                return call(*args, **more)
            finally:
                ended.append(self.moment(self.thread))

        ended: list[Clock] = []
        future = submit(pool, begin)
        future.ended = ended
        return future

    def _result(self, future: Any, timeout: float | None = None, *, result: Any = Future.result) -> Any:
        try:
            return result(future, timeout)
        finally:
            for moment in getattr(future, "ended", ()):
                self.order(self.thread, moment)

    def _enter(self, condition: Any) -> Any:
        entered = condition._lock.__enter__()
        self.order(self.thread, getattr(condition, "moment", {}))
        return entered

    def _exit(self, condition: Any, *error: Any) -> Any:
        condition.moment = self.moment(self.thread)
        return condition._lock.__exit__(*error)


_devices: list[Device] = []


def _current() -> list[Device]:
    return _devices


def device() -> Device:
    """The one that is in use."""
    return _devices[-1]


def _unbound(method: Any) -> Any:
    """As a method of another class."""
    return lambda *args, **more: method(*args, **more)  # noqa: PLW0108  # a bound method would get no `self`


@dataclass(frozen=True, slots=True)
class Schema:
    """What torch's dispatcher says of an operation."""

    name: str
    written: tuple[int, ...]
    """Places of the arguments that it writes to."""
    is_view: bool
    """Whether its results share memory with what it is given."""
    is_form: bool
    """Whether it reads no value, but only a shape."""
    num_returns: int


@cache
def _schema_of(func: Any) -> Schema:
    schema = func._schema
    written = [
        place for place, one in enumerate(schema.arguments) if one.alias_info is not None and one.alias_info.is_write
    ]
    is_view = any(one.alias_info is not None for one in schema.returns)
    is_form = any(word in schema.name for word in ("empty", "_like"))
    return Schema(schema.name, tuple(written), is_view, is_form, len(schema.returns))


def _tensors(*values: Any) -> list[torch.Tensor]:
    """Those in arguments or results of an operation: tensors, and lists, tuples and dicts of them."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(*value)
        elif isinstance(value, dict):
            found += _tensors(*value.values())
    return found


def _map(change: Callable[[Any], Any], value: Any) -> Any:
    """The same lists, tuples and dicts, of changed values."""
    if isinstance(value, list | tuple):
        return type(value)([_map(change, one) for one in value])
    if isinstance(value, dict):
        return {name: _map(change, one) for name, one in value.items()}
    return change(value)


def _plain(value: Any) -> Any:
    if isinstance(value, OnDevice):
        return value.inner
    return CPU if isinstance(value, torch.device) else value


def _is_bare(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, OnDevice)


def _where() -> str:
    """The innermost line of elche's, and the test's."""
    frame = sys._getframe(1)
    while frame is not None:
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        if path != __file__ and ("/elche_worker/" in path or "/tests/" in path) and not name.startswith("<"):
            return f"{path.rpartition('/')[2]}:{frame.f_lineno} ({name})"
        frame = frame.f_back  # type: ignore[assignment]
    return "torch"
