"""Sums each epoch's losses and times while it is trained, and reports it when it is complete."""

from collections.abc import Mapping
from typing import Any

from elche_coordinator.core.messages.commands import Publish, SendEpochMetrics
from elche_coordinator.core.messages.ids import Epoch, JobId, Rank
from elche_coordinator.core.messages.reports import EpochReport
from elche_coordinator.core.messages.spec import EpochWork, RankPart
from elche_coordinator.core.records.outbox import Outbox
from elche_coordinator.core.records.ranks import RankRecords
from elche_coordinator.core.results.tally import EpochTally


class Epochs:
    """Sums over the committed work of each open epoch. A finished one is published, and sent to rank 0's callbacks."""

    def __init__(self, job_id: JobId, outbox: Outbox, *, tells_rank_0: bool, awaits_evaluation: bool) -> None:
        self._job_id = job_id
        self._outbox = outbox
        self._tells_rank_0 = tells_rank_0
        self._awaits_evaluation = awaits_evaluation
        self._tallies: dict[int, EpochTally] = {}
        self._shared_until_s = 0.0
        """Until when epochs have got their parts of the time."""
        self.untaken: dict[int, None] = {}
        """Finished epochs that were sent to rank 0, and whose callback has not returned."""
        self._due: dict[int, EpochReport] = {}
        """Finished epochs that were not sent to rank 0, because their evaluation is not complete."""

    def add(self, rank: Rank, work: EpochWork) -> None:
        """One rank's part of a committed round."""
        self._tallies.setdefault(work.epoch, EpochTally()).add(rank, work)

    def start_clock(self, now_s: float) -> None:
        """Training begins: what was before is no epoch's time."""
        self._shared_until_s = now_s

    def share_time(self, parts: Mapping[Rank, RankPart], now_s: float) -> None:
        """Gives the epochs of a round their parts of the time since the last one, by samples: short ones may begin and
        end within it.
        """
        slices = [piece for part in parts.values() for piece in part.slices]
        num_samples = sum(piece.size for piece in slices)
        if not num_samples:
            return
        elapsed_s, self._shared_until_s = now_s - self._shared_until_s, now_s
        for piece in slices:
            tally = self._tallies.setdefault(piece.epoch, EpochTally())
            tally.duration_s += elapsed_s * piece.size / num_samples

    def close(self, epoch: Epoch, ranks: list[Rank], *, committed: int, dropped: int) -> EpochReport:
        """Reports a finished epoch."""
        tally = self._tallies.pop(epoch, EpochTally())
        report = tally.report(epoch=epoch, ranks=ranks, committed=committed, dropped=dropped)
        self._outbox.add(Publish(job_id=self._job_id, report=report))
        if self._tells_rank_0:
            self._due[epoch] = report
        return report

    def tell(self, members: RankRecords, metrics: dict[str, float], *, through: int) -> None:
        """Sends rank 0 the finished epochs up to `through`, in order, with the metrics of their evaluation."""
        for epoch in [epoch for epoch in self._due if epoch <= through]:
            report = self._due.pop(epoch)
            self.untaken[epoch] = None
            address = members[Rank(0)].address(self._job_id)
            shown = metrics if self._awaits_evaluation else {}
            self._outbox.add(SendEpochMetrics(**address, report=report, metrics=shown))

    def to_json(self) -> dict[str, object]:
        """The open epochs' sums, as plain values."""
        return {str(epoch): tally.to_json() for epoch, tally in self._tallies.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from `to_json`."""
        self._tallies = {int(epoch): EpochTally.from_json(tally) for epoch, tally in state.items()}
