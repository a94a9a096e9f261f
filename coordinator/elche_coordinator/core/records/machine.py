"""Phases as data: tables from (phase, trigger) to phase, drawn in the docs.

There are three, and they are coupled in few places:

- a **job**'s phase leads to TRAINING when the first group of its ranks stands, to FINISHING with its last round, back
  to QUEUED when nobody is left who has its model, and to ENDED when all of its ranks have EXITED;
- a **rank**'s phase is what its process does. Exiting is the only trigger that every phase takes;
- a rank's **departure** says whether it is to go. From DISMISSED, LEFT_OUT and STOPPED on, what the rank says of its
  work is refused, so its phase stays what it was until it has EXITED. The others wait for one that is STOPPED, and for
  no other of these.

A job, and a rank's phase, refuse a trigger that has no place; a departure ignores it.
"""

from collections import Counter
from collections.abc import Mapping
from enum import Enum, StrEnum, auto
from typing import Generic, TypeVar

Phase = TypeVar("Phase", bound=StrEnum)
Trigger = TypeVar("Trigger", bound=StrEnum)


class Refused(Exception):
    """The trigger has no place in the phase. Nothing was changed."""

    def __init__(self, state: str, trigger: str) -> None:
        super().__init__(f"{state}: {trigger} has no place there")
        self.state = state
        self.trigger = trigger


class Machine(Generic[Phase, Trigger]):
    """One thing's phase, moved only along its table. Several may share a census: how many are in each phase."""

    __slots__ = ("_census", "_table", "_what", "phase")

    def __init__(
        self,
        what: str,
        table: Mapping[tuple[Phase, Trigger], Phase],
        start: Phase,
        census: "Counter[Phase] | None" = None,
    ) -> None:
        self._what = what
        self._table = table
        self._census: Counter[Phase] = Counter() if census is None else census
        self._census[start] += 1
        self.phase = start

    def accepts(self, trigger: Trigger) -> bool:
        """True if the trigger has a place in the present phase."""
        return (self.phase, trigger) in self._table

    def advance(self, trigger: Trigger) -> None:
        """Moves to the table's phase. Raises `Refused`, and changes nothing, when it has none."""
        if not self.accepts(trigger):
            raise Refused(f"{self._what} is {self.phase}", trigger)
        self._census[self.phase] -= 1
        self.phase = self._table[self.phase, trigger]
        self._census[self.phase] += 1


class JobPhase(StrEnum):
    """Where a job is in its life."""

    QUEUED = "queued"
    STARTING = "starting"
    GROUPING = "grouping"
    TRAINING = "training"
    FINISHING = "finishing"
    STOPPING = "stopping"
    ENDED = "ended"


class JobTrigger(StrEnum):
    """What moves a job."""

    PLACED = "placed"
    RANKS_READY = "ranks ready"
    GROUP_FORMED = "group formed"
    LAST_ROUND_COMMITTED = "last round committed"
    WENT_BACK = "went back to a checkpoint"
    OUTCOME_DECIDED = "outcome decided"
    RANKS_GONE = "ranks gone"


JOB_PHASES: dict[tuple[JobPhase, JobTrigger], JobPhase] = {
    (JobPhase.QUEUED, JobTrigger.PLACED): JobPhase.STARTING,
    (JobPhase.STARTING, JobTrigger.RANKS_READY): JobPhase.GROUPING,
    (JobPhase.GROUPING, JobTrigger.GROUP_FORMED): JobPhase.TRAINING,
    (JobPhase.TRAINING, JobTrigger.LAST_ROUND_COMMITTED): JobPhase.FINISHING,
    (JobPhase.STARTING, JobTrigger.WENT_BACK): JobPhase.QUEUED,
    (JobPhase.GROUPING, JobTrigger.WENT_BACK): JobPhase.QUEUED,
    (JobPhase.TRAINING, JobTrigger.WENT_BACK): JobPhase.QUEUED,
    (JobPhase.FINISHING, JobTrigger.WENT_BACK): JobPhase.QUEUED,
    (JobPhase.QUEUED, JobTrigger.OUTCOME_DECIDED): JobPhase.STOPPING,
    (JobPhase.STARTING, JobTrigger.OUTCOME_DECIDED): JobPhase.STOPPING,
    (JobPhase.GROUPING, JobTrigger.OUTCOME_DECIDED): JobPhase.STOPPING,
    (JobPhase.TRAINING, JobTrigger.OUTCOME_DECIDED): JobPhase.STOPPING,
    (JobPhase.FINISHING, JobTrigger.OUTCOME_DECIDED): JobPhase.STOPPING,
    (JobPhase.STOPPING, JobTrigger.RANKS_GONE): JobPhase.ENDED,
}


class RankPhase(StrEnum):
    """Where a rank is in its life."""

    STARTING = "starting"
    READY = "ready"
    TRAINING = "training"
    AVERAGING = "averaging"
    EXITED = "exited"


class RankTrigger(StrEnum):
    """What moves a rank."""

    LOADED = "loaded"
    GROUPED = "grouped"
    ENTERED_ROUND = "entered round"
    RECEIVED_RESULT = "received result"
    GAVE_ROUND_UP = "gave round up"
    EXITED = "exited"


RANK_PHASES: dict[tuple[RankPhase, RankTrigger], RankPhase] = {
    (RankPhase.STARTING, RankTrigger.LOADED): RankPhase.READY,
    (RankPhase.READY, RankTrigger.GROUPED): RankPhase.TRAINING,
    (RankPhase.TRAINING, RankTrigger.ENTERED_ROUND): RankPhase.AVERAGING,
    (RankPhase.AVERAGING, RankTrigger.RECEIVED_RESULT): RankPhase.TRAINING,
    (RankPhase.AVERAGING, RankTrigger.GAVE_ROUND_UP): RankPhase.TRAINING,
    (RankPhase.STARTING, RankTrigger.EXITED): RankPhase.EXITED,
    (RankPhase.READY, RankTrigger.EXITED): RankPhase.EXITED,
    (RankPhase.TRAINING, RankTrigger.EXITED): RankPhase.EXITED,
    (RankPhase.AVERAGING, RankTrigger.EXITED): RankPhase.EXITED,
}


def rank_machine(census: "Counter[RankPhase] | None" = None) -> Machine[RankPhase, RankTrigger]:
    """The life of a rank that is starting."""
    return Machine("rank", RANK_PHASES, RankPhase.STARTING, census)


class Departure(StrEnum):
    """Whether, and how, a rank that has not exited is to go: a second machine beside its phase."""

    STAYS = "stays"
    LEAVING = "leaving"
    """It exits as soon as its work is in a committed round."""
    DISMISSED = "dismissed"
    """Its work is committed, and it was asked to exit."""
    LEFT_OUT = "left out"
    """It hangs: the others go on without it, and its process is to be ended."""
    STOPPED = "stopped"
    """Its process is to be ended; until it has exited the others wait for it."""


class DepartureTrigger(StrEnum):
    """What has a rank go, or stay."""

    ASKED = "asked to leave"
    TAKEN_BACK = "may stay"
    WORK_COMMITTED = "work committed"
    LEFT_OUT = "left out"
    STOPPED = "stopped"


DEPARTURES: dict[tuple[Departure, DepartureTrigger], Departure] = {
    (Departure.STAYS, DepartureTrigger.ASKED): Departure.LEAVING,
    (Departure.STAYS, DepartureTrigger.WORK_COMMITTED): Departure.DISMISSED,
    (Departure.STAYS, DepartureTrigger.LEFT_OUT): Departure.LEFT_OUT,
    (Departure.STAYS, DepartureTrigger.STOPPED): Departure.STOPPED,
    (Departure.LEAVING, DepartureTrigger.TAKEN_BACK): Departure.STAYS,
    (Departure.LEAVING, DepartureTrigger.WORK_COMMITTED): Departure.DISMISSED,
    (Departure.LEAVING, DepartureTrigger.LEFT_OUT): Departure.LEFT_OUT,
    (Departure.LEAVING, DepartureTrigger.STOPPED): Departure.STOPPED,
    (Departure.STOPPED, DepartureTrigger.WORK_COMMITTED): Departure.DISMISSED,
    (Departure.STOPPED, DepartureTrigger.LEFT_OUT): Departure.LEFT_OUT,
}
"""What is not in it changes nothing: a rank that is to go does not come back."""


class Model(StrEnum):
    """Which model a rank has."""

    NONE = "none"
    """It was started while others trained, and gets theirs with the next round."""
    START = "start"
    """What its attempt began with: a checkpoint, or what the user's file makes."""
    PRESENT = "present"
    """The job's: it has the result of a committed round."""


class Hold(Enum):
    """Why ranks that could train stop at the last announced round."""

    ASKED = auto()
    """Somebody has paused the job."""
    TOO_FEW = auto()
    """There are fewer of them than the job's least number."""
