"""Checks that this host can start ranks: that their folders can be written to, and threads be started."""

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from elche_worker.agent.job_folders import problem_of

log = logging.getLogger(__name__)

LOOK_EVERY_S = 5.0
"""Seconds between two looks."""
NEEDED_THREADS = 16
"""Threads that a rank needs at least, those of gRPC among them."""
NO_THREADS = "can start no more threads: see `ulimit -u`, or its container's limit of processes"
"""Said of a worker whose host's, or user's, processes have taken all that may be."""


class Fitness:
    """Looks at the work folder and that for temporary files, and tells each change. A rank that ended for that would
    fail its job, and so would the next one; this way jobs are placed on other hosts, or wait.
    """

    def __init__(self, work_dir: Path, tell: Callable[[str], None]) -> None:
        """`tell` is called with why no ranks can be started, or with "" when they can again."""
        self._work_dir = work_dir
        self._tell = tell
        self._problem = ""
        self._looking = threading.Lock()
        """Held while looking and telling, so that what is told last is true."""
        self._telling = threading.Lock()
        """Held only to tell: a look takes long where the folder is on a network disk that does not answer."""

    def look(self) -> str:
        """Why no ranks can be started; empty if they can."""
        with self._looking:
            problem = problem_of(self._work_dir) or _problem_of_threads()
            with self._telling:
                before, self._problem = self._problem, problem
                if problem and not before:
                    log.error("%s: until it can, this host gets no more ranks", problem)
                elif before and not problem:
                    log.info("ranks can be started here again")
                if problem != before:
                    self._tell(problem)
            return problem

    def watch(self, stopped: threading.Event) -> None:
        """Looks until `stopped`."""
        while not stopped.wait(LOOK_EVERY_S):
            self.look()

    def tell_again(self) -> None:
        """Tells a coordinator that was just reached of a problem there is, without looking again at a slow disk."""
        with self._telling:
            if self._problem:
                self._tell(self._problem)


def _problem_of_threads() -> str:
    """Why a rank could not start its threads, as when a job has taken all processes of this user; or ""."""
    is_over, started = threading.Event(), []
    try:
        for _ in range(NEEDED_THREADS):
            one = threading.Thread(target=is_over.wait, daemon=True)
            one.start()
            started.append(one)
    except RuntimeError:
        return f"it {NO_THREADS}"
    finally:
        is_over.set()
        for one in started:
            one.join()
    return ""
