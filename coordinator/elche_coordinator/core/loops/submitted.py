"""A user-owned loop whose processes agents start: a submitted script."""

from collections.abc import Sequence

from elche.errors import LEFT_ALONE
from elche.formatting import last_words
from elche_coordinator.core.jobs.deaths import Death
from elche_coordinator.core.jobs.placed import PlacedJob
from elche_coordinator.core.jobs.places import Places
from elche_coordinator.core.life.hangs import Duty
from elche_coordinator.core.life.job import STOP_GRACE_S
from elche_coordinator.core.loops.loop import Loop
from elche_coordinator.core.messages.events import JobSubmitted, LoopBegan, LoopLeft, SessionOpened, WorkEvent
from elche_coordinator.core.messages.ids import JobId, Rank
from elche_coordinator.core.messages.reports import Outcome
from elche_coordinator.core.records.failure import Failure
from elche_coordinator.core.records.machine import JobPhase, JobTrigger, RankPhase, RankTrigger
from elche_coordinator.core.records.ranks import RankRecord


class SubmittedLoop(Loop, PlacedJob):
    """A loop that gets slots of one host for all of its ranks, or waits for them (protocol P26).

    It succeeds when all of its processes have exited with code 0. The first that exits otherwise fails it, and the
    others are ended. None is started again, and none gives its slot to another job. But if its host cannot start a
    process, such as on a full disk, and has started no other, it goes back to the queue.
    """

    can_scale = False
    num_lacking = 0
    when_placed = "its ranks start the script"

    def __init__(self, event: JobSubmitted, now_s: float) -> None:
        super().__init__(event, now_s)
        self.places = Places(self.roster, self.outbox, event.spec.num_ranks)
        self._left: set[Rank] = set()
        """Ranks that have ended their loop, and whose processes may run on."""
        self._left_alone: Failure | None = None
        """Failure of a rank that exited because others were gone. It fails the job if none of these turns out to have
        failed by itself.
        """

    @property
    def can_begin_again(self) -> bool:
        """True until its processes are started."""
        return self.phase is JobPhase.QUEUED

    # Places

    def give_slots(self, num_ranks: int, to: JobId, now_s: float) -> None:
        """Refuses: its ranks train together or not at all."""
        self.refuse_now("SlotsRequested", "a script with its own loop keeps its slots until it ends")

    def leave(self, leaving: Sequence[RankRecord], now_s: float) -> None:
        """Refuses: it goes on until it ends, also on a host that is drained."""
        self.refuse_now("DrainRequested", "a script with its own loop keeps its slots until it ends")

    def stay(self, records: Sequence[RankRecord], now_s: float) -> None:
        """Does nothing: no rank was to leave."""

    # Events of ranks

    def on_work(self, record: RankRecord, event: WorkEvent, now_s: float) -> None:
        match event:
            case LoopBegan():
                self._on_began(record, event, now_s)
            case LoopLeft():
                self._left.add(record.rank)
            case SessionOpened():
                pass  # `LoopBegan` follows
            case _:
                super().on_work(record, event, now_s)

    def _on_began(self, record: RankRecord, event: LoopBegan, now_s: float) -> None:
        """Handles a rank that has set up its trainer. The job trains once all have."""
        # Its processes have formed their group by themselves: both phases pass at once.
        record.life.advance(RankTrigger.LOADED)
        record.life.advance(RankTrigger.GROUPED)
        self.policy = event.policy
        if self.phase is JobPhase.STARTING and not self.roster.num_in(RankPhase.STARTING):
            for trigger in (JobTrigger.RANKS_READY, JobTrigger.GROUP_FORMED):
                self.advance(trigger, "trains, in a loop of its own")
            self._began_s = now_s
            self.watch_silence(now_s)

    def has_batch_due(self, record: RankRecord) -> bool:
        """True while the rank's loop goes on, and is not paused."""
        return record.rank not in self._left and super().has_batch_due(record)

    def has_session_due(self, rank: Rank) -> bool:
        """True until the rank's loop has ended: its script may go on without a session."""
        return rank not in self._left

    def duties(self) -> dict[Rank, Duty]:
        """Each rank's duty: a step, until its loop has ended."""
        return {rank: duty for rank, duty in super().duties().items() if rank not in self._left}

    def on_session_lost(self, record: RankRecord, now_s: float) -> None:
        """Does nothing: the agent reports the process's end, and the loop goes on without the coordinator."""

    # Its end

    def on_exited(self, record: RankRecord, death: Death, notice: str, now_s: float, *, log_tail: str = "") -> None:
        """Handles the end of a process. The job succeeds with the last, if all have exited with code 0."""
        self.roster.note_exit(record, counts=False)
        has_begun = any(one.log_path for one in self.ranks.values())
        if death is Death.NEVER_LIVED and self.phase is JobPhase.STARTING and not has_begun:
            self._go_back(notice)
        if self.phase is JobPhase.QUEUED:  # it begins again once all of these processes have ended
            return
        self._report_epochs()
        if self.is_open and record.exit_code != 0:
            failure = Failure(_with_last_line(notice, log_tail), rank=record.rank, traceback=log_tail)
            if record.exit_code != LEFT_ALONE:
                self.fail(failure)
            # The rank that has failed by itself may be reported a moment later, and says why (protocol P26.3).
            elif self._left_alone is None:
                self._left_alone = failure
                self.set_deadline(STOP_GRACE_S)
        if self.is_open and not self.roster.num_living:
            if self._left_alone is not None:
                self.fail(self._left_alone)
            else:
                self.decide(Outcome.SUCCEEDED, "its ranks have exited")
        self.end_if_gone()

    def _go_back(self, notice: str) -> None:
        self.advance(JobTrigger.WENT_BACK, notice)
        for other in self.ranks.values():
            if other.phase is not RankPhase.EXITED:
                self.roster.stop(other)

    def on_deadline(self) -> None:
        """Fails a loop whose ranks exited because others were gone, if no other cause was found in time. Ends processes
        that have not left in time.
        """
        if self.is_open and self._left_alone is not None:
            self.fail(self._left_alone)
        elif self.phase is JobPhase.STOPPING:
            for record in self.ranks.values():
                if record.phase is not RankPhase.EXITED:
                    self.roster.stop(record)


def _with_last_line(notice: str, log_tail: str) -> str:
    """The notice with the last line that the process has printed, which is an uncaught exception's."""
    said = last_words(log_tail.splitlines())
    return f"{notice}: {said}" if said else notice
