"""Jobs with unsaved progress, for a coordinator that stops.

A coordinator of another version can only resume jobs from checkpoints (protocol P22.2).
"""

from elche_coordinator.core.jobs.managed_job import ManagedJob
from elche_coordinator.core.records.machine import JobPhase


def is_unsaved(job: ManagedJob) -> bool:
    """True if the job can write a checkpoint now that is newer than its newest one."""
    training = job.run.training
    if job.phase is not JobPhase.TRAINING or training is None or training.replay is not None or training.is_paused:
        return False
    return training.version > training.checkpoints.newest_version


def is_being_saved(job: ManagedJob) -> bool:
    """True if the job writes its final state or a checkpoint, or is about to."""
    training = job.run.training
    if job.phase is JobPhase.FINISHING:
        return True
    if job.phase is not JobPhase.TRAINING or training is None:
        return False
    checkpoints = training.checkpoints
    # while training is paused, no round comes that could become a requested checkpoint
    return not checkpoints.is_idle or (checkpoints.is_awaited and not training.is_paused)
