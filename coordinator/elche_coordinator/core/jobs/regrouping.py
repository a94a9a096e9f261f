"""How the ranks of a loop of the user's own go on when one of them has died (protocol P18.9)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elche_coordinator.core.messages.commands import SendAbandon, SendFormGroup
from elche_coordinator.core.messages.events import GenerationAbandoned
from elche_coordinator.core.messages.ids import Attempt, GenerationId, Rank
from elche_coordinator.core.records.machine import RankPhase
from elche_coordinator.core.records.ranks import RankRecord

if TYPE_CHECKING:
    from elche_coordinator.core.jobs.job import Job

MAX_FRUITLESS = 5
"""Groups in a row in which nobody trains a batch."""
ATTEMPT = Attempt(1)


class Regrouping:
    """The groups of a loop's ranks, one after the other. A group is given up as a whole; the next one is formed when
    all that are there have said that nothing of it runs any more.
    """

    def __init__(self, job: Job) -> None:
        self.generation_id = GenerationId(0)
        """The group that trains; 0 is the one that the script has made."""
        self._job = job
        self._answered: set[Rank] | None = None
        """Ranks that have given the group up; None while it stands."""
        self._num_fruitless = 0

    @property
    def members(self) -> list[RankRecord]:
        """The ranks that are there, in order."""
        ranks = self._job.ranks
        return [ranks[rank] for rank in sorted(ranks) if ranks[rank].phase is not RankPhase.EXITED]

    def on_batches(self) -> None:
        """A rank has trained."""
        self._num_fruitless = 0

    def on_abandoned(self, record: RankRecord, event: GenerationAbandoned) -> None:
        """A rank has given the group up, by itself or because it was asked. Old news changes nothing."""
        if event.generation != self.generation_id:
            return
        self.give_up()
        assert self._answered is not None
        self._answered.add(record.rank)
        self._form_if_all_have(event.reason)

    def on_lost(self) -> None:
        """A member is gone: the others give the group up."""
        self._num_fruitless = 0
        self.give_up()
        self._form_if_all_have("")

    def give_up(self) -> None:
        """Asks every member to give the group up, once."""
        if self._answered is None:
            self._answered = set()
            for record in self.members:
                command = SendAbandon(**record.address(self._job.id), generation=self.generation_id)
                self._job.outbox.add(command)

    def _form_if_all_have(self, reason: str) -> None:
        members = self.members
        if self._answered is None or not self._job.is_open:
            return
        if any(record.rank not in self._answered for record in members):
            return
        self._num_fruitless += 1
        if self._num_fruitless > MAX_FRUITLESS:
            why = reason or "its ranks could form no group"
            self._job.fail(f"{MAX_FRUITLESS} groups in a row have come to no batch: {why}")
            return
        self._answered = None
        self.generation_id = GenerationId(self.generation_id + 1)
        for position, record in enumerate(members):
            self._job.outbox.add(
                SendFormGroup(
                    **record.address(self._job.id),
                    attempt=ATTEMPT,
                    generation=self.generation_id,
                    position=position,
                    world_size=len(members),
                    backend="",
                )
            )
