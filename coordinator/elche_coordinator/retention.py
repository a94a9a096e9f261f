"""How long jobs that have ended are remembered: the newest so many are."""

import asyncio

from elche_coordinator.catalogue import JobCatalogue

EVERY_S = 60.0


async def forget_old(catalogue: JobCatalogue, keep_jobs: int) -> None:
    """Forgets the others now and then."""
    while True:
        catalogue.forget_oldest(keep_jobs)
        await asyncio.sleep(EVERY_S)
