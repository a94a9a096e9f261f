"""Formats numbers for people: rounded, with units, with SI prefixes where large."""

import math

PREFIXES = ("", "k", "M", "G", "T", "P", "E")


def quantity(value: float, unit: str) -> str:
    """Such as "12.3 k samples/s"."""
    return f"{si(value)} {unit}"


def si(value: float) -> str:
    """Three significant digits and an SI prefix; whole numbers below 1000 stay whole."""
    if not math.isfinite(value):
        return str(value)
    if abs(value) < 1000 and float(value).is_integer():
        return str(int(value))
    for prefix in PREFIXES:
        # The limit lies below 1000, so that rounding never makes four digits of it.
        if abs(value) < 999.5 or prefix == PREFIXES[-1]:
            break
        value /= 1000
    return f"{_three_digits(value)} {prefix}".rstrip()


def _three_digits(value: float) -> str:
    if abs(value) >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"


def percent(fraction: float) -> str:
    return f"{100 * fraction:.1f} %" if math.isfinite(fraction) else "-"


def figure(value: float) -> str:
    """A loss or a metric: four significant digits, never in a form that hides its size."""
    if value == 0 or not math.isfinite(value) or 1e-4 <= abs(value) < 1e6:
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.1f}"
    return f"{value:.3e}"


def printable(text: str) -> str:
    """The text with a space for every character that is not printable, such as terminal control codes."""
    return "".join(character if character.isprintable() else " " for character in text)


def printable_lines(text: str) -> str:
    """`printable` for text of several lines."""
    return "\n".join(printable(line) for line in text.expandtabs(4).splitlines())
