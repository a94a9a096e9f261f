"""Retention: only the newest ended jobs are kept."""

import asyncio

from elche_coordinator.catalogue import JobCatalogue

EVERY_S = 60.0
"""Seconds between two looks for jobs to forget."""


async def forget_old(catalogue: JobCatalogue, keep_jobs: int) -> None:
    """Periodically forgets older ended jobs."""
    while True:
        catalogue.forget_oldest(keep_jobs)
        await asyncio.sleep(EVERY_S)
