"""Positions of epochs, as ranges, and what is wrong with them."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

Ranges = dict[int, list[tuple[int, int]]]
"""By epoch: disjoint ranges of positions, in order."""


@dataclass(frozen=True, slots=True)
class CoveredPiece:
    """Consecutive positions of an epoch, and where they come from."""

    epoch: int
    start: int
    end: int
    source: str = ""

    @property
    def size(self) -> int:
        """Number of positions."""
        return self.end - self.start


def words(epoch: int, start: int, end: int) -> str:
    """Positions for people."""
    return f"epoch {epoch}: positions {start} to {end - 1} ({end - start} samples)"


def joined(pieces: Iterable[CoveredPiece]) -> list[tuple[int, int, int]]:
    """The pieces as (epoch, start, end), with each one that continues the one before it joined to it."""
    found: list[tuple[int, int, int]] = []
    for piece in pieces:
        if found and found[-1][0] == piece.epoch and found[-1][2] == piece.start:
            found[-1] = (piece.epoch, found[-1][1], piece.end)
        elif piece.size:
            found.append((piece.epoch, piece.start, piece.end))
    return found


def ranges_of(pieces: Iterable[CoveredPiece]) -> Ranges:
    """The positions of the pieces, by epoch."""
    ordered = sorted((piece.epoch, piece.start, piece.end) for piece in pieces if piece.size)
    found: Ranges = {}
    for epoch, start, end in ordered:
        ranges = found.setdefault(epoch, [])
        if ranges and start <= ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], max(ranges[-1][1], end))
        else:
            ranges.append((start, end))
    return found


def overlaps(pieces: Iterable[CoveredPiece]) -> list[str]:
    """The positions that are in more than one piece, a line each."""
    found = []
    ordered = sorted((piece for piece in pieces if piece.size), key=lambda piece: (piece.epoch, piece.start, piece.end))
    for epoch, group in groupby(ordered, key=lambda piece: piece.epoch):
        last: CoveredPiece | None = None
        for piece in group:
            if last is not None and piece.start < last.end:
                end = min(piece.end, last.end)
                found.append(f"{words(epoch, piece.start, end)} twice: by {last.source}, and by {piece.source}")
            # The one that reaches furthest: a long piece may overlap several that begin after it.
            if last is None or piece.end > last.end:
                last = piece
    return found


def gaps(ranges: Ranges, sizes: list[int]) -> list[tuple[int, int, int]]:
    """The positions of all epochs that are in no range, as (epoch, start, end)."""
    found = []
    for epoch, size in enumerate(sizes):
        at = 0
        for start, end in [*ranges.get(epoch, []), (size, size)]:
            if at < min(start, size):
                found.append((epoch, at, min(start, size)))
            at = max(at, end)
    return found


def difference(one: Ranges, other: Ranges) -> tuple[int, int, int] | None:
    """The first positions that are in exactly one of the two, as (epoch, start, end); None if there are none."""
    for epoch in sorted({*one, *other}):
        edges: dict[int, int] = {}
        # A sweep over the edges. Ranges of either are disjoint: a balance of 0 means that both have a position, or
        # neither.
        for ranges, weight in ((one, 1), (other, -1)):
            for start, end in ranges.get(epoch, []):
                edges[start] = edges.get(start, 0) + weight
                edges[end] = edges.get(end, 0) - weight
        balance = begun = 0
        for at, change in sorted(edges.items()):
            if balance:
                return epoch, begun, at
            balance, begun = balance + change, at
    return None
