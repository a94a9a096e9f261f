"""Suggestions for a mistyped name of an option, a command or a job."""

from collections.abc import Sequence
from difflib import get_close_matches

MAX_GUESSES = 3
MIN_SIMILARITY = 0.8
"""Least similarity of a suggestion by `difflib`, from 0 to 1; less similar names would mislead."""


def similar(typed: str, known: Sequence[str]) -> list[str]:
    """The names that differ only in dashes or case; else those with a common prefix; else the most similar ones, also
    those of the same letters in another order.
    """
    letters = {name: _letters(name) for name in known}
    wanted = _letters(typed)
    same = [name for name, text in letters.items() if text == wanted]
    begin = [name for name, text in letters.items() if _begin_alike(text, wanted)]
    close = get_close_matches(wanted, letters.values(), n=MAX_GUESSES, cutoff=MIN_SIMILARITY)
    look = [name for name, text in letters.items() if text in close or sorted(text) == sorted(wanted)]
    return (same or begin or look)[:MAX_GUESSES]


def _letters(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def _begin_alike(one: str, other: str) -> bool:
    shorter = min(len(one), len(other))
    return shorter >= 3 and one[:shorter] == other[:shorter]
