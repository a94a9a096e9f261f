"""How long jobs that have ended are remembered: the newest so many are."""

import asyncio
import logging

from elche_coordinator.core.messages.events import JobsForgotten
from elche_coordinator.core.messages.ids import JobId
from elche_coordinator.driver import Driver
from elche_coordinator.history import History

EVERY_S = 60.0

log = logging.getLogger(__name__)


def forget(driver: Driver, history: History, keep_jobs: int) -> int:
    """Forgets the jobs that ended first, but for so many; returns how many these were."""
    past, present = history.job_ids(), driver.job_ids()
    if len(past) + len(present) <= keep_jobs:
        return 0
    views = [view for job_id in present if driver.result(job_id) and (view := driver.view(job_id)) is not None]
    ended = [*past, *(view.job_id for view in sorted(views, key=lambda view: -(view.ended_for_s or 0.0)))]
    old = tuple(JobId(job_id) for job_id in ended[: max(0, len(ended) - keep_jobs)])
    if old:
        history.forget(old)
        driver.handle(JobsForgotten(job_ids=old))
        log.info("%d jobs are forgotten, the oldest of %d that have ended", len(old), len(ended))
    return len(old)


async def forget_old(driver: Driver, history: History, keep_jobs: int) -> None:
    """Does so now and then."""
    while True:
        forget(driver, history, keep_jobs)
        await asyncio.sleep(EVERY_S)
