"""The values in the coordinator's database, and its errors."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from elche.errors import ElcheError


class StoreFailed(ElcheError):
    """The store does not answer, or rejects a write. A retry may succeed."""

    def __init__(self, reason: str, *, is_final: bool = False) -> None:
        """`is_final`: True if a retry cannot succeed."""
        super().__init__(f"the coordinator's database cannot be used: {reason}")
        self.reason = reason
        self.is_final = is_final


class BadStore(ElcheError):
    """The store cannot be used; a retry cannot succeed."""


class DamagedStore(BadStore):
    """The store's contents are damaged. They were not changed."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(
            f"the database {name} is damaged ({reason}): put back a copy of it, or move it away to start over, without "
            "its jobs and tokens. Nothing in it was changed"
        )


class Replaced(ElcheError):
    """Another coordinator leads: this one may not write any more."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A store's unique id and key."""

    id: str
    secret: bytes
    """The key from which ranks' secrets are derived."""


@dataclass(frozen=True, slots=True)
class SavedState:
    """The state after event number `last`, and the code that made it."""

    last: int
    code: str
    state: bytes
    """The common part."""
    parts: Mapping[str, bytes] = field(default_factory=dict)
    """Parts by job; in a write only those that have changed."""
    gone: Collection[str] = ()
    """Jobs whose part in the store is removed."""

    def after(self, before: "SavedState | None") -> "SavedState":
        """This state, merged with the unwritten one before it."""
        if before is None:
            return self
        gone = set(before.gone) | set(self.gone)
        parts = {job_id: part for job_id, part in before.parts.items() if job_id not in gone} | dict(self.parts)
        return replace(self, parts=parts, gone=gone - parts.keys())


class LoadedState(NamedTuple):
    """The state left by a previous coordinator."""

    saved: SavedState | None
    pieces: list[bytes]
    """Pieces of the tape since the saved state."""
    age_s: float
    """Seconds since its last write, by the store's clock."""
    lasts: list[int]
    """The number of the last event of each piece."""


class JobRow(NamedTuple):
    """A job's record beside the tape, as JSON."""

    id: str
    record: str
    spec: str | None = None
    """In a write, the spec of a new job; None: unchanged."""
    source: str | None = None
    """Hash of its file."""


class Standing(NamedTuple):
    """A candidate's position."""

    term: int
    """Its term if it leads; else 0."""
    leader: str
    """Name of the leader, or of the last one."""


def reason_of(error: BaseException) -> str:
    """The first line of an error; for a database driver's, without class names."""
    lines = str(getattr(error, "orig", None) or getattr(error, "reason", None) or error).strip().splitlines()
    return lines[0].partition(" with text ")[0] if lines else type(error).__name__  # SQLite repeats the written text
