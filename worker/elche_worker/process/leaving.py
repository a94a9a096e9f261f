"""SIGTERM to a rank, or its agent's signal: the rank asks to leave its job, and is killed if that takes too long."""

import os
import signal
import threading
from collections.abc import Callable

LEAVE_S = 25.0
"""Seconds for which a rank may go on after SIGTERM, to commit its work. Kubernetes and Slurm kill after 30 s."""
ALONE_AFTER_S = 1.5
"""Seconds without a connection to the coordinator after which a rank that is to leave stops by itself: enough to
connect again after a short break."""
ASK = signal.SIGRTMIN + 6 if hasattr(signal, "SIGRTMIN") else signal.SIGTERM
"""The agent's signal to a rank that is to leave. A rank that is leaving ignores it: it may have got SIGTERM before, as
all processes of a host do when that is shut down.
"""
END = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGKILL
"""The agent's signal that ends a rank. Not SIGTERM, at which the rank would commit its work first, nor SIGHUP: all
processes of a session that is ended get that.
"""


def leave_on_sigterm(ask: Callable[[], None] = lambda: None) -> Callable[[], bool]:
    """Calls `ask` at the first SIGTERM or `ASK`, on another thread since it may take locks; a SIGTERM after that ends
    the process. Forked processes end at the first. SIGHUP does nothing: it comes with SIGTERM where a session is ended.

    Returns a function for the time after user code has begun, which may handle SIGTERM as scripts do, by ending: it
    takes the signal back, and returns True if it was taken.
    """
    rank, is_told = os.getpid(), False

    def on_sigterm(*_: object) -> None:
        nonlocal is_told
        is_told = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if os.getpid() != rank:
            os.kill(os.getpid(), signal.SIGTERM)
            return
        threading.Thread(target=ask, name="leaving", daemon=True).start()
        timer = threading.Timer(LEAVE_S, os.kill, (rank, signal.SIGTERM))
        timer.daemon = True
        timer.start()

    def on_ask(*_: object) -> None:
        if not is_told:
            on_sigterm()

    def take_back() -> bool:
        is_taken = not is_told and signal.getsignal(signal.SIGTERM) is not on_sigterm
        if is_taken:
            signal.signal(signal.SIGTERM, on_sigterm)
        return is_taken

    # Under nohup it is ignored, also by programs that a job starts. Elsewhere these are to be ended by it: they would
    # inherit SIG_IGN, and do not inherit a handler.
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)
    signal.signal(ASK, on_ask)
    signal.signal(signal.SIGTERM, on_sigterm)  # last: without real-time signals, ASK is SIGTERM
    return take_back


def leaves_later() -> bool:
    """True in a rank, and in processes that it forks: at SIGTERM it goes on, to commit its work first."""
    return callable(signal.getsignal(ASK))
