"""SIGTERM to a rank: others are asked to do without it, and it ends by itself when that takes too long."""

import os
import signal
import threading
from collections.abc import Callable

LEAVE_S = 25.0
"""How long a rank that got SIGTERM may go on, so that its work is committed. Kubernetes and Slurm kill after 30 s."""


def leave_on_sigterm(ask: Callable[[], None] = lambda: None) -> None:
    """`ask`, which may take locks, is called on another thread at the first SIGTERM; a second one ends the process.
    Processes that it forks end at the first.
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
