"""Grants the work and rounds with which ranks go on while the coordinator is away (protocol P16)."""

import math

from elche_coordinator.core.messages.commands import SendLease, SendRecall
from elche_coordinator.core.messages.ids import Rank, RoundId
from elche_coordinator.core.records.outbox import Outbox
from elche_coordinator.core.records.ranks import RankRecord, RankRecords, present
from elche_coordinator.core.records.round import Round
from elche_coordinator.core.results.training import Training

TAIL_ROUNDS = 3
"""Rounds of an epoch whose work is never in reserve: it is leased bit by bit, so that all ranks end together."""
EXCESS, EXCESS_ROUNDS = 2, 2
"""A reserve larger than `EXCESS` times what is needed plus `EXCESS_ROUNDS` rounds is recalled, as when a rank has
become slower. A smaller excess is not, since nothing is granted until the rank has answered.
"""
MAX_ROUNDS = 1000
"""Most rounds that are granted at once."""
ASYNC_FACTOR = 1.5
"""Under `async` no rank stops at a target, so granted rounds lie further apart, and no rank is late for one."""


class Reserve:
    """Grants the rounds that would follow an announced one, with leases for them.

    While the coordinator is there, ranks use neither: rounds are announced, and the reserve is permitted bit by bit.
    While it is away, ranks enter the granted rounds at equal distances and train the reserve, until both are used up.
    """

    def __init__(self, members: RankRecords, training: Training, outbox: Outbox) -> None:
        self.every: dict[Rank, int] = {}
        """Batches of each rank between granted rounds."""
        self.count = 0
        """Number of rounds that are granted after the last announced one; 0: none, or they are being recalled."""
        self._revoked: dict[Rank, None] = {}
        """Members that were asked to enter no granted round any more; emptied when rounds are granted again."""
        self._members = members
        self._training = training
        self._outbox = outbox

    def grant(self, opened: Round) -> None:
        """Grants rounds after the one that is being announced, as far as `ride_out_s` and the epoch's work reach."""
        self._revoked.clear()
        counts = {rank: step - self._members[rank].base_step for rank, step in opened.targets.items()}
        every = {rank: self._distance(count) for rank, count in counts.items()}
        # No grants after a checkpoint's round: a writer that entered the next one would overwrite the result to write
        # (protocol P12.5).
        num_rounds = self._num_rounds(every) if opened.checkpoint_writer is None else 0
        if num_rounds <= 0:
            self.recall()
            return
        self.every = every
        self.count = min(self._fill(record, counts[rank], num_rounds) for rank, record in self._members.items())
        self._training.granted_through = max(self._training.granted_through, RoundId(opened.id + self.count))

    def recall(self) -> None:
        """Asks every rank that has a reserve to give it back."""
        self.count = 0
        for record in self._members.values():
            if self._training.ledger.reserve_of(record.rank):
                self._recall(record)

    @property
    def is_awaited(self) -> bool:
        """True if a member has yet to give its reserve back."""
        return any(rank in self._members for rank in self._training.ledger.recalled)

    def revoke(self) -> bool:
        """Asks members to enter no granted round any more. Returns True once all have said that they will not.

        Until then they may have made a round that the coordinator has not heard of. It would contain the work of ranks
        that may not be in the next generation, and be lost with them.
        """
        ledger, there = self._training.ledger, present(self._members)
        self.count = 0
        if self._training.granted_through < self._training.next_round:
            return True
        for rank, record in there.items():
            if rank not in self._revoked:
                self._revoked[rank] = None
                self._recall(record)
        return not any(rank in there for rank in ledger.recalled)

    def _distance(self, count: int) -> int:
        """Batches of a rank from one granted round to the next; `count`: those planned for the announced round."""
        if self._training.policy.stops_ranks:
            return 1  # `sync`: a round after each batch, whatever the count, which spans several announced rounds
        return math.ceil(ASYNC_FACTOR * count) if self._training.settings.policy == "async" else count

    def _num_rounds(self, every: dict[Rank, int]) -> int:
        """Number of rounds that may be granted, where each rank makes `every` of its batches in one."""
        training, ledger = self._training, self._training.ledger
        if not training.ride_out_s or not training.policy.is_calibrated or training.replay is not None:
            return 0
        # limits come from the coordinator, so that nothing is granted where ranks need them
        if training.settings.max_batch_diff is not None or training.is_paused:
            return 0
        times_ms = [count * (self._members[rank].ms_per_batch or 0.0) for rank, count in every.items()]
        if min(times_ms) <= 0:
            return 0
        wanted = math.ceil(training.ride_out_s * 1000 / max(times_ms))
        round_samples = sum(count * self._members[rank].batch_size for rank, count in every.items())
        left = ledger.free_samples(ledger.epoch) // round_samples - TAIL_ROUNDS
        return min(wanted, left, MAX_ROUNDS)

    def _fill(self, record: RankRecord, count: int, num_rounds: int) -> int:
        """Tops up a rank's reserve, and returns the number of rounds after the next one for which its work suffices."""
        ledger, every = self._training.ledger, self.every[record.rank]
        permitted = ledger.uncommitted_batches(record.rank)[1]
        wanted = (count + num_rounds * every - permitted) * record.batch_size
        has = ledger.reserve_of(record.rank)
        if has > EXCESS * max(0, wanted) + EXCESS_ROUNDS * every * record.batch_size:
            self._recall(record)
        if ledger.is_recalled(record.rank):
            return 0  # it is unknown if the rank would drop leases that it gets before it answers
        if wanted > has:
            for lease in ledger.reserve(record.rank, ledger.epoch, wanted - has):
                self._outbox.add(SendLease(**record.address, lease=lease, is_reserve=True))
        has = ledger.reserve_of(record.rank)
        return max(0, min(num_rounds, (has // record.batch_size + permitted - count) // every))

    def _recall(self, record: RankRecord) -> None:
        if self._training.ledger.recall(record.rank):
            self._outbox.add(SendRecall(**record.address))
