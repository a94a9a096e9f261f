"""The process from which an agent's ranks are forked. It has imported torch, which takes most of a rank's start.

A rank that imports torch itself needs 2.8 s of CPU time and 200 MB of private memory before it begins. The agent does
not import torch at all.

Requests of the agent and reports of ranks are lines of JSON on a socket. The spawner has no threads, opens no channel
and never asks torch for a device, so that a forked process begins like a fresh one. When it ends, the kernel ends its
ranks; it ends when the agent does.

It is not `multiprocessing`'s fork server: there, two threads that look at one process race for its exit code, a killed
agent leaves a folder behind, and each rank imports the agent's main module again.
"""

import gc
import io
import json
import os
import select
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from typing import Any, NoReturn

from setproctitle import setproctitle

from elche.processors import THREADS
from elche_worker.process.log_times import TimesWriter, shorten_times
from elche_worker.process.parent import adopt_orphans, children, end_with_parent
from elche_worker.process.stacks import write_when_asked
from elche_worker.session.launch import Launch

CHUNK_BYTES = 1 << 20
"""Most bytes that are read from the agent at once."""
MAX_LAUNCHES = 64
"""Most file descriptors in one message; each launch has one."""
MAX_LOG_BYTES = 64 << 20
"""Size from which a log is shortened, so that a job that prints without end does not fill the disk."""
KEPT_LOG_BYTES = 8 << 20
"""Bytes at its end that are then kept."""
LOOK_AT_LOGS_EVERY_S = 1.0
STRAYS_S = 2.0
"""Seconds for which the spawner waits for killed stray processes to end."""
FOR_ALL = ("elche_worker.rank.main", "elche_worker.run.job", "grpc._channel")
"""Imports of every rank; gRPC would make the last with the first channel, 10 ms later in each rank."""
COMPILER = "torch._dynamo"
"""Imported by creating an optimizer, which takes nearly as long as torch itself; see `process.compiler`."""
FOR_GROUPS = ("elche_worker.rank.pieces", "elche_worker.sharding.sharded")
"""Further imports of replica groups, made when the first group is started."""


class Spawner:
    """Serves one agent until it ends."""

    def __init__(self, agent: socket.socket) -> None:
        self._agent = agent
        self._immortal: set[int] = set()
        """Strays that were killed and hang, perhaps in a driver: they are not waited for again."""
        self._running: dict[int, int] = {}
        """The agent's number of each process, by process id, which cannot be reused before it is reaped."""
        self._logs: dict[int, str] = {}
        """Log of each process, by process id."""
        self._launches: deque[int] = deque()
        """Launch lines as file descriptors, in the order of requests. Only ranks read them: a secret that this process
        read would stay in its memory, and so in that of every process that it forks later.
        """
        self._requests: deque[bytes] = deque()
        self._rest = b""
        """The beginning of an incomplete request."""
        self._selector = selectors.DefaultSelector()
        # A signal handler may run between any two lines. So the kernel's SIGCHLD only writes a byte into a pipe, and
        # the loop in `serve` reaps when it reads the byte.
        self._wakeup, self._wake = os.pipe()
        os.set_blocking(self._wake, False)

    def serve(self) -> None:
        """Returns when the agent has ended."""
        # A handler that does nothing: without a Python handler the signal would not write to the wakeup descriptor.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # sent to all processes when a host shuts down, or a session ends: ranks leave in order first
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        self._selector.register(self._agent, selectors.EVENT_READ)
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        adopt_orphans()
        while True:
            for key, _ in self._selector.select(LOOK_AT_LOGS_EVERY_S if self._running else None):
                if key.fileobj is self._wakeup:
                    os.read(self._wakeup, 4096)
                    self._reap()
                elif not self._receive():
                    self._end_all()
                    return
            while self._requests:
                self._do(json.loads(self._requests.popleft()))
            for path in self._logs.values():
                shorten_log(path)

    def _receive(self) -> bool:
        """Receives requests; returns True while the agent runs."""
        data = b""
        with suppress(ConnectionResetError):  # the agent was killed before it had read everything
            data, launches, _, _ = socket.recv_fds(self._agent, CHUNK_BYTES, MAX_LAUNCHES)
            self._launches.extend(launches)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._requests.extend(lines)
        return bool(data)

    def _do(self, request: dict[str, Any]) -> None:
        number = request["number"]
        if "signal" in request:
            for pid in [pid for pid, known in self._running.items() if known == number]:
                os.kill(pid, request["signal"])
            return
        if "log" in request:
            log = self._launches.popleft()
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
            return
        launch, parent = self._launches.popleft(), os.getpid()
        answers = self._launches.popleft() if "check" in request else None
        if request.get("group_size", 1) > 1:
            _import(*FOR_GROUPS)
        try:
            pid = os.fork()
        except OSError as error:
            os.close(launch)
            self._send(number=number, code=1, error=f"no process can be started: {error}")
            return
        if pid == 0 and answers is not None:
            self._run(partial(_check, launch, answers), parent)
        if pid == 0:
            self._run(partial(_become, launch, request["log_path"], request.get("num_threads", 0)), parent)
        for descriptor in filter(None, (launch, answers)):
            os.close(descriptor)
        self._running[pid] = number
        if "log_path" in request:
            self._logs[pid] = request["log_path"]
        self._send(number=number, pid=pid)

    def _reap(self) -> None:
        """Reports processes that have ended, after killing those that user code has left behind. If the agent heard of
        the end first, it would give the devices to other ranks, which would find their memory taken.
        """
        ended = {}
        for pid in list(self._running):
            gone, status = os.waitpid(pid, os.WNOHANG)
            if gone:
                ended[pid] = self._running.pop(pid)
                self._logs.pop(pid, None)
                self._end_strays(pid)
                self._send(number=ended[pid], code=os.waitstatus_to_exitcode(status), error="")
        if not ended:
            self._end_strays()

    def _end_strays(self, session: int | None = None) -> None:
        """Kills the processes that ended ranks have left behind: those of an ended rank's session, and daemons outside
        of it, which became children of this process when the rank ended. Running ranks adopt their own orphans.
        """
        deadline_s = time.monotonic() + STRAYS_S
        self._immortal = {pid for pid in self._immortal if os.waitpid(pid, os.WNOHANG) == (0, 0)}
        if session is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(session, signal.SIGKILL)
        while strays := [pid for pid in children() if pid not in self._running and pid not in self._immortal]:
            if time.monotonic() > deadline_s:  # ends the loop, since they no longer count as strays
                self._immortal |= set(strays)
            for pid in strays:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            time.sleep(0.001)

    def _end_all(self) -> None:
        """Kills processes that user code has started, since the kernel does not end them with this process."""
        for pid in self._running:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        self._running.clear()
        self._end_strays()

    def _send(self, **news: Any) -> None:
        with suppress(OSError):  # the agent has ended, which is noticed next
            self._agent.sendall(json.dumps(news).encode() + b"\n")

    def _leave(self, parent: int) -> None:
        """Detaches a forked process from the spawner: session, signals, file descriptors."""
        end_with_parent(parent)
        # A session of its own, so that one `killpg` ends all that user code starts in it.
        os.setsid()
        adopt_orphans()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        # They hold the secrets of other ranks.
        for other in self._launches:
            os.close(other)
        self._selector.close()
        # Kept open here, it would hide the spawner's end from the agent.
        self._agent.close()
        os.close(self._wakeup)
        os.close(self._wake)

    def _run(self, run: Callable[[], int], parent: int) -> NoReturn:
        """Runs a function in the forked process, and ends that with the exit code that it returns."""
        code = 1
        try:
            self._leave(parent)
            code = run()
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:
            traceback.print_exc()
        os._exit(code)


def _check(asked: int, answers: int) -> int:
    """Checks a job's file, and writes the answer to a file descriptor; returns the exit code."""
    from elche_worker.rank.check import answer

    with open(asked, encoding="utf-8") as file:
        given = json.load(file)
    os.environ |= given["environment"]
    code = answer(given["words"], answers)
    sys.stdout.flush()
    return code


def _become(launch_file: int, log_path: str, num_threads: int) -> int:
    """Runs a rank, or one of a rank's processes. `num_threads` is its number of threads for computing; 0: as many as
    the spawner has.
    """
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    times = TimesWriter(log_path)
    sys.stdout, sys.stderr = open_log(1, times), open_log(2, times)
    write_when_asked(log_path)
    with open(launch_file, encoding="utf-8") as file:
        launch = Launch.from_line(file.read())
    _take_threads(num_threads)
    setproctitle(f"elche rank {launch.rank} of {launch.job_id}")
    from elche_worker.rank.main import main

    main(launch)
    return 1  # it ends the process itself


def _take_threads(number: int) -> None:
    """Sets this process's number of threads for computing, if it differs from the spawner's."""
    if number and os.environ.get(THREADS) != str(number):
        import torch

        os.environ[THREADS] = str(number)  # for its child processes; torch has read it already
        torch.set_num_threads(number)


class _LossyLog(io.FileIO):
    """A log that drops what cannot be written, as when the disk is full, so that training goes on."""

    times: TimesWriter | None = None

    def write(self, data: Any) -> int:
        if self.times is not None:
            self.times.note(self.fileno())
        try:
            return super().write(data) or 0
        except OSError:
            return len(memoryview(data).cast("B"))


def open_log(descriptor: int, times: TimesWriter | None) -> io.TextIOWrapper:
    """A rank's output or error stream. Writes go to the log at once; `times` records when."""
    raw: Any = _LossyLog(descriptor, "w", closefd=False)
    raw.times = times
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)


def shorten_log(path: str, max_bytes: int = MAX_LOG_BYTES, kept_bytes: int = KEPT_LOG_BYTES) -> None:
    """Truncates a log longer than `max_bytes` to its last `kept_bytes`. Appending writers go on."""
    with suppress(OSError):
        is_too_long = os.stat(path).st_size > max_bytes
        shorten_times(path, is_cut=is_too_long)
        if not is_too_long:
            return
        with open(path, "r+b") as file:
            file.seek(-kept_bytes, os.SEEK_END)
            end = file.read(kept_bytes)
            file.truncate(0)
        # Opened anew, to append: what the rank has written since the truncation must stay.
        with open(path, "ab") as file:
            file.write(b"[the log was longer than %d MiB: only its end is kept]\n" % (max_bytes >> 20))
            file.write(end.partition(b"\n")[2] or end)


def _import(*modules: str) -> None:
    """Imports modules. If an import fails, the rank repeats it and has the error in its log. On systems whose libraries
    do not support fork, ranks make all of these imports themselves.
    """
    if not sys.platform.startswith("linux"):
        return
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"  # a process that has initialised CUDA to look for it could not be forked
    before = os.environ.get(name)
    os.environ[name] = "1"
    with suppress(Exception):
        for module in modules:
            import_module(module)
    os.environ.pop(name)
    if before is not None:
        os.environ[name] = before


@contextmanager
def _ending_with(agent: int) -> Iterator[None]:
    """Ends this process if the agent ends within the context, as by Ctrl-C while it starts: imports of many seconds
    would go on for nobody. Its thread has ended when the context is left, before anything is forked.
    """
    over, end = os.pipe()
    ends = select.poll()
    ends.register(agent, 0)  # 0: only its end
    ends.register(over, select.POLLIN)

    def watch() -> None:
        if any(descriptor == agent for descriptor, _ in ends.poll()):
            os._exit(0)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield
    finally:
        os.close(end)
        watching.join()
        os.close(over)


def _put_off_compiler() -> bool:
    """Delays the import of PyTorch's compiler in the forked ranks; returns False if that is impossible."""
    if "torch" not in sys.modules:
        return False
    from elche_worker.process.compiler import put_off

    return put_off()


def serve(agent_fd: int, *, compiles_later: bool = False) -> None:
    """Imports what ranks need, and serves the agent at the other end of the socket. With `compiles_later` ranks import
    PyTorch's compiler when they use it.
    """
    with _ending_with(agent_fd):
        _import(*FOR_ALL)
        if not (compiles_later and _put_off_compiler()):
            _import(COMPILER)
    # First, since garbage that is frozen stays for good.
    gc.collect()
    gc.freeze()  # the collector does not write to frozen objects, so that their pages stay shared with the ranks
    os.environ["SPT_NOENV"] = "1"  # otherwise titles overwrite the environment that /proc shows
    setproctitle("elche spawner")
    del os.environ["SPT_NOENV"]
    Spawner(socket.socket(fileno=agent_fd)).serve()
