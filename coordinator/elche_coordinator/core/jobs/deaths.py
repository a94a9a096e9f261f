"""What a job remembers of its ranks' deaths: how soon one is started again, and on which samples several have died."""

from collections import Counter
from dataclasses import replace
from enum import Enum, auto
from math import inf

from elche.settings import AgreedSettings
from elche_coordinator.core.messages.ids import Rank
from elche_coordinator.core.messages.spec import Lease
from elche_coordinator.core.records.ranks import RankRecord
from elche_coordinator.core.work.ledger import Ledger

RESTART_S = (0.0, 1.0, 5.0, 30.0)
"""Delay before a rank is started again, by its deaths in a row without a committed batch; the last holds on."""
RANKS_ON_SAMPLES = 3
"""Ranks that may die one after the other on the same samples; then the job fails."""
DEATHS_ON_SAMPLES = 5
"""As many deaths fail the job where these are fewer ranks, or others have died shortly before: that may be by chance.
Those of one rank alone do not: it may have too little memory.
"""
SHORTLY_S = 60.0
REPORTED_MS = 200.0
"""A rank that trains reports at least as often, or after each batch."""


class Death(Enum):
    """How a process has come to its end."""

    BY_ITSELF = auto()
    """With an exit code; it would do so again."""
    KILLED = auto()
    """By a signal, or left alone by others that were."""
    WITH_HOST = auto()


class Deaths:
    """Of all attempts of a job."""

    def __init__(self) -> None:
        self._in_a_row: Counter[Rank] = Counter()
        """Of each rank, without a committed batch between."""
        self._suspects: list[Lease] = []
        """Samples that each of the ranks whose processes died last may have been training."""
        self._died: list[Rank] = []
        """These ranks, in order."""
        self._died_s = -inf
        """When the last one died."""
        self._quiet_s = inf
        """For how long none had died before these."""

    def restart_delay_s(self, record: RankRecord) -> float:
        """One more death of the rank: how long it is not started again."""
        if record.base_step:
            self._in_a_row[record.rank] = 0
        num_before = self._in_a_row[record.rank]
        self._in_a_row[record.rank] += 1
        return RESTART_S[min(num_before, len(RESTART_S) - 1)]

    def blame(
        self, record: RankRecord, ledger: Ledger, settings: AgreedSettings, now_s: float, *, trained: bool
    ) -> str | None:
        """The rank has died, while it trained or not. Says so when the samples in flight are those on which the ones
        before it died: they would end more ranks (protocol P24.3). A death between that has nothing to do with them
        begins the count anew: then somebody kills at random.
        """
        in_flight = ledger.in_flight(record.rank, _num_in_flight(record, now_s)) if trained else []
        common = _common(self._suspects, in_flight)
        if not common:
            self._died, self._quiet_s = [], now_s - self._died_s
        self._suspects, self._died_s = common or in_flight, now_s
        self._died.append(record.rank)
        num_ranks = len(set(self._died))
        if num_ranks >= RANKS_ON_SAMPLES and self._quiet_s >= SHORTLY_S:
            return _accusation(self._died, self._suspects[0], settings)
        if num_ranks > 1 and len(self._died) >= DEATHS_ON_SAMPLES:
            return _accusation(self._died, self._suspects[0], settings)
        return None


def _common(some: list[Lease], others: list[Lease]) -> list[Lease]:
    """The samples that are in both."""
    found = []
    for one in some:
        for other in others:
            start, end = max(one.offset, other.offset), min(one.offset + one.size, other.offset + other.size)
            if one.epoch == other.epoch and start < end:
                found.append(replace(one, offset=start, size=end - start))
    return found


def _num_in_flight(record: RankRecord, now_s: float) -> int:
    """Batches since the last report, the one under way among them, and one more: times vary. 0 when the report is too
    old to tell: the coordinator was away, say.
    """
    if not record.ms_per_batch:
        return 1
    since_ms = (now_s - record.reported_at_s) * 1000
    return 2 + int(since_ms / record.ms_per_batch) if since_ms < REPORTED_MS + 2 * record.ms_per_batch else 0


def _accusation(ranks: list[Rank], samples: Lease, settings: AgreedSettings) -> str:
    who, first, last = ", ".join(map(str, sorted(set(ranks)))), samples.offset, samples.offset + samples.size - 1
    where = f"samples {first} to {last} of epoch {samples.epoch + 1}'s order"
    if not settings.is_drawn and not settings.shard_sizes:  # the coordinator has no numpy, which makes the order
        arguments = f"{settings.seed} {samples.epoch} {settings.dataset_size} {first} {samples.size}"
        where += f" (`python -m elche.permutation {arguments}` lists their indices)"
    return f"{len(ranks)} processes (of ranks {who}) have died while they trained {where}; look at these samples"
