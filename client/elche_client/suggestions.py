"""What somebody may have meant by a name that there is not."""

from collections.abc import Sequence
from difflib import get_close_matches

MAX_GUESSES = 3
ALIKE = 0.8  # of 1; names that are less alike mislead


def similar(typed: str, known: Sequence[str]) -> list[str]:
    """The names that differ in dashes or case alone; else those that begin alike; else those that look very alike."""
    letters = {name: _letters(name) for name in known}
    wanted = _letters(typed)
    same = [name for name, text in letters.items() if text == wanted]
    begin = [name for name, text in letters.items() if _begin_alike(text, wanted)]
    close = get_close_matches(wanted, letters.values(), n=MAX_GUESSES, cutoff=ALIKE)
    look = [name for name, text in letters.items() if text in close]
    return (same or begin or look)[:MAX_GUESSES]


def _letters(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def _begin_alike(one: str, other: str) -> bool:
    shorter = min(len(one), len(other))
    return shorter >= 3 and one[:shorter] == other[:shorter]
