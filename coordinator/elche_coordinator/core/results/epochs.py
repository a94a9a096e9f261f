"""Sums each epoch's losses and times while it is trained, and reports it when it is complete."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

from elche_coordinator.core.messages.commands import SendEpochMetrics
from elche_coordinator.core.messages.ids import Attempt, Epoch, Rank
from elche_coordinator.core.messages.reports import EpochReport, UserEvent
from elche_coordinator.core.messages.spec import EpochWork, Lease, RankPart, whole_number
from elche_coordinator.core.records.failure import Failure
from elche_coordinator.core.records.outbox import Outbox
from elche_coordinator.core.records.ranks import RankRecords
from elche_coordinator.core.results.tally import EpochTally


class Epochs:
    """Sums over the committed work of each open epoch. A finished one is reported, and sent to the lowest rank for its
    callbacks.
    """

    def __init__(self, outbox: Outbox, attempt: Attempt, *, has_callback: bool, awaits_evaluation: bool) -> None:
        self._outbox = outbox
        self._attempt = attempt
        self._has_callback = has_callback
        """True if the job has a callback for finished epochs."""
        self._awaits_evaluation = awaits_evaluation
        """True if the job has an evaluation, whose metrics go with the epoch's report."""
        self._tallies: dict[int, EpochTally] = {}
        """Sums of each epoch that has begun and is not complete."""
        self._shared_until_s = 0.0
        """Time up to which durations were attributed to epochs."""
        self.unhandled: dict[int, SendEpochMetrics] = {}
        """Finished epochs that were sent to a rank, the lowest one, and whose callback has not returned."""
        self._due: dict[int, EpochReport] = {}
        """Finished epochs that were not sent yet, because their evaluation is missing."""
        self.untrained: Failure | None = None
        """Set when the first epoch has ended and none of its batches was trained. Later epochs are not checked: one may
        have only a few batches left.
        """

    def add(self, rank: Rank, work: EpochWork) -> None:
        """Adds one rank's work in a committed round."""
        self._tallies.setdefault(work.epoch, EpochTally()).add(rank, work)

    def add_silent(self, rank: Rank, booked: list[Lease], batch_size: int) -> None:
        """Adds a lost rank's work in a committed round, whose losses are unknown."""
        for piece in booked:
            num_batches = -(-piece.size // batch_size)
            work = EpochWork(
                epoch=piece.epoch, num_batches=num_batches, num_samples=piece.size, loss_sum=0.0, has_loss=False
            )
            self.add(rank, work)

    def start_clock(self, now_s: float) -> None:
        """Starts the clock of epochs at the beginning of training."""
        self._shared_until_s = now_s

    def share_time(self, parts: Mapping[Rank, RankPart], now_s: float) -> None:
        """Attributes the time since the last round to the round's epochs, by samples, since short epochs may begin and
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
        """Reports a finished epoch, and returns the report. Sets `untrained` if the first epoch has trained nothing."""
        tally = self._tallies.pop(epoch, EpochTally())
        report = tally.report(epoch=epoch, ranks=ranks, committed=committed, dropped=dropped, attempt=self._attempt)
        self._outbox.publish(report)
        if notice := tally.notice_of_skipped(epoch):
            rank, text = notice
            self._outbox.publish(UserEvent(rank=rank, text=text))
        has_trained = epoch > 0 or any(other.num_batches for other in self._tallies.values())
        if tally.is_all_skipped and not has_trained:
            self.untrained = self.untrained or Failure(
                f"nothing was trained in epoch {epoch + 1}: collate_fn or the data set gave None for every batch",
                invalid=True,
            )
        if self._has_callback:
            self._due[epoch] = report
        return report

    def send_due(self, members: RankRecords, metrics: dict[str, float], *, through: int) -> None:
        """Sends finished epochs, each with its evaluation, to the lowest rank, in order."""
        for epoch in [epoch for epoch in self._due if epoch <= through]:
            report = self._due.pop(epoch)
            shown = metrics if self._awaits_evaluation else {}
            self._send(members, epoch, report, shown)

    def _send(self, members: RankRecords, epoch: int, report: EpochReport, metrics: dict[str, float]) -> None:
        address = members[min(members)].address
        self.unhandled[epoch] = SendEpochMetrics(**address, report=report, metrics=metrics)
        self._outbox.add(self.unhandled[epoch])

    def lose(self, rank: Rank, members: RankRecords) -> None:
        """Sends epochs whose callback has not returned on a lost rank to the lowest of the others."""
        for epoch, sent in list(self.unhandled.items()):
            if sent.rank == rank and members:
                self._send(members, epoch, sent.report, sent.metrics)

    def is_waited_for(self, rank: Rank) -> bool:
        """True if a callback may be running on the rank."""
        return bool(self.unhandled) and any(sent.rank == rank for sent in self.unhandled.values())

    def to_json(self) -> dict[str, object]:
        """The open epochs' sums, as plain values."""
        return {str(epoch): tally.to_json() for epoch, tally in self._tallies.items()}

    def unhandled_reports(self) -> list[dict[str, object]]:
        """Finished epochs whose callback has not returned, as plain values."""
        found = {epoch: sent.report for epoch, sent in self.unhandled.items()} | self._due
        return [asdict(report) for _, report in sorted(found.items())]

    def restore(self, state: Mapping[str, Any], reports: Iterable[Mapping[str, Any]]) -> None:
        """Restores the values of `to_json()` and `unhandled_reports()`, which are sent to a rank of this training."""
        self._tallies = {int(epoch): EpochTally.from_json(tally) for epoch, tally in state.items()}
        for fields in reports if self._has_callback else ():
            report = EpochReport(**{name: _plain(value) for name, value in fields.items()})
            whole_number(report.epoch, "epoch")
            self._due[report.epoch] = replace(report, attempt=self._attempt)


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
