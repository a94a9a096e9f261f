"""A user-owned loop whose processes the user has started."""

from collections.abc import Callable

from elche_coordinator.core.loops.loop import Loop
from elche_coordinator.core.messages.events import GenerationAbandoned, LoopAttached, LoopLeft, SessionOpened, WorkEvent
from elche_coordinator.core.messages.ids import AgentId, Incarnation, Rank
from elche_coordinator.core.messages.reports import Outcome
from elche_coordinator.core.records.failure import Failure
from elche_coordinator.core.records.machine import JobPhase, JobTrigger, RankPhase, RankTrigger
from elche_coordinator.core.records.ranks import RankRecord

JOIN_GRACE_S = 60.0
"""Seconds in which all ranks of a new loop must connect."""


class AttachedLoop(Loop):
    """A job without agents and slots: its ranks train already.

    The user's processes are never ended. A rank whose stream is lost counts as lost. Only the user can restart the
    script.
    """

    can_begin_again = False

    def __init__(self, event: LoopAttached, next_incarnation: Callable[[], Incarnation], now_s: float) -> None:
        super().__init__(event, now_s)
        self.policy = event.policy
        self._joined: set[Rank] = set()
        """Ranks that have opened their session."""
        self._can_regroup = event.can_regroup
        self.began_s |= {JobPhase.QUEUED: now_s, JobPhase.STARTING: now_s}
        for trigger in (JobTrigger.PLACED, JobTrigger.RANKS_READY, JobTrigger.GROUP_FORMED):
            self.advance(trigger, "trains, in a loop of its own")
        for index, (host, device) in enumerate(event.ranks):
            self._add(Rank(index), host, device, next_incarnation())
        self.set_deadline(JOIN_GRACE_S)

    def _add(self, rank: Rank, host: str, device: str, incarnation: Incarnation) -> None:
        """Adds a rank, which trains already."""
        record = RankRecord(
            job_id=self.id,
            rank=rank,
            incarnation=incarnation,
            agent_id=AgentId(""),
            slot=0,
            host=host,
            device=device,
            life=self.roster.new_life(),
        )
        record.life.advance(RankTrigger.LOADED)
        record.life.advance(RankTrigger.GROUPED)
        self.roster.add(record)

    @property
    def num_wanted(self) -> int:
        """The number of ranks with which it began."""
        return self.spec.num_ranks

    def on_work(self, record: RankRecord, event: WorkEvent, now_s: float) -> None:
        match event:
            case SessionOpened():
                self._joined.add(record.rank)
            case LoopLeft():
                self._on_left(record)
            case GenerationAbandoned() if self._can_regroup:
                self._groups.on_abandoned(record, event)
                self._regroup(event.reason)
            case _:
                super().on_work(record, event, now_s)

    def _on_left(self, record: RankRecord) -> None:
        """Records that the rank has ended regularly. When all have, the job has succeeded."""
        record.life.advance(RankTrigger.EXITED)
        self._report_epochs()
        self._groups.on_left(record)
        self._regroup("")
        if not self.roster.num_living and self.is_open:
            self.decide(Outcome.SUCCEEDED, "the loop has ended")
        self.end_if_gone()

    def _regroup(self, reason: str) -> None:
        """Forms the next group, once all members have abandoned the one before it."""
        if self.is_open and (failure := self._groups.form_if_all_have(reason)) is not None:
            self.fail(failure)

    def on_session_lost(self, record: RankRecord, now_s: float) -> None:
        """Treats the rank as lost, since no agent watches its process; the others go on without it if they can."""
        if record.phase is RankPhase.EXITED:
            return
        where = f"rank {record.rank} on {record.host} ({record.device})"
        notice = f"{where} disconnected without reporting an exit, at batch {record.local_step}"
        others = [one for one in self._groups.members if one is not record]
        if self._can_regroup and others and self.is_open:
            # First: the next group is formed of those that have not exited.
            self.roster.note_exit(record, counts=True)
            self._groups.on_lost()
            self._regroup("")
            self.roster.report_lost(record, notice)
            self._report_epochs()
        else:
            self._on_gone(record, notice)

    def on_deadline(self) -> None:
        """Treats ranks as lost that have not connected, or, at the loop's end, have not left."""
        is_training = self.phase is JobPhase.TRAINING
        for record in self.ranks.values():
            if record.phase is RankPhase.EXITED or (is_training and record.rank in self._joined):
                continue
            where = f"rank {record.rank} on {record.host}"
            notice = f"{where} never connected: it cannot reach the coordinator, or has ended"
            self._on_gone(record, notice if is_training else "")

    def _on_gone(self, record: RankRecord, notice: str) -> None:
        """Handles a lost rank without which the others cannot go on."""
        self.roster.note_exit(record, counts=self.is_open)
        if self.is_open:
            self.fail(Failure(notice, rank=record.rank))
        self.end_if_gone()
