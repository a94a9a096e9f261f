"""Ranges of positions are what sets of positions are, for pieces drawn at random."""

import random
from itertools import groupby

from elche_audit.coverage import CoveredPiece, Ranges, difference, gaps, joined, overlaps, ranges_of, words

EPOCHS, SIZE = 3, 12

Position = tuple[int, int]


def drawn(chance: random.Random) -> list[CoveredPiece]:
    pieces = []
    for number in range(chance.randrange(7)):
        start, end = sorted(chance.choices(range(SIZE + 1), k=2))
        pieces.append(CoveredPiece(chance.randrange(EPOCHS), start, end, f"piece {number}"))
    return pieces


def positions(piece: CoveredPiece) -> set[Position]:
    return {(piece.epoch, at) for at in range(piece.start, piece.end)}


def union(pieces: list[CoveredPiece]) -> set[Position]:
    return {one for piece in pieces for one in positions(piece)}


def runs(covered: set[Position]) -> list[tuple[int, int, int]]:
    """Consecutive positions as (epoch, start, end), in order."""
    found = []
    for (epoch, _), group in groupby(enumerate(sorted(covered)), key=lambda one: (one[1][0], one[1][1] - one[0])):
        at = [position for _, (_, position) in group]
        found.append((epoch, at[0], at[-1] + 1))
    return found


def flat(ranges: Ranges) -> list[tuple[int, int, int]]:
    return [(epoch, *one) for epoch in sorted(ranges) for one in ranges[epoch]]


def test_ranges_are_what_sets_are() -> None:
    chance = random.Random(1)
    for _ in range(300):
        compare(drawn(chance), drawn(chance))


def compare(pieces: list[CoveredPiece], others: list[CoveredPiece]) -> None:
    covered, other = union(pieces), union(others)
    assert flat(ranges_of(pieces)) == runs(covered)
    everything = {(epoch, at) for epoch in range(EPOCHS) for at in range(SIZE)}
    assert gaps(ranges_of(pieces), [SIZE] * EPOCHS) == runs(everything - covered)
    first = difference(ranges_of(pieces), ranges_of(others))
    if covered == other:
        assert first is None
    else:
        assert first is not None
        epoch, start, end = first
        differing = covered ^ other
        assert (epoch, start) == min(differing)
        assert {(epoch, at) for at in range(start, end)} <= differing
    assert bool(overlaps(pieces)) == (len(covered) < sum(piece.size for piece in pieces))


def test_both_who_have_a_position_are_named_also_within_a_longer_piece() -> None:
    pieces = [CoveredPiece(0, 0, 8, "one"), CoveredPiece(0, 1, 2, "two"), CoveredPiece(0, 4, 6, "three")]
    pieces += [CoveredPiece(0, 8, 9, "four"), CoveredPiece(1, 8, 9, "five")]
    twice = [f"{words(0, 1, 2)} twice: by one, and by two", f"{words(0, 4, 6)} twice: by one, and by three"]
    assert overlaps(pieces) == twice


def test_pieces_are_joined_in_the_order_in_which_they_were_trained() -> None:
    pieces = [CoveredPiece(0, 8, 12), CoveredPiece(0, 0, 4), CoveredPiece(0, 4, 8), CoveredPiece(1, 8, 9)]
    assert joined([*pieces, CoveredPiece(1, 3, 3)]) == [(0, 8, 12), (0, 0, 8), (1, 8, 9)]
