"""Groups of job states."""

from elche_coordinator.core.messages.reports import Outcome
from elche_coordinator.core.records.machine import JobPhase

ENDED = tuple(str(outcome) for outcome in Outcome)
"""States of ended jobs: "succeeded", "failed" or "cancelled"."""
DECIDED = (str(JobPhase.STOPPING), *ENDED)
"""States in which a job's outcome is decided."""
BEFORE_TRAINING = (str(JobPhase.QUEUED), str(JobPhase.STARTING))
