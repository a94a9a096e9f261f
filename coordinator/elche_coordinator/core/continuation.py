"""The continuation of a job under a coordinator of another version, which cannot read this one's state."""

from dataclasses import dataclass, replace

from elche_coordinator.core.life.job import Job
from elche_coordinator.core.messages.ids import Attempt, Incarnation
from elche_coordinator.core.messages.reports import JobResult, Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """How a coordinator of another version goes on with a job: it submits the job again with these values, or only
    records the result in `end`.
    """

    key: str
    """The submission's key."""
    submitted_at: float
    attempt: Attempt
    """The job's present attempt; the next one is counted from it."""
    last_incarnation: Incarnation
    """The highest incarnation of its processes; those that the other coordinator starts must be higher."""
    num_ranks: int
    """Ranks that it should have; 0 if it was not placed and its submission does not say."""
    min_ranks: int
    """Ranks with which it may begin."""
    resume: str
    """The checkpoint, or the folder of checkpoints, from which it goes on; empty: from its start."""
    resume_host: str
    resume_work_folder: str
    resume_version: int
    end: JobResult | None
    """The decided result, or a failure if it cannot go on without its processes; None: it goes on."""


def continuation(job: Job) -> Continuation:
    """The continuation of the job as it is now."""
    return Continuation(
        key=job.key,
        submitted_at=job.submitted_at,
        attempt=job.attempt,
        last_incarnation=job.roster.last_incarnation,
        num_ranks=job.num_wanted,
        # A job that has taken whatever was free begins with one rank and grows again (protocol P19.6).
        min_ranks=job.spec.min_ranks if job.spec.num_ranks else 1,
        resume=job.resumption.resume,
        resume_host=job.resumption.resume_host,
        resume_work_folder=job.resumption.resume_work_folder,
        resume_version=job.resumption.resume_version,
        end=job.result or job.decided_result() or _end_with_coordinator(job),
    )


def _end_with_coordinator(job: Job) -> JobResult | None:
    """The failed result of a job that cannot begin again once its processes have ended, with the figures of its last
    checkpoint, evaluation and epoch. None if it can.
    """
    if job.can_begin_again:
        return None
    whole = job.complete(JobResult(outcome=Outcome.FAILED))
    what = "resume it" if whole.checkpoints else "submit it again"
    error = f"the coordinator stopped while the job ran; {what}"
    kept = JobResult(outcome=Outcome.FAILED, error=error, checkpoints=whole.checkpoints, metrics=whole.metrics)
    return replace(kept, epochs=whole.epochs, dataset_size=whole.dataset_size)
