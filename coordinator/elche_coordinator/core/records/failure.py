"""Why a job, or a part of it, cannot go on as before."""

from dataclasses import dataclass

from elche_coordinator.core.messages.ids import Rank


@dataclass(frozen=True, slots=True)
class Failure:
    """The job ends. What finds one returns it to the job, and does nothing more."""

    error: str
    rank: Rank | None = None
    """Whose failure it is; None where it is no rank's."""
    traceback: str = ""
    invalid: bool = False
    """True when the job asks for what cannot be: trying it again does not help."""


@dataclass(frozen=True, slots=True)
class BackToCheckpoint:
    """The job begins again at its newest checkpoint."""

    rank: Rank
    """Whose end is the reason."""
    reason: str
