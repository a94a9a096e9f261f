"""Tokens and their roles; the token that a program uses, read from the environment or a file."""

import hmac
import os
import stat
from collections.abc import Mapping
from enum import StrEnum

from elche.errors import NotAllowed
from elche.folders import without_waiting

VARIABLE = "ELCHE_TOKEN"
FILE_VARIABLE = "ELCHE_TOKEN_FILE"
HOW = f"set {VARIABLE}, or {FILE_VARIABLE} to a file that holds it"
BEARER = "Bearer "
MAX_BYTES = 4096
MAX_CHARACTERS = 2048
"""Longest token: a coordinator takes 4 KiB of a call's headers, with which others come."""
MIN_CHARACTERS = 16
"""Shortest token that a coordinator accepts; shorter ones can be guessed."""


class Role(StrEnum):
    """A token's permissions; each role except `agent` includes those before it."""

    VIEWER = "viewer"
    """Reads: the page, metrics, jobs, hosts, logs."""
    USER = "user"
    """Submits jobs, changes its own, and fetches models."""
    OPERATOR = "operator"
    """Changes all jobs, hosts and tokens."""
    AGENT = "agent"
    """Offers devices, and nothing else."""


def read_token(environment: Mapping[str, str] = os.environ) -> str:
    """The token in ELCHE_TOKEN, or else in the first line of the file that ELCHE_TOKEN_FILE names; empty without both.

    Raises `NotAllowed` for a file that cannot be read, that others can read or write, or that contains no token.
    """
    if given := environment.get(VARIABLE, "").strip():
        return checked(given, VARIABLE)
    path = environment.get(FILE_VARIABLE, "")
    if not path:
        return ""
    try:
        with open(path, "rb", opener=without_waiting) as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise NotAllowed(f"{FILE_VARIABLE}: {path} cannot be read: {error.strerror}") from None
    if mode & 0o027:
        raise NotAllowed(f"{FILE_VARIABLE}: {path} has mode {mode:04o}, so others can access it: chmod 600 {path}")
    lines = content.decode("utf-8", "replace").splitlines()
    if not lines or not lines[0].strip() or len(content) > MAX_BYTES:
        raise NotAllowed(f"{FILE_VARIABLE}: {path} contains no token: its first line must be the token alone")
    return checked(lines[0].strip(), f"{FILE_VARIABLE}: {path}")


def checked(token: str, where: str) -> str:
    """Returns the token. Raises `NotAllowed` if a header cannot contain it."""
    if len(token) > MAX_CHARACTERS:
        raise NotAllowed(f"{where}: the token has {len(token)} characters; at most {MAX_CHARACTERS} are taken")
    if not (token.isascii() and token.isprintable()):
        raise NotAllowed(f"{where}: the token contains characters that are not printable ASCII")
    return token


def bearer(token: str) -> str:
    """The value of an `authorization` header."""
    return f"{BEARER}{token}"


def is_bearer(given: str, token: str) -> bool:
    """True if an `authorization` header presents the token, compared in constant time."""
    return hmac.compare_digest(given.encode(), bearer(token).encode())
