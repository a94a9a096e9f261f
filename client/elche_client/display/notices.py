"""Lines for people on stderr; above the live display while there is one."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

from elche_client.display.formatting import printable


def print_notice(message: str) -> None:
    """Prints one line on stderr, or above a live display on the same terminal."""
    line = f"elche: {printable(message)}"
    if _above and sys.stderr.isatty():
        _above[-1](line)
    else:
        click.echo(line, err=True)


@contextmanager
def notices_above(print_line: Callable[[str], None]) -> Iterator[None]:
    """Context in which notices are printed by `print_line`, above a live display that would overwrite others."""
    _above.append(print_line)
    try:
        yield
    finally:
        _above.pop()


_above: list[Callable[[str], None]] = []
