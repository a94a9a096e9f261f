"""Reports to a job's watchers, and a job's result: the shared declarations with the coordinator's own fields."""

from dataclasses import dataclass, field, replace
from enum import StrEnum

from elche import reports
from elche.reports import EpochReport, EvaluationReport, MembershipReport, RankResult, StallReport
from elche_coordinator.core.messages.spec import JobSpec, RecordedRound

__all__ = [
    "Checkpoint",
    "EpochReport",
    "EvaluationReport",
    "JobResult",
    "MembershipReport",
    "Outcome",
    "RankResult",
    "Report",
    "RoundReport",
    "StallReport",
    "UserEvent",
]


class Outcome(StrEnum):
    """The outcome of a job."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


ENDED_EARLY = "ended early"
"""Told to ranks in place of `SUCCEEDED` if the job has succeeded before it has trained all epochs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReport(reports.RoundReport):
    """One committed round, with the data to repeat it."""

    recorded: RecordedRound = field(default_factory=lambda: RecordedRound(parts=()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint(reports.Checkpoint):
    """A complete checkpoint, with the folder name that its writer was given."""

    name: str
    host: str = ""
    """Name of the host that wrote it."""
    work_folder: str = ""
    """Id of the work folder that it is in; empty: it is elsewhere, or this is unknown."""

    def resumed_by(self, spec: JobSpec) -> JobSpec:
        """The submission of a job that resumes from the newest checkpoint where this one is: that may be a newer one,
        which the coordinator does not know.
        """
        folder = self.path.rpartition("/")[0]
        found = replace(spec, resume=folder, resume_version=self.version)
        return replace(found, resume_host=self.host, resume_work_folder=self.work_folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class UserEvent(reports.UserEvent):
    """An event of a rank, by user code or by the coordinator."""

    is_of_user: bool = False
    """True if user code has recorded it; such events are not logged, as there may be many a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult(reports.JobResult):
    """A job's result, with the rank that caused it."""

    outcome: Outcome
    checkpoints: tuple[Checkpoint, ...] = ()
    failed_rank: int | None = None
    """The rank whose end or error failed the job; None if no rank did."""
    model_agent_id: str = ""
    """The agent that had the model."""
    model_folder: str = ""
    """Id of that agent's work folder, which another agent may use now; empty: unknown."""


Report = (
    RoundReport | EpochReport | EvaluationReport | StallReport | MembershipReport | Checkpoint | UserEvent | JobResult
)
