"""What a client may ask of a job, whatever way it asks: checked in one place."""

from elche.errors import InvalidJob
from elche_coordinator.core.describe import JobView
from elche_coordinator.core.events import CheckpointRequested, PauseRequested
from elche_coordinator.core.ids import JobId
from elche_coordinator.driver import Driver


def pause(driver: Driver, view: JobView, *, is_paused: bool) -> None:
    """Stops a job at its open round, or lets it go on. Raises `InvalidJob` for one that does not train."""
    if view.state not in ("training", "paused"):
        raise InvalidJob(f"job {view.job_id} is {view.state}; only one that trains can be paused, or go on")
    driver.handle(PauseRequested(job_id=JobId(view.job_id), is_paused=is_paused))


def request_checkpoint(driver: Driver, view: JobView) -> None:
    """Asks for a checkpoint with the next round. Raises `InvalidJob` for a job that makes no more rounds."""
    if view.state == "paused":
        raise InvalidJob(f"job {view.job_id} is paused, and a checkpoint is made with a round: let it go on first")
    if view.state != "training":
        raise InvalidJob(f"job {view.job_id} is {view.state}; only one that trains makes checkpoints")
    driver.handle(CheckpointRequested(job_id=JobId(view.job_id)))
