"""Stacks of a rank's threads, which Python writes on a signal, whatever the threads do."""

import faulthandler
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from elche_worker.process.rank_files import RankFiles

SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
"""A signal that user code is unlikely to use."""
MAX_BYTES = 64 << 10
"""Most bytes of stacks that are read."""
ANSWER_S = 5.0
"""Limit in seconds for a process to write its stacks."""
SETTLED_S = 0.1
"""Seconds without new output after which the stacks count as complete."""
STATES = {
    "T": "the process is stopped, by a signal or by a debugger; `kill -CONT {pid}` lets it go on",
    "t": "a debugger has stopped the process",
    "Z": "the process has ended",
}
"""States, as in /proc/PID/stat, in which a process cannot answer."""


def write_when_asked(log_path: str) -> None:
    """Has this process write the stacks of its threads to a file beside its log when `SIGNAL` arrives."""
    # To append: the agent empties the file before it asks, and a write goes to its new end.
    descriptor = os.open(_path(log_path), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    faulthandler.register(SIGNAL, file=descriptor, all_threads=True)


def ask(pid: int, log_path: Path, send: Callable[[int], object], files: RankFiles) -> str:
    """Asks a process for its stacks with a signal; returns them, or the reason why there are none."""
    path = _path(str(log_path))
    try:
        files.empty(path)
        if state := STATES.get(_state(pid)):
            return state.format(pid=pid)
        send(SIGNAL)
        return (
            _read(path, files)
            or f"process {pid} does not answer (its state is {_state(pid)}): it may hang in a system call"
        )
    except OSError as error:
        return f"the stacks of process {pid} cannot be read: {error.strerror}"


def _path(log_path: str) -> Path:
    return Path(f"{log_path}.stacks")


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _read(path: Path, files: RankFiles) -> str:
    """Reads the stacks once no more arrives; "" if nothing arrives in time."""
    deadline_s, size, since_s = time.monotonic() + ANSWER_S, 0, time.monotonic()
    with files.read(path) as file:
        while (now_s := time.monotonic()) < deadline_s:
            if (now := os.fstat(file.fileno()).st_size) != size:
                size, since_s = now, now_s
            if size and now_s - since_s >= SETTLED_S:
                break
            time.sleep(0.02)
        text = file.read(MAX_BYTES).decode(errors="replace").strip()
    return "\n\n".join(reversed(text.split("\n\n")))  # Python writes the main thread, which trains, last
