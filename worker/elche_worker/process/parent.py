"""Ties processes to their parents: a child is killed when its parent dies, and hears of it; orphans are adopted."""

import ctypes
import os
import signal
import sys
from contextlib import suppress

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
_inputs: list[int] = []
"""This process's first standard input, as a file descriptor, once `keep_input` has kept it."""
_received = bytearray()
"""What the parent has written to it: the number of each rank that has exited, a line each."""


def end_with_parent(parent_pid: int) -> None:
    """Asks the kernel to kill this process when its parent dies. Linux only; elsewhere callers watch standard input."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent died before the request
        os._exit(1)


def keep_input() -> None:
    """Keeps standard input, by which `elche run` tells which ranks have exited, and gives the script an empty one."""
    _inputs.append(os.dup(0))
    # Reads must not wait: the parent writes only when a rank exits.
    os.set_blocking(_inputs[0], False)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)


def exited_ranks() -> set[int]:
    """Ranks of this script that have exited, of which the parent has told."""
    with suppress(OSError):
        while _inputs and (data := os.read(_inputs[0], 4096)):
            _received.extend(data)
    return {int(line) for line in _received.split(b"\n")[:-1]}


def adopt_orphans() -> None:
    """Makes this process the parent of descendants whose own parents end (Linux)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def children() -> list[int]:
    """This process's children; those of the calling thread where the kernel distinguishes."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []
