"""What watchers of a job get, and how a job ended: the shared declarations, and what the coordinator adds."""

from dataclasses import dataclass, field
from enum import StrEnum

from elche import reports
from elche.reports import EpochReport, EvaluationReport, MembershipReport, RankResult, StallReport, UserEvent
from elche_coordinator.core.messages.spec import RecordedRound

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
    """How a job ends."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReport(reports.RoundReport):
    """One committed round, as it can be repeated."""

    recorded: RecordedRound = field(default_factory=lambda: RecordedRound(parts=()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint(reports.Checkpoint):
    """A complete checkpoint, with the folder's name that its writer was given."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult(reports.JobResult):
    """How a job ended, and by whom."""

    outcome: Outcome
    checkpoints: tuple[Checkpoint, ...] = ()
    failed_rank: int | None = None
    """The rank whose end, or whose error, failed the job; None where it was no rank's."""
    model_agent_id: str = ""
    """The agent that had the model."""
    model_folder: str = ""
    """Identifies that agent's work folder, which another agent may have now; empty: not known."""


Report = (
    RoundReport | EpochReport | EvaluationReport | StallReport | MembershipReport | Checkpoint | UserEvent | JobResult
)
