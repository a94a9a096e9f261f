"""One averaging round, from its announcement to its outcome."""

from collections import Counter
from dataclasses import dataclass, field
from math import inf

from elche.contributions import discarded
from elche.header import header_digest
from elche.settings import AgreedSettings
from elche_coordinator.core.messages.events import ResultReceived
from elche_coordinator.core.messages.ids import GenerationId, Rank, RoundId, by_rank
from elche_coordinator.core.messages.spec import HeaderRow
from elche_coordinator.core.records.failure import Failure


@dataclass(slots=True, kw_only=True)
class Round:
    """An announced round. It commits when every member of its generation has received the result."""

    id: RoundId
    generation: GenerationId
    targets: dict[Rank, int]
    """The members, in the order of the header's rows, and the local step after which each joins."""
    at_s: float
    """Time of its announcement or last revision."""
    is_fixed: bool = False
    """True if its targets are not revised as those of other rounds."""
    ends_epoch: bool = False
    """True if its batches complete the epoch. Its targets follow the time at which the last of these is expected."""
    is_granted: bool = False
    """True if it was not announced, but entered by grant while the coordinator was away."""
    checkpoint_writer: Rank | None = None
    """The member that captures state for a checkpoint of the result; None: the round becomes none."""
    first_targets: dict[Rank, int] = field(init=False)
    """The targets as first announced; revisions raise them by at most one anchor in all."""
    entered: dict[Rank, None] = field(default_factory=dict)
    """Members that have entered it, in this order."""
    results: dict[Rank, ResultReceived] = field(default_factory=dict)
    """Members that have the result. A member is in `results` or in `failures`, never in both."""
    failures: dict[Rank, str] = field(default_factory=dict)
    """Members without the result, and why they will not get it."""
    reported_header: tuple[HeaderRow, ...] = ()
    """The header's rows, if a member has sent them when the generation was abandoned."""

    def __post_init__(self) -> None:
        self.first_targets = dict(self.targets)

    @property
    def is_received_by_all(self) -> bool:
        """True if all members have the result, so that the round may commit."""
        return len(self.results) == len(self.targets)

    @property
    def is_given_up(self) -> bool:
        """True if no member will receive the result."""
        return len(self.failures) == len(self.targets)

    @property
    def header(self) -> tuple[HeaderRow, ...]:
        """The header's rows, in the order of `targets`; empty while no member has sent them."""
        return next((one.header for one in self.results.values() if one.header), self.reported_header)

    @property
    def rows(self) -> dict[Rank, HeaderRow]:
        """The header's rows by rank. Raises `ValueError` if it does not fit this round's members."""
        return by_rank(self.targets, self.header)

    @property
    def sync_ms(self) -> float:
        """Duration of the averaging itself: the shortest time from entry to result, that of the last rank to enter."""
        return min(_sensible(one.collective_ms) for one in self.results.values())

    @property
    def longest_ms(self) -> float:
        """The longest time from entry to result."""
        return max(_sensible(one.collective_ms) for one in self.results.values())

    def stalled_ms(self, rank: Rank) -> float:
        """Time in ms for which the round kept the rank from training; 0 without a report."""
        return _sensible(self.results[rank].stalled_ms) if rank in self.results else 0.0

    @property
    def cost_ms(self) -> float:
        """Training time in ms that the averaging itself cost: the least time for which it kept any rank from training.

        An overlapped one costs little; counting all of `sync_ms` would make rounds needlessly long (row E4).
        """
        return min(self.stalled_ms(rank) for rank in self.results)

    def discarded(self, settings: AgreedSettings) -> dict[Rank, str]:
        """The ranks whose values were left out of the result, with reasons. The ranks decide by the same header."""
        rows = self.rows
        are_out = discarded(list(rows.values()), nonfinite=settings.nonfinite, outliers=settings.outliers)
        return {rank: _notice(row) for (rank, row), is_out in zip(rows.items(), are_out, strict=True) if is_out}

    def failure(self, *, allows_nonfinite: bool) -> Failure | None:
        """A failure if the result must not be committed: members disagree, or it is not finite. None if it may be."""
        header = self.header
        if len(header) != len(self.targets):
            return Failure(f"round {self.id} has {len(self.targets)} members, but its header {len(header)} rows")
        for rank, row in self.rows.items():
            if not row.finite and not allows_nonfinite:
                return Failure(
                    f"the parameters of rank {rank} are not finite (NaN or infinity) after its batch {row.local_step}; "
                    "lower the learning rate or clip the gradients"
                )
        return self._difference(header)

    def _difference(self, header: tuple[HeaderRow, ...]) -> Failure | None:
        """A failure that names a disagreement of members; None if they agree."""
        first_rank = next(iter(self.results))
        teller = next((rank for rank, one in self.results.items() if one.header), first_rank)
        is_short = any(other.header_digest is not None for other in self.results.values())
        header_is = header_digest(header) if is_short else None
        # a member that sent only a digest is compared by digest, all others by rows
        for rank, other in self.results.items():
            if other.header_digest != header_is if other.header_digest is not None else other.header != header:
                return Failure(f"ranks {teller} and {rank} received different headers in round {self.id}")
        return None

    @property
    def differing(self) -> tuple[Rank, ...]:
        """Members whose result differs from that of the majority; without a majority, all that have sent a digest. ()
        if none differ.
        """
        results = ((rank, self.results[rank].digest) for rank in self.targets if rank in self.results)
        digests = {rank: digest for rank, digest in results if digest is not None}
        counts = Counter(digests.values())
        if len(counts) < 2:
            return ()
        (most, num), *_ = counts.most_common()
        return tuple(rank for rank, digest in digests.items() if digest != most or 2 * num <= len(digests))

    def difference_of(self, differing: tuple[Rank, ...]) -> str:
        """The message that the result of these ranks differs."""
        if len(differing) == 1:
            return f"the parameters of rank {differing[0]} differ from those of the other ranks after round {self.id}"
        *others, last = differing
        return f"the parameters of ranks {', '.join(map(str, others))} and {last} differ after round {self.id}"


def _notice(row: HeaderRow) -> str:
    too_long = "its step is far longer than its steps before (outliers='keep' averages it)"
    why = too_long if row.finite else "its parameters are not finite"
    return f"after its batch {row.local_step}: {why}; does its device compute correctly?"


def _sensible(duration_ms: float) -> float:
    """A reported duration in ms; 0 if it is negative or not finite."""
    return duration_ms if 0 <= duration_ms < inf else 0.0
