"""Finds silent ranks: reports stalled ones, asks for their stacks, and returns those to leave out."""

from collections.abc import Callable, Mapping
from math import inf

from elche_coordinator.core.life.hangs import CHECK_S, Duty, HangWatch
from elche_coordinator.core.life.stalls import StallWatch
from elche_coordinator.core.messages.commands import AskStacks, SendPing
from elche_coordinator.core.messages.events import (
    BatchesTrained,
    EvaluationDone,
    ResultReceived,
    RoundEntered,
    StacksReported,
    WorkEvent,
)
from elche_coordinator.core.messages.ids import Rank
from elche_coordinator.core.messages.reports import StallReport
from elche_coordinator.core.records.outbox import Outbox
from elche_coordinator.core.records.ranks import RankRecord, RankRecords

LATE_S = 0.25
"""If a check is late by this many seconds, the coordinator itself did not run."""


class SilenceWatch:
    """Checks a job's ranks for silence from time to time. `set_check` schedules the next check in a number of seconds;
    None cancels it.
    """

    def __init__(self, ranks: RankRecords, outbox: Outbox, *, set_check: Callable[[float | None], None]) -> None:
        self._ranks = ranks
        self._outbox = outbox
        self._set_check = set_check
        self._due_s = inf
        """Time of the next check."""
        self.stalls = StallWatch()
        """Finds ranks to report as stalled, whether others wait for them or not."""
        self.hangs = HangWatch()
        """Finds ranks to leave out because others wait for them."""
        self._gaps_before_s: dict[Rank, float] = {}
        """Each rank's longest gap before it was left out, which `on_was_stopped` restores."""

    def since_s(self, rank: Rank) -> float | None:
        """Time since which a stalled rank is silent; None for another rank."""
        return self.stalls.stalled.get(rank)

    def watch(self, now_s: float) -> None:
        """Schedules a check, unless one is due soon."""
        if self._due_s > now_s + CHECK_S:
            self._set_next(CHECK_S, now_s)

    def stop(self) -> None:
        """Forgets the time of the next check, since the job has stopped training."""
        self._due_s = inf

    def check(self, duties: Mapping[Rank, Duty], now_s: float) -> dict[Rank, str]:
        """Reports newly stalled ranks, and asks their agents for stacks; returns the ranks to leave out, with
        reasons.
        """
        # If the coordinator did not run, messages may be unread: the ranks that sent them would seem to be silent.
        late_s, self._due_s = now_s - self._due_s, inf
        if late_s > LATE_S:
            self.hangs.excuse(late_s)
            self.stalls.excuse(late_s)
        for rank, duty in duties.items():
            # A wait for others is no silence: the next batch is counted from when it is due.
            if duty.stall_s is None:
                self.stalls.on_order(rank)
        watched = {rank: duty.stall_s for rank, duty in duties.items() if duty.stall_s is not None}
        found, next_s = self.stalls.check(watched, now_s)
        for rank in found:
            record = self._ranks[rank]
            self._report(record, now_s - self.stalls.stalled[rank])
            if record.agent_id:  # only an agent can read another process's stacks
                self._outbox.add(AskStacks(**record.address, agent_id=record.agent_id))
        to_ask, left_out, sooner_s = self.hangs.check(duties, now_s)
        for rank in to_ask:
            self._outbox.add(SendPing(**self._ranks[rank].address))
        times_s = [delay_s for delay_s in (next_s, sooner_s) if delay_s is not None]
        if times_s:
            self._set_next(min(times_s), now_s)
        return left_out

    def _set_next(self, delay_s: float, now_s: float) -> None:
        self._due_s = now_s + delay_s
        self._set_check(delay_s)

    def on_left_out(self, rank: Rank, now_s: float) -> None:
        """Counts the silence of a rank that is left out as a gap, so that its next process may be silent for longer."""
        self._gaps_before_s[rank] = self.stalls.gaps_s.get(rank, 0.0)
        self.stalls.on_progress(rank, now_s)
        self.stalls.on_order(rank)
        self.hangs.forget([rank])

    def on_was_stopped(self, rank: Rank) -> None:
        """Removes that gap again: the process had been stopped (SIGSTOP) and was not slow."""
        self.stalls.gaps_s[rank] = self._gaps_before_s.get(rank, 0.0)

    def on_stacks(self, record: RankRecord, event: StacksReported, now_s: float) -> None:
        """Reports the stacks of a stalled rank's threads."""
        since_s = self.since_s(record.rank)
        if since_s is not None:
            self._report(record, now_s - since_s, stacks=event.text)
        else:
            self._outbox.refuse(event, f"rank {record.rank} is not stalled", "its silence is over")

    def on_message(self, record: RankRecord, event: WorkEvent, now_s: float) -> None:
        """Records a message of the rank, before the job handles it. Entering a round ends the rank's silence although,
        with overlapped averaging, a batch may still be due.
        """
        self.hangs.on_message(record.rank, now_s)
        match event:
            case RoundEntered() | ResultReceived() | EvaluationDone():
                self.on_alive(record, now_s)
            case BatchesTrained() if event.local_step > record.local_step:
                self.on_progress(record, now_s)

    def on_alive(self, record: RankRecord, now_s: float) -> None:
        """Ends the rank's silence after work other than a batch, or when no batch is due. The time until its next batch
        does not count as a gap.
        """
        if record.rank in self.stalls.stalled:
            self.on_progress(record, now_s)
        self.stalls.on_order(record.rank)

    def on_progress(self, record: RankRecord, now_s: float) -> None:
        """Records that the rank has made batches."""
        silent_s = self.stalls.on_progress(record.rank, now_s)
        if silent_s is not None:
            self._report(record, silent_s, is_over=True)

    def forgive(self) -> None:
        """Restarts all silences, because training is paused or goes on."""
        self.hangs.forget(self._ranks)
        for rank in self._ranks:
            self.stalls.on_order(rank)

    def _report(self, record: RankRecord, silent_s: float, *, is_over: bool = False, stacks: str = "") -> None:
        report = StallReport(
            rank=record.rank,
            host=record.host,
            device=record.device,
            silent_s=silent_s,
            usual_ms=record.ms_per_batch or 0.0,
            is_over=is_over,
            stacks=stacks,
        )
        self._outbox.publish(report)
