"""The version of what elche's programs say to each other. Every call of a client and every agent names its own.

A coordinator speaks all versions from `OLDEST` to `VERSION`. Fields and messages that others may ignore change nothing;
`VERSION` grows with what older programs would get wrong, and `OLDEST` when the coordinator gives an old one up.
"""

from importlib.metadata import version

VERSION = 1
OLDEST = 1
KEY = "elche-protocol"
"""Metadata key of the version. A call without it is of whoever has built it by hand, and is taken as it is."""
RELEASE_KEY = "elche-release"
"""Metadata key of the program's release, for the error."""


def call_metadata(token: str | None = "") -> tuple[tuple[str, str], ...]:
    """What clients and agents send with every call: the version, and the token if there is one."""
    authorization = (("authorization", f"Bearer {token}"),) if token else ()
    return ((KEY, str(VERSION)), (RELEASE_KEY, version("elche")), *authorization)


def problem(theirs: str, release: str) -> str:
    """Why this coordinator cannot answer a program of that version, and what to do; empty when it can."""
    number = int(theirs) if theirs.isascii() and theirs.isdecimal() and len(theirs) < 9 else 0
    if not theirs or OLDEST <= number <= VERSION:
        return ""
    ours = version("elche")
    which = f"elche {release[:40]} (protocol {theirs[:8]})"
    if number > VERSION:
        return f"the coordinator is elche {ours} (protocol {VERSION}), and too old for {which}: upgrade the coordinator"
    return f"{which} is too old for the coordinator, which is elche {ours} (protocol {OLDEST} to {VERSION}): upgrade it"
