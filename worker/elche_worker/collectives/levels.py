"""Chooses how much rounds are compressed, for `compress="auto"`, by the measured time of averagings.

While ranks train on, an averaging costs no time as long as it ends before the next round begins; over a slow network it
is what rounds wait for. So the least compression is chosen with which an averaging takes a small part of the time
between two rounds. Each rank has its choice in its row of the header, and all use the source's.
"""

from collections.abc import Sequence
from math import inf
from statistics import median

from elche_worker.collectives.codecs import Codec, Float32, Int2, Int4, Int8
from elche_worker.collectives.header import Row

LEVELS: dict[str, type[Codec]] = {"none": Float32, "int8": Int8, "int4": Int4, "int2": Int2}
"""The least compressed first. A level is a place in it, from 1; 0 is none."""
FIRST, LAST = 2, len(LEVELS)
NUM_ROUNDS = 3
"""Rounds at one level, by whose medians it is judged."""
MUCH, LITTLE = 0.5, 0.25
"""Fractions of the time between two rounds. Values are compressed more if an averaging takes over `MUCH` of it, and
less if it would then still take under `LITTLE`. In between nothing changes.
"""
WORTH = 0.75
"""More compression is kept only if it has shortened averagings to this fraction. It does not where latency, or the
compression itself, takes the time.
"""
MANY_BATCHES = 10
"""Batches of the slowest rank between rounds, above which 2 bits are tried: these cost about as much accuracy as rounds
of that length do (docs/convergence.md); no loss was seen with 4 bits.
"""


def level_of(wanted: int) -> int:
    """The level nearest to the number that another rank has sent."""
    return min(max(wanted, 1), LAST)


def codec_of(level: int) -> Codec:
    """The codec of a level."""
    return list(LEVELS.values())[level - 1]()


NUM_BYTES = [sum(codec_of(level).sizes) for level in range(1, LAST + 1)]
"""Bytes of an encoded block, by level."""


class LevelChoice:
    """One rank's choice."""

    def __init__(self) -> None:
        self.level = FIRST
        """The level that this rank wants for the next round."""
        self._known: list[tuple[float, float, float]] = []
        """Of the last rounds at this level: seconds of the averaging, seconds and batches since the round before."""
        self._last: tuple[float, Sequence[Row]] | None = None
        """Of the last round: when its header came, and the header."""
        self._less: tuple[int, float] | None = None
        """After a change to more compression, until it is judged: the level before, and its averaging time in s."""
        self._most = LAST
        """The most compressed level that is worth it in this generation."""
        self._exact_s = inf
        """Time of the process's first averaging, which is not compressed, while its generation lasts."""

    def learn(
        self, level: int, rows: Sequence[Row], came_s: float, averaging_s: float, *, is_exact: bool = False
    ) -> str:
        """Learns from a round at `level` whose header came at `came_s`. `averaging_s` is how long the averaging took
        from then on; with `is_exact` its values were sent as they are, whatever the level. Returns why another level is
        wanted from now on, or "".
        """
        last, self._last = self._last, (came_s, rows)
        is_other = last is not None and _group(last[1]) != _group(rows)
        if is_other:  # other ranks, perhaps over another network
            self._most, self._exact_s = LAST, inf
        # All use the source's level. A rank that would have chosen another one adopts it, and measures anew.
        if level != self.level or is_other:
            self.level, self._known, self._less = level, [], None
        if is_exact and last is None:
            self._exact_s = averaging_s
        if is_exact or last is None or is_other:
            return ""
        num_batches = min(now.local_step - before.local_step for now, before in zip(rows, last[1], strict=True))
        self._known = [*self._known[1 - NUM_ROUNDS :], (averaging_s, came_s - last[0], num_batches)]
        return self._choose() if len(self._known) == NUM_ROUNDS else ""

    def _choose(self) -> str:
        """Judges the present level by the medians of its rounds; returns why another one is chosen, or ""."""
        averaging_s, between_s, num_batches = (median(figures) for figures in zip(*self._known, strict=True))
        takes = f"an averaging takes {averaging_s:.3g} s"
        less, self._less = self._less, None
        if self.level == FIRST and averaging_s > self._exact_s:
            self._most = 1
            return self._change(1, f"{takes}, and took {self._exact_s:.3g} s without compression")
        if less is not None and averaging_s > WORTH * less[1]:
            self._most = less[0]
            return self._change(less[0], f"{takes}, and took {less[1]:.3g} s")
        takes += f", and {between_s:.3g} s pass between rounds"
        more = self.level + 1
        if averaging_s > MUCH * between_s and more <= self._most and (more < LAST or num_batches > MANY_BATCHES):
            self._less = self.level, averaging_s
            return self._change(more, takes)
        if self.level > 1:
            forecast_s = averaging_s * NUM_BYTES[self.level - 2] / NUM_BYTES[self.level - 1]
            if forecast_s < LITTLE * between_s:
                return self._change(self.level - 1, takes)
        return ""

    def _change(self, level: int, why: str) -> str:
        names = list(LEVELS)
        before, self.level, self._known = names[self.level - 1], level, []
        return f"compress='auto': {names[level - 1]} instead of {before}, since {why}"


def _group(rows: Sequence[Row]) -> tuple[int, int]:
    return rows[0].attempt, rows[0].generation
