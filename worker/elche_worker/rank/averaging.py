"""One blocking round: header, average on a scratch copy, result into the model (ROUNDS, "A round")."""

import threading
from collections.abc import Callable
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


def average(group: Group, layout: Layout, row: Row, wait: Wait) -> list[Row]:
    """Averages the model over the group; returns the header.

    The averaged result is left in the scratch, for the caller to apply. Raises
    `GroupFailed` when a collective fails or the rows do not belong together; the model is as before then.
    """
    row = replace(row, finite=int(layout.gather() or not row.weight))
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
    raw = layout.source_bytes()
    if raw.numel():
        group.broadcast(raw, source, wait)
        layout.apply_source_bytes(raw)
    return rows


def _row(tensor: torch.Tensor) -> Row:
    return Row(*(int(value) for value in tensor))


def _check_together(rows: list[Row]) -> None:
    first = rows[0]
    for position, row in enumerate(rows):
        if (row.attempt, row.generation, row.round) != (first.attempt, first.generation, first.round):
            raise GroupFailed(f"ranks 0 and {position} met in different rounds: {first.round} and {row.round}")
        if row.layout_hash != first.layout_hash:
            raise GroupFailed(f"the models of ranks 0 and {position} differ")
