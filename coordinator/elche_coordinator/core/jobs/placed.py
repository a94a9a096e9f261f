"""A job whose processes agents start, as the queue and the placing of slots see it."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence

from elche_coordinator.core.jobs.deaths import Death
from elche_coordinator.core.life.job import Job
from elche_coordinator.core.messages.ids import Incarnation, JobId, Rank
from elche_coordinator.core.records.fleet import Fleet, Place
from elche_coordinator.core.records.ranks import RankRecord


class PlacedJob(Job):
    """A training, or a submitted loop: it waits for slots, and its ranks hold them until their processes end."""

    number = 0
    """Its place among all placed jobs, by submission."""
    retry_at_s = 0.0
    """Time from which a queued job may be placed."""

    @property
    @abstractmethod
    def missing(self) -> Mapping[Rank, float]:
        """Ranks to restart, with the earliest time of each."""

    @property
    @abstractmethod
    def num_lacking(self) -> int:
        """Number of ranks that could be added now."""

    @property
    @abstractmethod
    def next_rank(self) -> Rank:
        """The rank to add next."""

    @property
    @abstractmethod
    def can_scale(self) -> bool:
        """True while its number of ranks can be changed."""

    def has_session_due(self, rank: Rank) -> bool:
        """False if the rank's process may run on without a session."""
        return True

    @abstractmethod
    def place(self, groups: list[tuple[Place, ...]], fleet: Fleet, next_incarnation: Callable[[], Incarnation]) -> None:
        """Starts one rank in each place, or group of places of one host."""

    @abstractmethod
    def place_again(
        self, rank: Rank, places: tuple[Place, ...], fleet: Fleet, next_incarnation: Callable[[], Incarnation]
    ) -> None:
        """Restarts a rank, or adds one."""

    @abstractmethod
    def refuse_places(self, num_places: int) -> bool:
        """Fails the job, and returns True, if it cannot run with `num_places` places."""

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
