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
        self._left: Rank | None = None
        """A rank that has come to its end while the group stood."""
        self._has_lost = False
        """Whether a member has died while the group stood."""

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
        self._num_fruitless, self._has_lost = 0, True
        self.give_up()
        self._form_if_all_have("")

    def on_left(self, record: RankRecord) -> None:
        """A member has come to the loop's end."""
        self._left = record.rank
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
        if not members or any(record.rank not in self._answered for record in members):
            return
        if self._left is not None and not self._has_lost:
            self._job.fail(
                f"rank {self._left} has come to the end of its loop, and others wait for it: all ranks must make "
                "equally many steps"
            )
            return
        self._num_fruitless += 1
        if self._num_fruitless > MAX_FRUITLESS:
            why = reason or "its ranks could form no group"
            self._job.fail(f"{MAX_FRUITLESS} groups in a row have come to no batch: {why}")
            return
        self._answered, self._left, self._has_lost = None, None, False
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
