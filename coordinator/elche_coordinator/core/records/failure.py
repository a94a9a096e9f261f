"""Reasons for which a job, or a part of it, cannot go on."""

from dataclasses import dataclass

from elche_coordinator.core.messages.ids import Rank


@dataclass(frozen=True, slots=True)
class Failure:
    """The job fails. The part that finds it returns it to the job, and does nothing else."""

    error: str
    rank: Rank | None = None
    """The rank that failed; None if no rank did."""
    traceback: str = ""
    invalid: bool = False
    """True if the job is invalid, so that trying again does not help."""


@dataclass(frozen=True, slots=True)
class BackToCheckpoint:
    """The job goes back to its newest checkpoint."""

    rank: Rank
    """The rank whose end is the reason."""
    reason: str
