"""State machines as tables from (phase, trigger) to phase, drawn in the docs.

There are three, coupled in few places:

- a **job**'s phase leads to TRAINING when the first group of its ranks stands, to FINISHING with its last round, back
  to QUEUED when no rank with its model is left, and to ENDED when all of its ranks have EXITED;
- a **rank**'s phase is what its process does. EXITED is the only trigger that every phase allows;
- a rank's **departure** says if it is to leave, and how. From DISMISSED, LEFT_OUT and STOPPED on, its reports on work
  are refused, so that its phase stays until it has EXITED. The others wait for a rank that is STOPPED, but not for the
  rest.

Job and rank phases refuse a trigger that is not in their table; a departure ignores it.
"""

from collections import Counter
from collections.abc import Mapping
from enum import Enum, StrEnum, auto
from typing import Generic, TypeVar

Phase = TypeVar("Phase", bound=StrEnum)
Trigger = TypeVar("Trigger", bound=StrEnum)


class Refused(Exception):
    """The phase does not allow the trigger. Nothing was changed."""

    def __init__(self, state: str, trigger: str) -> None:
        super().__init__(f"{state}: {trigger} has no place there")
        self.state = state
        self.trigger = trigger


class Machine(Generic[Phase, Trigger]):
    """A state machine that moves only along its table. Several may share a census, the number of machines in each
    phase, so that "how many ranks are ready" costs no loop over all ranks.
    """

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
        """True if the present phase allows the trigger."""
        return (self.phase, trigger) in self._table

    def advance(self, trigger: Trigger) -> None:
        """Moves to the table's phase. Raises `Refused`, and changes nothing, when it has none."""
        if not self.accepts(trigger):
            raise Refused(f"{self._what} is {self.phase}", trigger)
        self._census[self.phase] -= 1
        self.phase = self._table[self.phase, trigger]
        self._census[self.phase] += 1


class JobPhase(StrEnum):
    """Phase of a job."""

    QUEUED = "queued"
    """It waits for slots; processes of an attempt before may still be ending."""
    STARTING = "starting"
    """Its processes load the user's file; not all are ready."""
    GROUPING = "grouping"
    """All are ready, and form the first generation's process group."""
    TRAINING = "training"
    """A generation has stood, and not all samples are committed."""
    FINISHING = "finishing"
    """All samples are committed; evaluations, checkpoints or the final state are still to be made."""
    STOPPING = "stopping"
    """Its outcome is decided; processes are being ended."""
    ENDED = "ended"
    """All its processes have exited. Nothing about the job changes any more."""


class JobTrigger(StrEnum):
    """Triggers of a job's phases."""

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
    """Phase of a rank."""

    STARTING = "starting"
    """Its process was ordered, and may not have begun; it has not said that it is ready."""
    READY = "ready"
    """It has loaded the user's file, and is in no generation that stands."""
    TRAINING = "training"
    """It is, or was, in a generation that stood, and in no round."""
    AVERAGING = "averaging"
    """It has entered a round and not said how that ended; it may train on meanwhile."""
    EXITED = "exited"
    """Its process has ended, or its host is lost."""


class RankTrigger(StrEnum):
    """Triggers of a rank's phases."""

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
    """A new rank's state machine."""
    return Machine("rank", RANK_PHASES, RankPhase.STARTING, census)


class Departure(StrEnum):
    """The way in which a rank that has not exited leaves: a second state machine in addition to its phase."""

    STAYS = "stays"
    LEAVING = "leaving"
    """It exits once its work is in a committed round."""
    DISMISSED = "dismissed"
    """Its work is committed, and it was asked to exit."""
    LEFT_OUT = "left out"
    """The others go on without it, such as because it hangs, or its job has gone back: its process is being ended."""
    STOPPED = "stopped"
    """Its process is being ended; until it has exited the others wait for it."""


class DepartureTrigger(StrEnum):
    """Triggers of a rank's departure."""

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
"""Triggers that are not in the table are ignored: a rank that is being ended does not return."""


class Model(StrEnum):
    """The model that a rank has."""

    NONE = "none"
    """None yet: it was started while others trained, and gets theirs with the next round."""
    START = "start"
    """The initial one of its attempt: a checkpoint's, or that of the user's file."""
    PRESENT = "present"
    """The job's present one, from a committed round."""


class Hold(Enum):
    """Reasons for which ranks stop at the last announced round."""

    ASKED = auto()
    """A client has paused the job."""
    TOO_FEW = auto()
    """There are fewer ranks than the job's least number."""
