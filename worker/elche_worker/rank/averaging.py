"""One round: header, average on a scratch copy, result into the model (ROUNDS, "A round").

The collective runs on a thread of its own. A blocking round waits for it; in an overlapped one the rank trains on
meanwhile, and the result comes as a correction of what it has then.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple, dataclass, replace

import torch

from elche_worker.rank.group import Group, GroupFailed
from elche_worker.rank.layout import Layout

Wait = Callable[[threading.Event], None]


@dataclass(frozen=True, slots=True)
class Row:
    """What one rank brings into a round; all integers, gathered from all ranks before the values."""

    attempt: int
    generation: int
    round: int
    layout_hash: int
    weight: int
    """Samples since the last average."""
    finite: int
    cut: int
    """Samples of its ordered leases that its values contain."""
    local_step: int
    compute_us: int
    version: int
    """Version that it held before."""


@dataclass(frozen=True, slots=True)
class Average:
    """What a collective has brought: the result is in the layout's scratch."""

    rows: list[Row]
    """The header, in order of position."""
    source_bytes: torch.Tensor
    collective_ms: float
    """From entry to result."""
    divergence: float | None = None
    """L2 over trained parameters of what the rank brought minus the result, relative to the result's."""

    @property
    def version(self) -> int:
        """The version that the result is, if the round commits."""
        return max(row.version for row in self.rows) + 1


class Averaging:
    """Rounds of one rank, one at a time. `wake` is called on the collective's thread when it has ended."""

    def __init__(
        self, layout: Layout, *, wake: Callable[[], None], wait: Wait, measures_divergence: bool = True
    ) -> None:
        self._layout = layout
        self._wake = wake
        self._wait = wait
        self._measures_divergence = measures_divergence
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="averaging")
        self._running: Future[Average] | None = None

    @property
    def is_running(self) -> bool:
        """Whether a round was started and not completed."""
        return self._running is not None

    @property
    def is_done(self) -> bool:
        """Whether the round's collective has ended, so that `complete` does not wait."""
        return self._running is not None and self._running.done()

    def start(self, group: Group, row: Row, *, keeps_snapshot: bool) -> None:
        """Takes the snapshot and starts the collective. The snapshot is kept when the rank may train on."""
        row = replace(row, finite=int(self._layout.gather() or not row.weight))
        if keeps_snapshot:
            self._layout.keep_snapshot()
        self._running = self._thread.submit(average, group, self._layout, row, self._wait)
        self._running.add_done_callback(lambda _: self._wake())

    def complete(self, *, has_newer_steps: bool) -> Average:
        """Waits for the result and brings it into the model. Raises `GroupFailed`; the model is as before then.

        Without newer steps the result replaces the parameters bit for bit; with them it corrects them.
        """
        assert self._running is not None
        averaged = self._running.result()
        self._running = None
        if self._measures_divergence:
            averaged = replace(averaged, divergence=self._layout.divergence())
        if has_newer_steps:
            self._layout.correct()
        else:
            self._layout.apply()
        if averaged.source_bytes.numel():
            self._layout.apply_source_bytes(averaged.source_bytes)
        return averaged


def average(group: Group, layout: Layout, row: Row, wait: Wait) -> Average:
    """Averages the scratch, which holds this rank's values, over the group.

    Raises `GroupFailed` when a collective fails or the rows do not belong together.
    """
    started_s = time.perf_counter()
    raw = layout.source_bytes()
    rows = [_row(tensor) for tensor in group.all_gather(torch.tensor(astuple(row)), wait)]
    _check_together(rows)
    source = max(range(group.size), key=lambda position: (rows[position].version, -position))
    if group.size > 1:
        total = sum(one.weight for one in rows)
        layout.weigh(float(row.weight if total else group.position == source))
        for flat in layout.scratch.values():
            if flat.numel():
                group.all_reduce(flat, wait)
        layout.divide(float(total or 1))
        if raw.numel():
            group.broadcast(raw, source, wait)
    return Average(rows, raw, (time.perf_counter() - started_s) * 1000)


def _row(tensor: torch.Tensor) -> Row:
    return Row(*(int(value) for value in tensor))


def _check_together(rows: list[Row]) -> None:
    first = rows[0]
    for position, row in enumerate(rows):
        if (row.attempt, row.generation, row.round) != (first.attempt, first.generation, first.round):
            raise GroupFailed(f"ranks 0 and {position} met in different rounds: {first.round} and {row.round}")
        if row.layout_hash != first.layout_hash:
            raise GroupFailed(f"the models of ranks 0 and {position} differ")
