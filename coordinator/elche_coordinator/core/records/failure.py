"""Reasons for which a job, or a part of it, cannot go on."""

from dataclasses import dataclass

from elche.formatting import shortened
from elche_coordinator.core.messages.ids import Rank

MAX_ERROR_CHARS = 4096
MAX_TRACEBACK_CHARS = 1 << 14
"""With its error, what stays in memory of each of the many jobs that have failed."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The job fails. The part that finds it returns it to the job, and does nothing else."""

    error: str
    rank: Rank | None = None
    """The rank that failed; None if no rank did."""
    traceback: str = ""
    invalid: bool = False
    """True if the job is invalid, so that trying again does not help."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "error", shortened(self.error, MAX_ERROR_CHARS))
        object.__setattr__(self, "traceback", shortened(self.traceback, MAX_TRACEBACK_CHARS))


@dataclass(frozen=True, slots=True)
class BackToCheckpoint:
    """The job goes back to its newest checkpoint."""

    rank: Rank
    """The rank whose end is the reason."""
    reason: str
