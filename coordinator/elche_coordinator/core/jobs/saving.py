"""What of a job would be lost with this coordinator's state, and whether it is being saved.

A coordinator of another version goes on from checkpoints alone (protocol P22.2), so one that is to stop asks.
"""

from elche_coordinator.core.jobs.training_job import TrainingJob
from elche_coordinator.core.records.machine import JobPhase


def is_unsaved(job: TrainingJob) -> bool:
    """True if a checkpoint that is asked for now comes, and has more than the newest one."""
    training = job.run.training
    if job.phase is not JobPhase.TRAINING or training is None or training.replay is not None or training.is_paused:
        return False
    return training.version > training.checkpoints.newest_version


def is_being_saved(job: TrainingJob) -> bool:
    """True if it writes its final state, or a checkpoint, or is about to."""
    training = job.run.training
    if job.phase is JobPhase.FINISHING:
        return True
    if job.phase is not JobPhase.TRAINING or training is None:
        return False
    checkpoints = training.checkpoints
    return not checkpoints.is_idle or (checkpoints.is_awaited and not training.is_paused)
