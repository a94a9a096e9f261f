"""Rank processes on this host: started with a secret on their standard input, watched, and ended.

A rank is one process, or all of a replica group, which live and die together.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from elche.v1 import agent_pb2

LOG_TAIL_BYTES = 4096

NO_FORK_SUPPORT = {"GRPC_ENABLE_FORK_SUPPORT": "false"}
"""Beside a process group of torch's, gRPC's handlers of fork() crash processes that fetch samples; they use no gRPC."""

Key = tuple[str, int, int]
"""(job id, rank, incarnation)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One process of a rank."""

    launch_line: str
    log_path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How a rank has ended: the process of it that ended first."""

    code: int
    """Negative: the number of the signal that ended it."""
    log_tail: str = ""
    member: int = 0
    """Its position in the rank's replica group."""
    log_path: str = ""
    """Its log, where it is not the rank's."""


@dataclass(slots=True)
class _Running:
    """The processes of one rank, the leader first."""

    processes: list[subprocess.Popen[str]]
    has_ended: threading.Lock = field(default_factory=threading.Lock)
    """Held for good by the watcher of the process that ends first."""


@dataclass(slots=True)
class Processes:
    """The rank processes of this host. `on_exit` is called on a thread of its own for each rank that ends."""

    on_exit: Callable[[Key, Exit], None]
    num_threads: int
    """Threads that each process may use on the CPU, unless the agent's environment says so (OMP_NUM_THREADS)."""
    _running: dict[Key, _Running] = field(default_factory=dict)

    def start(self, key: Key, starts: Sequence[Start]) -> None:
        """Starts a rank's processes, the leader first. Raises `OSError` when a log or a process cannot be made."""
        running = _Running([])
        try:
            for one in starts:
                running.processes.append(self._spawn(one.log_path))
        except OSError:
            _end(running.processes)
            raise
        self._running[key] = running
        for member, one in enumerate(starts):
            threading.Thread(target=self._watch, args=(key, running, member, one.log_path), daemon=True).start()
        for process, one in zip(running.processes, starts, strict=True):
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # it has ended already: its watcher tells
                process.stdin.write(one.launch_line)
                process.stdin.flush()

    def _spawn(self, log_path: Path) -> subprocess.Popen[str]:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("a") as log:
            return subprocess.Popen(
                [sys.executable, "-u", "-m", "elche_worker.rank"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                text=True,
                env={"OMP_NUM_THREADS": str(self.num_threads), **NO_FORK_SUPPORT, **os.environ},
                start_new_session=True,
            )

    def stop(self, key: Key, grace_s: float) -> None:
        """Asks a rank's leader to end, and kills it after the grace time; the others end with it."""
        running = self._running.get(key)
        process = running.processes[0] if running else None
        if process is not None and process.poll() is None:
            process.terminate()
            timer = threading.Timer(grace_s, process.kill)  # does nothing to one that has ended
            timer.daemon = True
            timer.start()

    def kill_all(self) -> None:
        """Ends every process at once, and waits until they are gone."""
        _end([process for running in list(self._running.values()) for process in running.processes])

    def _watch(self, key: Key, running: _Running, member: int, log_path: Path) -> None:
        code = running.processes[member].wait()
        if not running.has_ended.acquire(blocking=False):
            return  # another process of the rank has ended before, and this one with it
        _end(running.processes)
        del self._running[key]
        other_log = str(log_path) if member else ""
        self.on_exit(key, Exit(code=code, log_tail=_tail(log_path), member=member, log_path=other_log))


def rank_exited(key: Key, ended: Exit) -> agent_pb2.AttendRequest:
    """The message that a rank has ended."""
    job_id, rank, incarnation = key
    exited = agent_pb2.RankExited(
        job_id=job_id,
        rank=rank,
        incarnation=incarnation,
        exit_code=ended.code,
        log_tail=ended.log_tail,
        member=ended.member,
        log_path=ended.log_path,
    )
    return agent_pb2.AttendRequest(rank_exited=exited)


def _end(processes: list[subprocess.Popen[str]]) -> None:
    """Ends processes at once, with what user code has started in them, and waits until they are gone."""
    for process in processes:
        _kill_session(process)
    for process in processes:
        process.wait()


def _kill_session(process: "subprocess.Popen[str]") -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _tail(path: Path) -> str:
    with path.open("rb") as log:
        log.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
        return log.read().decode(errors="replace").strip()
