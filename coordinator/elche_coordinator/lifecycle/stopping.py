"""Shutdown after a signal: jobs that train write a checkpoint first, while all services go on.

The next coordinator may be of another version, which resumes jobs only from checkpoints (protocol P22.2).
"""

import asyncio
import logging
import os
import signal
import sys
import threading
from contextlib import suppress

from elche.stopping import StopSignals
from elche_coordinator.core.coordinator import Coordinator
from elche_coordinator.core.jobs.managed_job import ManagedJob
from elche_coordinator.core.messages.events import CheckpointRequested
from elche_coordinator.core.messages.ids import JobId
from elche_coordinator.core.records.machine import JobPhase
from elche_coordinator.driver import Driver

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.05
"""Seconds between checks that all is saved."""


class Stop:
    """Requests to stop this process, or to stop at once. Created before any address is listened on, since a client that
    finds it listening may stop it.
    """

    def __init__(self, *, exit_with_stdin: bool) -> None:
        """Each signal requests a stop, and one that hurries, or the end of standard input, a stop at once. Under nohup
        SIGHUP does nothing.
        """
        self._signals = StopSignals()
        self.asked = asyncio.Event()
        self.at_once = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGHUP, self._on_signal, signal.SIGHUP)
        if exit_with_stdin:
            threading.Thread(target=self._read_to_end, args=(loop,), daemon=True).start()

    def _on_signal(self, number: int) -> None:
        if self._signals.hurries(number):
            self.at_once.set()
        self.asked.set()

    def _read_to_end(self, loop: asyncio.AbstractEventLoop) -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        with suppress(RuntimeError):  # the loop is over: this process could not start
            # In this order: who waits for `asked` looks at `at_once` next.
            loop.call_soon_threadsafe(self.at_once.set)
            loop.call_soon_threadsafe(self.asked.set)


async def save_jobs(driver: Driver, stop: Stop, grace_s: float) -> None:
    """Has training jobs write checkpoints, and waits for these and for final models, at most `grace_s`."""
    if not grace_s or stop.at_once.is_set():
        return
    for job_id in unsaved(driver.core):
        driver.handle(CheckpointRequested(job_id=job_id))
    saving = being_saved(driver.core)
    if saving:
        log.info("%d jobs make a checkpoint before this coordinator stops, for at most %g s", len(saving), grace_s)
    end_s = asyncio.get_running_loop().time() + grace_s
    while saving and not stop.at_once.is_set() and asyncio.get_running_loop().time() < end_s:
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_EVERY_S):
                await stop.at_once.wait()
        left = being_saved(driver.core)
        saving = [job_id for job_id in saving if job_id in left]
    for job_id in saving:
        log.warning("job=%s has made no checkpoint in time: see --grace", job_id)


def unsaved(core: Coordinator) -> list[JobId]:
    """The trainings that would lose committed rounds now, and can write a checkpoint of them."""
    return [job_id for job_id, job in core.trainings.items() if _is_unsaved(job)]


def _is_unsaved(job: ManagedJob) -> bool:
    training = job.run.training
    if job.phase is not JobPhase.TRAINING or training is None or training.replay is not None or training.is_paused:
        return False
    return training.version > training.checkpoints.newest_version


def being_saved(core: Coordinator) -> list[JobId]:
    """The trainings that write a checkpoint or their final state, or are about to."""
    return [job_id for job_id, job in core.trainings.items() if _is_being_saved(job)]


def _is_being_saved(job: ManagedJob) -> bool:
    training = job.run.training
    if job.phase is JobPhase.FINISHING:
        return True
    if job.phase is not JobPhase.TRAINING or training is None:
        return False
    checkpoints = training.checkpoints
    # while training is paused, no round comes that could become a requested checkpoint
    return not checkpoints.is_idle or (checkpoints.is_awaited and not training.is_paused)
