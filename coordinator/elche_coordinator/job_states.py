"""The states of a job, in the groups that the shell asks about."""

from elche_coordinator.core.messages.reports import Outcome
from elche_coordinator.core.records.machine import JobPhase

ENDED = tuple(str(outcome) for outcome in Outcome)
"""How a job ends: "succeeded", "failed" or "cancelled"."""
DECIDED = (str(JobPhase.STOPPING), *ENDED)
"""States in which the outcome of a job does not change any more."""
BEFORE_TRAINING = (str(JobPhase.QUEUED), str(JobPhase.STARTING), str(JobPhase.GROUPING))
