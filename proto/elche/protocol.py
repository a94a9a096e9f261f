"""The protocol's version. Every call of a client or agent carries it.

A coordinator supports all versions from `OLDEST` to `VERSION`. Fields and messages that others may ignore need no new
version; `VERSION` grows with changes that older programs would misunderstand, and `OLDEST` when support of one ends.
"""

from importlib.metadata import version

VERSION = 2
OLDEST = 1
KEY = "elche-protocol"
"""Metadata key of the version. A call without it was made by hand, and is accepted."""
RELEASE_KEY = "elche-release"
"""Metadata key of the program's release, for the error."""
TABLE = "elche-table"
"""Metadata key of the name of the coordinator's process, with which the rendezvous store's tables end: in each answer
of the store, and in each later call of the same client."""


def call_metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    """Metadata of every call of clients and agents: protocol version, elche's release, and the token unless it is
    empty or None.
    """
    authorization = (("authorization", f"Bearer {token}"),) if token else ()
    return ((KEY, str(VERSION)), (RELEASE_KEY, version("elche")), *authorization)


def problem(theirs: str, release: str) -> str:
    """The reason why this coordinator cannot serve a program of that version, with a remedy; empty if it can."""
    number = int(theirs) if theirs.isascii() and theirs.isdecimal() and len(theirs) < 9 else 0
    if not theirs or OLDEST <= number <= VERSION:
        return ""
    ours = version("elche")
    which = f"elche {release[:40]} (protocol {theirs[:8]})"
    if number > VERSION:
        return f"the coordinator is elche {ours} (protocol {VERSION}), and too old for {which}: upgrade the coordinator"
    return f"{which} is too old for the coordinator, which is elche {ours} (protocol {OLDEST} to {VERSION}): upgrade it"
