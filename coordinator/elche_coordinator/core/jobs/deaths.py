"""A job's record of its ranks' deaths, for the delay of restarts, and to find samples on which several have died."""

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
"""Seconds before a rank is restarted: after its first death in a row without a committed batch, its second, and so on.
Later deaths have the last delay.
"""
MAX_FRUITLESS = 3
"""Attempts in a row without a checkpoint that never fail the job, whatever time they have taken."""
FRUITLESS_S, FRUITLESS_AFTER_CHECKPOINT_S = 60.0, 600.0
"""Seconds of such attempts that never fail it: before its first checkpoint, and once it has made one. A script that
kills its process does so before; what kills a job that has trained well, such as a failing host, comes to an end.
"""
RANKS_ON_SAMPLES = 3
"""Deaths in a row on the same samples after which the job fails."""
DEATHS_ON_SAMPLES = 5
"""Deaths on the same samples after which the job fails if they are of only two ranks, or if other ranks have died
shortly before: fewer may be chance. Deaths of one rank alone never fail the job, since it may have too little memory.
"""
SHORTLY_S = 60.0
"""Seconds before the first death on the same samples: if no rank has died in them, these deaths are hardly chance."""
REPORTED_MS = 200.0
"""Time in ms within which a rank that trains reports, unless one batch takes longer."""


class Death(Enum):
    """The way in which a process has ended."""

    BY_ITSELF = auto()
    """With an exit code; a restarted process would do the same."""
    KILLED = auto()
    """By a signal, or because processes of its group were killed."""
    WITH_HOST = auto()
    """Its host was lost; the process may still run there, cut off."""
    NEVER_LIVED = auto()
    """Its host could not start it, such as on a full disk."""


class FruitlessAttempts:
    """The attempts in a row that ended by a death and made no checkpoint."""

    def __init__(self) -> None:
        self._num_deaths = 0
        self._first_s = 0.0
        """Time of the first of these deaths."""
        self._limit_s = FRUITLESS_S

    def on_checkpoint(self) -> None:
        """Begins anew: the attempt that has ended made a checkpoint."""
        self._num_deaths, self._limit_s = 0, FRUITLESS_AFTER_CHECKPOINT_S

    def add(self, now_s: float) -> str | None:
        """Counts one more death; returns what the job fails with if it is one too many."""
        if not self._num_deaths:
            self._first_s = now_s
        if self._num_deaths >= MAX_FRUITLESS and now_s - self._first_s >= self._limit_s:
            return f"{self._num_deaths} attempts in a row have reached no checkpoint"
        self._num_deaths += 1
        return None

    @property
    def delay_s(self) -> float:
        """Seconds before the next attempt may begin."""
        return RESTART_S[min(self._num_deaths, len(RESTART_S)) - 1]


class Deaths:
    """The deaths of all attempts of a job."""

    def __init__(self) -> None:
        self._in_a_row: Counter[Rank] = Counter()
        """Deaths of each rank in a row, without a committed batch between."""
        self._suspects: list[Lease] = []
        """Samples that every process in `_died` may have been training when it died."""
        self._died: list[Rank] = []
        """Ranks of the last processes to die with such samples in common, in order."""
        self._died_s = -inf
        """Time of the last death."""
        self._quiet_s = inf
        """Seconds without a death before the first of `_died`."""

    def restart_delay_s(self, record: RankRecord) -> float:
        """Counts one more death of the rank; returns the seconds before it may be restarted."""
        # it has committed batches since its start, so that its deaths are not in a row
        if record.base_step:
            self._in_a_row[record.rank] = 0
        num_before = self._in_a_row[record.rank]
        self._in_a_row[record.rank] += 1
        return RESTART_S[min(num_before, len(RESTART_S) - 1)]

    def is_first(self, record: RankRecord) -> bool:
        """Counts one more death of the rank; returns True if it is the first without a committed batch."""
        return not self.restart_delay_s(record)

    def blame(
        self, record: RankRecord, ledger: Ledger, settings: AgreedSettings, now_s: float, *, trained: bool
    ) -> str | None:
        """Records a rank's death. Returns the failure's text if its samples in flight are those on which earlier ranks
        died, since they would kill more ranks (protocol P24.3). A death on other samples, or of a rank that had not
        `trained`, restarts the count: ranks then die for other reasons.
        """
        # Which sample killed a process is not known, only what it was training. A sample that kills whoever trains it
        # is among those that all dead processes have in common, and nothing else stays in common for long.
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
    """The intersection of two lists of samples."""
    found = []
    for one in some:
        for other in others:
            start, end = max(one.offset, other.offset), min(one.offset + one.size, other.offset + other.size)
            if one.epoch == other.epoch and start < end:
                found.append(replace(one, offset=start, size=end - start))
    return found


def _num_in_flight(record: RankRecord, now_s: float) -> int:
    """Estimated number of batches since the last report, including the one under way, plus one since times vary. 0 if
    the report is too old, as after an absence of the coordinator.
    """
    if not record.ms_per_batch:
        return 1
    since_ms = (now_s - record.reported_at_s) * 1000
    return 2 + int(since_ms / record.ms_per_batch) if since_ms < REPORTED_MS + 2 * record.ms_per_batch else 0


def _accusation(ranks: list[Rank], samples: Lease, settings: AgreedSettings) -> str:
    who, first, last = ", ".join(map(str, sorted(set(ranks)))), samples.offset, samples.offset + samples.size - 1
    where = f"samples {first} to {last} of epoch {samples.epoch + 1}'s order"
    # the coordinator has no numpy, which computes the order, so that the user has to list the indices
    if not settings.is_drawn and not settings.shard_sizes:
        arguments = f"{settings.seed} {samples.epoch} {settings.dataset_size} {first} {samples.size}"
        where += f" (`python -m elche.permutation {arguments}` lists their indices)"
    return f"{len(ranks)} processes (of ranks {who}) have died while they trained {where}; look at these samples"
