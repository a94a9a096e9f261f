"""A job whose processes agents start, as the queue and the placing of slots see it."""

from abc import abstractmethod
from collections.abc import Sequence

from elche_coordinator.core.jobs.deaths import Death
from elche_coordinator.core.jobs.places import NextIncarnation, Places
from elche_coordinator.core.life.job import Job
from elche_coordinator.core.messages.ids import JobId, Rank
from elche_coordinator.core.records.failure import Failure
from elche_coordinator.core.records.fleet import Fleet, Place
from elche_coordinator.core.records.machine import JobTrigger
from elche_coordinator.core.records.ranks import RankRecord


class PlacedJob(Job):
    """A training, or a submitted loop: it waits for slots, and its ranks hold them until their processes end."""

    number = 0
    """Its place among all placed jobs, by submission."""
    retry_at_s = 0.0
    """Time from which a queued job may be placed."""
    host_away_since_s: float | None = None
    """Since when it waits for an absent host that has its checkpoint; None: it does not."""
    when_placed = "its ranks load the file"
    """The reason of its phase once it is placed, for people."""
    places: Places
    """The ranks that it should have, and their slots."""

    @property
    def num_wanted(self) -> int:
        return self.places.num_wanted

    @property
    @abstractmethod
    def num_lacking(self) -> int:
        """Number of ranks that could be added now."""

    @property
    @abstractmethod
    def can_scale(self) -> bool:
        """True while its number of ranks can be changed."""

    def has_session_due(self, rank: Rank) -> bool:
        """False if the rank's process may run on without a session."""
        return True

    def place(self, groups: list[tuple[Place, ...]], fleet: Fleet, next_incarnation: NextIncarnation) -> None:
        """Starts one rank in each place, or group of places of one host."""
        self.advance(JobTrigger.PLACED, self.when_placed)
        self.places.place(groups, self.spec, fleet, next_incarnation)

    def place_again(
        self, rank: Rank, places: tuple[Place, ...], fleet: Fleet, next_incarnation: NextIncarnation
    ) -> None:
        """Restarts a missing rank, or adds one that is lacking."""
        self.places.add(rank, places, self.spec, fleet, next_incarnation, phase=self.phase)

    def on_no_place(self, rank: Rank, now_s: float) -> None:
        """Called when there is no slot for a rank that was killed while the job starts."""

    def refuse_places(self, num_places: int) -> bool:
        """Fails the job, and returns True, if it slows a rank that it will not have with `num_places` places."""
        num_ranks = max(num_places, self.spec.num_ranks)  # others may come later
        if missing := [rank for rank in self.spec.slow_factors if rank >= num_ranks]:
            error = f"rank {missing[0]} cannot be slowed: the job has {num_ranks} ranks, from 0"
            self.fail(Failure(error, invalid=True))
        return bool(missing)

    @abstractmethod
    def give_slots(self, num_ranks: int, to: JobId, now_s: float) -> None:
        """Has `num_ranks` ranks leave for another job."""

    @abstractmethod
    def leave(self, leaving: Sequence[RankRecord], now_s: float) -> None:
        """Has these ranks leave once their work is committed."""

    @abstractmethod
    def stay(self, records: Sequence[RankRecord], now_s: float) -> None:
        """Lets ranks stay that were to leave, such as when their host is offered again."""

    @abstractmethod
    def on_exited(self, record: RankRecord, death: Death, notice: str, now_s: float, *, log_tail: str = "") -> None:
        """Handles the end of a process."""
