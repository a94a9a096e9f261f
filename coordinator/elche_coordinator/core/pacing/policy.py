"""The interface of policies: from the ranks' speeds and the work that is left they plan the next rounds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from elche_coordinator.core.messages.ids import Rank
from elche_coordinator.core.pacing.divergence import Drift


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """One rank's speed and position. Batches are counted from the last committed round."""

    rank: Rank
    ms_per_batch: float | None
    """Time of one of its batches by the latest reports; None before the first."""
    batch_size: int = 1
    """Samples in its batches."""
    ratio: float = 1.0
    """Its batch size relative to the job's. Free work is counted in batches of the job's size."""
    made: int = 0
    """Batches trained."""
    leased: int = 0
    """Batches leased, up to the last one of this epoch, those made included."""
    leased_total: int = 0
    """All batches leased; those after the first `leased` are of later epochs."""
    delay_ms: float = 0.0
    """Time from now until it begins the batch after those in `made`; negative if it has begun it already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Work that is not leased yet."""

    epoch_batches: int
    """Batches of a whole epoch."""
    free_batches: int
    """Batches of this epoch that no rank has."""
    free_samples: int
    """Samples of this epoch that no rank has."""
    free_later: int
    """Batches of later epochs that no rank has; 0 in the last epoch."""
    open_rounds: int = 0
    """Rounds that are announced and not committed."""
    granted: int = 0
    """Batches from the last committed round to the last announced one."""
    overlap_ms: float = 0.0
    """Duration in ms of an averaging during which ranks train on; 0 if they wait for it."""
    round_trip_ms: float = 0.0
    """Round trip of a message to a rank, in ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan:
    """The next round or rounds."""

    counts: dict[Rank, int]
    """Batches that each rank makes from the last committed round until the first of the planned ones."""
    lease_samples: dict[Rank, int] = field(default_factory=dict)
    """Samples of this epoch to lease to each rank."""
    lease_later: dict[Rank, int] = field(default_factory=dict)
    """Samples of later epochs to lease to each rank, of the next one first."""
    num_rounds: int = 1
    """Rounds to announce, one batch apart; more than one only under `sync`."""
    is_fixed: bool = False
    """True if its targets are not revised as those of other rounds: they end the epoch, or keep ranks within
    `max_batch_diff`.
    """
    ends_epoch: bool = False
    """True if its batches complete the epoch."""
    is_announced: bool = True
    """False: the round is announced when it is due, and ranks train on until then."""
    reason: str
    """Why, for people."""


class Policy(Protocol):
    """Decides when ranks average, and how many batches each makes until then. The methods with a body are those of a
    policy that announces its rounds as it plans them, and learns no more than `is_calibrated`.
    """

    can_revise: bool
    """True if announced rounds may get other targets."""
    stops_ranks: bool
    """True if ranks may make no batch beyond the last announced round."""

    @property
    def anchor(self) -> int:
        """Batches of the slowest rank between averagings."""

    @property
    def is_calibrated(self) -> bool:
        """True if the ranks' speeds have been measured."""

    def plan(self, paces: Sequence[Pace], work: Work) -> RoundPlan | None:
        """The next rounds; None when no more are to be granted now."""

    def revise(self, paces: Sequence[Pace], elapsed_ms: float) -> dict[Rank, int]:
        """New counts for an announced round, counted as its old ones are; only when `can_revise`."""
        return {}

    def spare(self, pace: Pace, work: Work) -> int:
        """Batches to lease beyond the next round, so that the rank has work until the round after is planned."""
        return 0

    def due(self, paces: Sequence[Pace], work: Work) -> bool:
        """True if a round that was planned and not announced should be announced now."""
        return False

    def learn(
        self,
        wall_ms: Mapping[Rank, float],
        num_batches: Mapping[Rank, int],
        sync_ms: float,
        drift: Drift = Drift.CALM,
    ) -> None:
        """Learns from a committed round. `wall_ms`: time of each rank's batches, waits for data included;
        `num_batches`: how many they were; `sync_ms`: training time that the averaging cost.
        """

    def to_json(self) -> dict[str, object]:
        """Its learned state, as plain values."""
        return {}

    def restore(self, state: Mapping[str, Any], like: Sequence[Sequence[int]] | None = None) -> None:
        """Goes on from what `to_json` gave. `like` has for each rank those of the earlier training whose speed it takes
        over; by default the one of its number (row E10).
        """
        return
