"""SIGTERM to a rank: it asks to leave its job, and is ended when that takes too long."""

import os
import signal
import threading
from collections.abc import Callable

LEAVE_S = 25.0
"""Seconds for which a rank may go on after SIGTERM, to commit its work. Kubernetes and Slurm kill after 30 s."""


def leave_on_sigterm(ask: Callable[[], None] = lambda: None) -> None:
    """Calls `ask` at the first SIGTERM, on another thread since it may take locks; a second SIGTERM ends the process.
    Forked processes end at the first.
    """
    rank = os.getpid()

    def on_sigterm(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if os.getpid() != rank:
            os.kill(os.getpid(), signal.SIGTERM)
            return
        threading.Thread(target=ask, name="leaving", daemon=True).start()
        timer = threading.Timer(LEAVE_S, os.kill, (rank, signal.SIGTERM))
        timer.daemon = True
        timer.start()

    signal.signal(signal.SIGTERM, on_sigterm)
