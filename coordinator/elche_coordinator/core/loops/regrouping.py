"""Regrouping of a user-owned loop's ranks after one has died (protocol P18.9)."""

from elche_coordinator.core.messages.commands import SendAbandon, SendFormGroup
from elche_coordinator.core.messages.events import GenerationAbandoned
from elche_coordinator.core.messages.ids import Attempt, GenerationId, Rank
from elche_coordinator.core.records.failure import Failure
from elche_coordinator.core.records.machine import RankPhase
from elche_coordinator.core.records.outbox import Outbox
from elche_coordinator.core.records.ranks import RankRecord, RankRecords

MAX_FRUITLESS = 5
"""Groups in a row without a batch after which the job fails."""
ATTEMPT = Attempt(1)
"""A loop resumes by itself, so the coordinator counts no further attempt."""


class Regrouping:
    """The groups of a loop's ranks, one after the other. All members abandon a group; when all present ranks have, the
    next one is formed.
    """

    def __init__(self, ranks: RankRecords, outbox: Outbox) -> None:
        self.generation_id = GenerationId(0)
        """The present group; 0 is the one that the script has made."""
        self._ranks = ranks
        self._outbox = outbox
        self._answered: set[Rank] | None = None
        """Ranks that have abandoned the group; None while it stands."""
        self._num_fruitless = 0
        """Groups formed since a rank has last trained or been lost."""
        self._left: Rank | None = None
        """A rank that has ended regularly while the group stood."""
        self._has_lost = False
        """True if a member has died while the group stood."""

    @property
    def members(self) -> list[RankRecord]:
        """The present ranks, in order."""
        ranks = self._ranks
        return [ranks[rank] for rank in sorted(ranks) if ranks[rank].phase is not RankPhase.EXITED]

    def on_batches(self) -> None:
        """Records that a rank has trained."""
        self._num_fruitless = 0

    def on_abandoned(self, record: RankRecord, event: GenerationAbandoned) -> None:
        """Records that a rank has abandoned the group, by itself or when asked, and asks the others to. Ignores old
        news.
        """
        if event.generation != self.generation_id:
            return
        self._abandon().add(record.rank)

    def on_lost(self) -> None:
        """Has the others abandon the group after a member's loss."""
        self._num_fruitless, self._has_lost = 0, True
        self._abandon()

    def on_left(self, record: RankRecord) -> None:
        """Records that a member has reached the loop's end."""
        self._left = record.rank

    def _abandon(self) -> set[Rank]:
        """Asks every member to abandon the group, once. Returns those that have."""
        if self._answered is None:
            self._answered = set()
            for record in self.members:
                command = SendAbandon(**record.address, generation=self.generation_id)
                self._outbox.add(command)
        return self._answered

    def form_if_all_have(self, reason: str) -> Failure | None:
        """Forms the next group if all members have abandoned this one; `reason`: why the last of them did. Returns a
        failure if the job cannot go on.
        """
        members = self.members
        if self._answered is None or not members or any(one.rank not in self._answered for one in members):
            return None
        if self._left is not None and not self._has_lost:
            num_batches = self._ranks[self._left].local_step
            return Failure(
                f"rank {self._left} has come to the end of its loop after {num_batches} batches, "
                "and others wait for it: every rank has to make the same calls, as often as the others; decide "
                "`continue`, `break` and `return` alike on all ranks, as by trainer.mean({'stop': float(stop)})"
            )
        self._num_fruitless += 1
        if self._num_fruitless > MAX_FRUITLESS:
            why = reason or "its ranks could form no group"
            return Failure(f"{MAX_FRUITLESS} groups in a row have trained no batch: {why}")
        self._answered, self._left, self._has_lost = None, None, False
        self.generation_id = GenerationId(self.generation_id + 1)
        for position, record in enumerate(members):
            self._outbox.add(
                SendFormGroup(
                    **record.address,
                    attempt=ATTEMPT,
                    generation=self.generation_id,
                    position=position,
                    world_size=len(members),
                    backend="",
                )
            )
        return None
