"""What a job's body offers: a managed training (`managed`), or a loop of the user's own (`attached`)."""

from collections.abc import Sequence
from typing import Protocol

from elche_coordinator.core.jobs.deaths import Deaths
from elche_coordinator.core.jobs.hangs import Duty
from elche_coordinator.core.jobs.stalls import StallWatch
from elche_coordinator.core.messages.events import BodyEvent
from elche_coordinator.core.messages.ids import Attempt, GenerationId, Rank
from elche_coordinator.core.messages.reports import JobResult
from elche_coordinator.core.records.ranks import RankRecord


class Body(Protocol):
    """What runs in a job."""

    @property
    def attempt(self) -> Attempt:
        """Raised whenever the job goes back to a checkpoint; 1 at first."""
        ...

    @property
    def generation_id(self) -> GenerationId:
        """The present generation of ranks; 0 before the first, and where there is none."""
        ...

    @property
    def is_paused(self) -> bool:
        """Whether its ranks stop, or have stopped, until they may go on."""
        ...

    def take_in(self, record: RankRecord, event: BodyEvent, now_s: float) -> None:
        """What a rank reports of its work. What has no place here is refused, and changes nothing."""
        ...

    def request_checkpoint(self) -> None:
        """A client wants a checkpoint."""
        ...

    def pause(self, now_s: float, *, is_paused: bool) -> None:
        """A client wants the ranks to stop, or to go on."""
        ...

    def duty(self, record: RankRecord, stalls: StallWatch) -> Duty:
        """What the rank has to do now, and how long it may be silent."""
        ...

    def has_batch_due(self, record: RankRecord) -> bool:
        """Whether the rank trains, and neither waits for others nor does something else."""
        ...

    def on_session_lost(self, record: RankRecord) -> None:
        """The rank's stream is lost."""
        ...

    def check_links(self, now_s: float) -> None:
        """Looks for ranks that cannot reach each other, where that holds an averaging up."""
        ...

    def blame(self, record: RankRecord, deaths: Deaths, now_s: float) -> str | None:
        """The rank has died: says so when it is one of several that have died on the same samples."""
        ...

    def can_lose(self, record: RankRecord) -> bool:
        """Whether the job can go on without the rank."""
        ...

    def lose(self, record: RankRecord, now_s: float) -> None:
        """The rank is gone, or is not waited for any more: the others go on."""
        ...

    def leave(self, leaving: Sequence[RankRecord], now_s: float) -> None:
        """These ranks are to go as soon as their work is committed."""
        ...

    def stay(self, records: Sequence[RankRecord], now_s: float) -> None:
        """They need not leave after all."""
        ...

    def goes_back(self, *, is_violent: bool) -> bool:
        """Whether the job begins anew when it cannot go on without a rank, which may have ended violently."""
        ...

    @property
    def resume_point(self) -> str:
        """From which checkpoint it would begin anew; empty: from its start."""
        ...

    @property
    def has_saved(self) -> bool:
        """Whether this attempt has come to a checkpoint."""
        ...

    def anew(self) -> "Body":
        """The body of the job's next attempt."""
        ...

    def on_deadline(self) -> None:
        """The time set by `set_deadline` has passed."""
        ...

    def work_done(self) -> dict[Rank, int]:
        """How much each rank has done, in a unit of the body's own: for shares."""
        ...

    def complete(self, result: JobResult) -> JobResult:
        """The result with what has come of the body."""
        ...
