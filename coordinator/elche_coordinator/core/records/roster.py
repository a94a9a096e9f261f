"""The table of a job's ranks, and the ways in which they leave."""

from collections import Counter

from elche_coordinator.core.messages.commands import SendShutdown, StopRank
from elche_coordinator.core.messages.ids import Incarnation
from elche_coordinator.core.messages.reports import MembershipReport, Outcome
from elche_coordinator.core.records.machine import DepartureTrigger, Machine, RankPhase, RankTrigger, rank_machine
from elche_coordinator.core.records.outbox import Outbox
from elche_coordinator.core.records.ranks import RankRecord, RankRecords, present

KILL_GRACE_S = 2.0
"""Seconds between an agent's asking a process to end and killing it."""


class Roster:
    """The newest process of each rank, by rank. An earlier process of a rank has always exited."""

    def __init__(self, outbox: Outbox, last_incarnation: Incarnation) -> None:
        self.ranks: RankRecords = {}
        self.last_incarnation = last_incarnation
        """The highest incarnation of its ranks so far."""
        self.num_lost = 0
        """Number of ranks that died or were left out while the job went on."""
        self._outbox = outbox
        self._census: Counter[RankPhase] = Counter()
        """Number of ranks in each phase."""

    def num_in(self, phase: RankPhase) -> int:
        """Number of ranks in the phase."""
        return self._census[phase]

    @property
    def num_living(self) -> int:
        """Number of processes that have not ended."""
        return len(self.ranks) - self._census[RankPhase.EXITED]

    def new_life(self) -> Machine[RankPhase, RankTrigger]:
        """The state machine of a rank to be added."""
        return rank_machine(self._census)

    def add(self, record: RankRecord) -> None:
        """Adds a rank, or a new process of one, which takes over the figures of the previous one."""
        before = self.ranks.get(record.rank)
        if before is not None:
            self._census[before.phase] -= 1
            record.take_over(before)
        self.ranks[record.rank] = record
        self.last_incarnation = record.incarnation

    def clear(self) -> None:
        """Drops all ranks, which have exited."""
        self.ranks.clear()
        self._census.clear()

    # Leaving

    def shut_down(self, record: RankRecord, reason: str, *, outcome: str = "") -> None:
        """Asks a rank to exit, over its session if it has one. `outcome`: the job's, if it is decided."""
        if record.is_connected:
            failed, address = outcome == Outcome.FAILED, record.address
            self._outbox.add(SendShutdown(**address, reason=reason, failed=failed, outcome=outcome))
        else:
            self.stop(record)

    def dismiss(self, record: RankRecord) -> None:
        """Asks a rank whose work is committed to exit, since its slot is wanted. It is restarted on another slot if one
        is free.
        """
        self.shut_down(record, f"its slot on {record.host} is wanted")
        record.departs(DepartureTrigger.WORK_COMMITTED)
        self.report_lost(record, f"rank {record.rank} has left {record.host} ({record.device}), its work committed")

    def leave_out(self, record: RankRecord) -> None:
        """Leaves a rank out: its process is ended, and the others do not wait for that. One that was stopped (SIGSTOP)
        is ended when it continues.
        """
        record.departs(DepartureTrigger.LEFT_OUT)
        self.num_lost += 1
        self._stop(record, waits_while_stopped=True)

    def stop(self, record: RankRecord) -> None:
        """Has the agent end the rank's process; the others wait until it has exited."""
        record.departs(DepartureTrigger.STOPPED)
        self._stop(record)

    def _stop(self, record: RankRecord, *, waits_while_stopped: bool = False) -> None:
        self._outbox.add(
            StopRank(
                **record.address,
                agent_id=record.agent_id,
                grace_s=KILL_GRACE_S,
                waits_while_stopped=waits_while_stopped,
            )
        )

    def note_exit(self, record: RankRecord, *, counts: bool) -> None:
        """Records the process's end. With `counts`, it adds to `num_lost`, unless the others went on without the rank
        before.
        """
        record.life.advance(RankTrigger.EXITED)
        self.num_lost += counts and not record.is_done_without

    def report_lost(self, record: RankRecord, notice: str) -> None:
        """Reports to watchers that the others go on without a rank."""
        left = present(self.ranks).values()
        num_ranks = sum(one.has_model for one in left) or len(left)  # nobody has it before the first round
        report = MembershipReport(rank=record.rank, text=notice, num_ranks=num_ranks)
        self._outbox.publish(report)
