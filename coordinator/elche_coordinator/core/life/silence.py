"""Finds silent ranks: reports those that make no batch, asks for their stacks, and says which are to be left out."""

from collections.abc import Callable, Mapping
from math import inf

from elche_coordinator.core.life.hangs import CHECK_S, Duty, HangWatch
from elche_coordinator.core.life.stalls import StallWatch
from elche_coordinator.core.messages.commands import AskStacks, Publish, SendPing
from elche_coordinator.core.messages.events import (
    BatchesTrained,
    EvaluationDone,
    ResultReceived,
    RoundEntered,
    StacksTold,
    WorkEvent,
)
from elche_coordinator.core.messages.ids import JobId, Rank
from elche_coordinator.core.messages.reports import StallReport
from elche_coordinator.core.records.outbox import Outbox
from elche_coordinator.core.records.ranks import RankRecord, RankRecords

LATE_S = 0.25
"""Delay of a check by which it is known that the coordinator itself has slept."""


class SilenceWatch:
    """Checks a job's ranks some time after any of them is heard; `set_check` schedules that, in seconds."""

    def __init__(
        self, job_id: JobId, ranks: RankRecords, outbox: Outbox, *, set_check: Callable[[float | None], None]
    ) -> None:
        self._job_id = job_id
        self._ranks = ranks
        self._outbox = outbox
        self._set_check = set_check
        self._due_s = inf
        """When the next check is due."""
        self.stalls = StallWatch()
        self.hangs = HangWatch()
        self._gaps_before_s: dict[Rank, float] = {}
        """The longest gaps of ranks before they were left out."""

    def since_s(self, rank: Rank) -> float | None:
        """Since when a stalled rank is silent; None for one that is not."""
        return self.stalls.stalled.get(rank)

    def watch(self, now_s: float) -> None:
        """Something has happened: schedules a check, unless one comes soon."""
        if self._due_s > now_s + CHECK_S:
            self._set_next(CHECK_S, now_s)

    def stop(self) -> None:
        """There is nothing to check: the job does not train now."""
        self._due_s = inf

    def check(self, duties: Mapping[Rank, Duty], now_s: float) -> dict[Rank, str]:
        """Reports ranks that have become stalled, and asks their agents for their stacks; returns those that are to be
        left out, and why.
        """
        late_s, self._due_s = now_s - self._due_s, inf
        if late_s > LATE_S:
            self.hangs.excuse(late_s)
        for rank, duty in duties.items():
            if duty.stall_s is None:
                self.stalls.on_order(rank)
        watched = {rank: duty.stall_s for rank, duty in duties.items() if duty.stall_s is not None}
        found, next_s = self.stalls.check(watched, now_s)
        for rank in found:
            record = self._ranks[rank]
            self._report(record, now_s - self.stalls.stalled[rank])
            if record.agent_id:
                self._outbox.add(AskStacks(**record.address(self._job_id), agent_id=record.agent_id))
        to_ask, left_out, sooner_s = self.hangs.check(duties, now_s)
        for rank in to_ask:
            self._outbox.add(SendPing(**self._ranks[rank].address(self._job_id)))
        times_s = [delay_s for delay_s in (next_s, sooner_s) if delay_s is not None]
        if times_s:
            self._set_next(min(times_s), now_s)
        return left_out

    def _set_next(self, delay_s: float, now_s: float) -> None:
        self._due_s = now_s + delay_s
        self._set_check(delay_s)

    def on_left_out(self, rank: Rank, now_s: float) -> None:
        """The rank is to be started again. Its silence counts as a gap, so that the next must be longer."""
        self._gaps_before_s[rank] = self.stalls.gaps_s.get(rank, 0.0)
        self.stalls.on_progress(rank, now_s)
        self.stalls.on_order(rank)
        self.hangs.forget([rank])

    def on_was_stopped(self, rank: Rank) -> None:
        """The process of a rank that was left out had been stopped (SIGSTOP): its silence does not count as a gap."""
        self.stalls.gaps_s[rank] = self._gaps_before_s.get(rank, 0.0)

    def on_stacks(self, record: RankRecord, event: StacksTold, now_s: float) -> None:
        """The stacks of a stalled rank's threads."""
        since_s = self.since_s(record.rank)
        if since_s is not None:
            self._report(record, now_s - since_s, stacks=event.text)
        else:
            self._outbox.refuse(event, f"rank {record.rank} is not stalled", "its silence is over")

    def on_heard(self, record: RankRecord, event: WorkEvent, now_s: float) -> None:
        """The rank has said something, which the job takes in after this. While averaging overlaps, one that enters a
        round has a batch to make, too.
        """
        self.hangs.on_heard(record.rank, now_s)
        match event:
            case RoundEntered() | ResultReceived() | EvaluationDone():
                self.on_alive(record, now_s)
            case BatchesTrained() if event.local_step > record.local_step:
                self.on_progress(record, now_s)

    def on_alive(self, record: RankRecord, now_s: float) -> None:
        """The rank has done something other than a batch, or has none to make now: its silence is over, and what comes
        until its next batch is no gap between two.
        """
        if record.rank in self.stalls.stalled:
            self.on_progress(record, now_s)
        self.stalls.on_order(record.rank)

    def on_progress(self, record: RankRecord, now_s: float) -> None:
        """The rank has made batches."""
        silent_s = self.stalls.on_progress(record.rank, now_s)
        if silent_s is not None:
            self._report(record, silent_s, is_over=True)

    def forgive(self) -> None:
        """Training was paused or goes on: every silence begins anew."""
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
        self._outbox.add(Publish(job_id=self._job_id, report=report))
