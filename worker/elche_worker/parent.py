"""Ends a process when its parent is gone, also while it is deep in a call that lets no other thread run."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def end_with_parent(parent_pid: int) -> None:
    """Asks the kernel to kill this process when its parent dies (Linux; elsewhere standard input's end must do)."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it had died before
        os._exit(1)
