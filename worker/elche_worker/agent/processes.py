"""Rank processes on this host: started with a secret on their standard input, watched, and ended."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from elche.v1 import agent_pb2

LOG_TAIL_BYTES = 4096

Key = tuple[str, int, int]
"""(job id, rank, incarnation)"""


@dataclass(slots=True)
class Processes:
    """The rank processes of this host. `on_exit` is called on a thread of its own for each that ends."""

    on_exit: Callable[[Key, int, str], None]
    num_threads: int
    """Threads that each rank may use on the CPU, unless the agent's environment says so (OMP_NUM_THREADS)."""
    _running: dict[Key, subprocess.Popen[str]] = field(default_factory=dict)

    def start(self, key: Key, launch_line: str, log_path: Path) -> None:
        """Starts a rank. Raises `OSError` when its log or its process cannot be made."""
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("a") as log:
            process = subprocess.Popen(
                [sys.executable, "-u", "-m", "elche_worker.rank"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                text=True,
                env={"OMP_NUM_THREADS": str(self.num_threads), **os.environ},
                start_new_session=True,
            )
        self._running[key] = process
        threading.Thread(target=self._watch, args=(key, process, log_path), daemon=True).start()
        assert process.stdin is not None
        try:
            process.stdin.write(launch_line)
            process.stdin.flush()
        except BrokenPipeError:
            return  # it has ended already: its watcher tells

    def stop(self, key: Key, grace_s: float) -> None:
        """Asks a process to end, and kills it after the grace time. One that has ended is left alone."""
        process = self._running.get(key)
        if process is not None and process.poll() is None:
            process.terminate()
            timer = threading.Timer(grace_s, process.kill)  # does nothing to one that has ended
            timer.daemon = True
            timer.start()

    def kill_all(self) -> None:
        """Ends every process at once, and waits until they are gone."""
        for process in list(self._running.values()):
            _kill_session(process)
        for process in list(self._running.values()):
            process.wait()

    def _watch(self, key: Key, process: subprocess.Popen[str], log_path: Path) -> None:
        code = process.wait()
        _kill_session(process)  # what user code has started ends with its rank
        del self._running[key]
        self.on_exit(key, code, _tail(log_path))


def rank_exited(key: Key, exit_code: int, log_tail: str) -> agent_pb2.AttendRequest:
    """The message that a process has ended."""
    job_id, rank, incarnation = key
    exited = agent_pb2.RankExited(
        job_id=job_id, rank=rank, incarnation=incarnation, exit_code=exit_code, log_tail=log_tail
    )
    return agent_pb2.AttendRequest(rank_exited=exited)


def _kill_session(process: "subprocess.Popen[str]") -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _tail(path: Path) -> str:
    with path.open("rb") as log:
        log.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
        return log.read().decode(errors="replace").strip()
