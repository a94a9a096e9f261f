"""Notices a rank that has had less than half of its share of the work for some epochs, and says why."""

from dataclasses import dataclass

from elche.sums import added
from elche_coordinator.core.messages.ids import Rank
from elche_coordinator.core.messages.reports import EpochReport
from elche_coordinator.core.records.ranks import RankRecord, RankRecords, present

EPOCHS = 3
"""Least number of epochs over which a rank's part is compared with its share."""
LEAST_BATCHES = 4
"""Least share in batches over these epochs; if they are shorter, more of them are taken together."""
LEAST_S = 2.0
"""Least duration of these epochs in seconds, so that one pause of a process is not reported."""
STARVED_FRACTION = 0.5
"""A rank that has trained less than this part of its share is reported."""


@dataclass(slots=True, kw_only=True)
class Window:
    """A rank's batches of some epochs, and the number that its speed entitles it to."""

    num_epochs: int = 0
    num_batches: int = 0
    """Batches that it has trained."""
    due_batches: float = 0.0
    """Batches that are its share."""
    evaluated_ms: float
    """The rank's total time of evaluation when the window began, to be subtracted from that at its end."""
    waited_ms: float
    """The rank's total time of waiting for others when the window began."""
    duration_s: float = 0.0
    """Duration of the epochs."""


class FairShares:
    """Compares what each rank has trained with its share by the ranks' present speeds."""

    def __init__(self) -> None:
        self._windows: dict[Rank, Window] = {}
        self._reported: dict[Rank, None] = {}
        """Ranks that were reported; they may be reported again once they have had their share."""

    def close(self, report: EpochReport, ranks: RankRecords, members: RankRecords) -> dict[Rank, str]:
        """Takes in a complete epoch, whose figures are in the order of `ranks`. Returns a message for people about each
        rank that is to be reported.
        """
        batches = dict(zip(ranks, report.rank_batches, strict=False))
        speeds = {rank: 1 / one.ms_per_batch for rank, one in present(members).items() if one.ms_per_batch}
        messages: dict[Rank, str] = {}
        for rank, speed in speeds.items() if len(speeds) > 1 else ():
            record = members[rank]
            new = Window(evaluated_ms=record.evaluated_ms, waited_ms=record.waited_ms)
            window = self._windows.setdefault(rank, new)
            window.num_epochs += 1
            window.num_batches += batches.get(rank, 0)
            window.due_batches += sum(batches.values()) * speed / added(speeds.values())
            window.duration_s += report.duration_s
            is_long = window.due_batches >= LEAST_BATCHES and window.duration_s >= LEAST_S
            if window.num_epochs >= EPOCHS and is_long:
                del self._windows[rank]
                messages |= self._judge(record, window)
        return messages

    def _judge(self, record: RankRecord, window: Window) -> dict[Rank, str]:
        """Returns the rank's message if it has had too little, and was not reported since it last had its share."""
        if window.num_batches >= STARVED_FRACTION * window.due_batches:
            self._reported.pop(record.rank, None)
            return {}
        if record.rank in self._reported:
            return {}
        self._reported[record.rank] = None
        return {record.rank: starved_text(record, window)}


def starved_text(record: RankRecord, window: Window) -> str:
    """The message about a rank that had too little work: its batches, its share, and how it spent its time."""
    evaluated_s = (record.evaluated_ms - window.evaluated_ms) / 1000
    waited_s = (record.waited_ms - window.waited_ms) / 1000
    if evaluated_s >= max(waited_s, window.duration_s / 4):
        why = f"it evaluated for {evaluated_s:.1f} s of {window.duration_s:.1f} s"
    elif waited_s >= window.duration_s / 4:
        why = f"it waited for others for {waited_s:.1f} s of {window.duration_s:.1f} s"
    else:
        why = f"its batches, which now take {record.ms_per_batch or 0.0:.3g} ms, were slower before, or it had no work"
    return (
        f"has trained {window.num_batches} batches of the last {window.num_epochs} epochs, less than half of its share "
        f"of {window.due_batches:.0f}: {why}"
    )
