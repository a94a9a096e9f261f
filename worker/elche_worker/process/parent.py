"""Ties processes to their parents: a child is killed when its parent dies, orphans are adopted."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def end_with_parent(parent_pid: int) -> None:
    """Asks the kernel to kill this process when its parent dies. Linux only; elsewhere callers watch standard input."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent died before the request
        os._exit(1)


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
