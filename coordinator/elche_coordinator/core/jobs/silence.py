"""Reports ranks that make no batch for longer than their history explains, and asks their agents for their stacks."""

from collections.abc import Callable, Mapping

from elche_coordinator.core.jobs.stalls import CHECK_S, StallWatch
from elche_coordinator.core.messages.commands import AskStacks, Publish
from elche_coordinator.core.messages.events import StacksTold
from elche_coordinator.core.messages.ids import JobId, Rank
from elche_coordinator.core.messages.reports import StallReport
from elche_coordinator.core.records.outbox import Outbox
from elche_coordinator.core.records.ranks import RankRecord, RankRecords


class SilenceWatch:
    """Checks a job's ranks for stalls some time after any of them is heard; `set_check` schedules that, in seconds."""

    def __init__(
        self, job_id: JobId, ranks: RankRecords, outbox: Outbox, *, set_check: Callable[[float | None], None]
    ) -> None:
        self._job_id = job_id
        self._ranks = ranks
        self._outbox = outbox
        self._set_check = set_check
        self._will_check = False
        self.stalls = StallWatch()

    def since_s(self, rank: Rank) -> float | None:
        """Since when a stalled rank is silent; None for one that is not."""
        return self.stalls.stalled.get(rank)

    def watch(self) -> None:
        """A rank was heard: schedules a check, unless one is scheduled."""
        if not self._will_check:
            self._will_check = True
            self._set_check(CHECK_S)

    def stop(self) -> None:
        """The scheduled check found nothing to check: the job does not train now."""
        self._will_check = False

    def check(self, limits_s: Mapping[Rank, float | None], now_s: float) -> None:
        """Finds ranks that have become stalled, reports them, and asks their agents for their stacks.

        `limits_s` is how long a silence of each rank is explained; None for one that waits for somebody else.
        """
        self._will_check = False
        for rank, limit_s in limits_s.items():
            if limit_s is None:
                self.stalls.on_order(rank)
        watched = {rank: limit_s for rank, limit_s in limits_s.items() if limit_s is not None}
        found, next_s = self.stalls.check(watched, now_s)
        for rank in found:
            record = self._ranks[rank]
            self._report(record, now_s - self.stalls.stalled[rank])
            if record.agent_id:
                self._outbox.add(AskStacks(**record.address(self._job_id), agent_id=record.agent_id))
        if next_s is not None:
            self._will_check = True
            self._set_check(next_s)

    def on_stacks(self, record: RankRecord, event: StacksTold, now_s: float) -> None:
        """The stacks of a stalled rank's threads."""
        since_s = self.since_s(record.rank)
        if since_s is not None:
            self._report(record, now_s - since_s, stacks=event.text)
        else:
            self._outbox.refuse(event, f"rank {record.rank} is not stalled", "its silence is over")

    def on_alive(self, record: RankRecord, now_s: float) -> None:
        """The rank has done something other than a batch: its silence is over, and is not counted in its history."""
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
