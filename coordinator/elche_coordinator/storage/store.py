"""The interface of the coordinator's database, `Store`, and the values in it."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple, Protocol

from elche.errors import ElcheError
from elche_coordinator.roles import TokenRecord


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
            f"the database {name} is damaged ({reason}): put back a copy of it, or move it away to begin anew, without "
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


class Candidacy(Protocol):
    """One coordinator's connection to a shared store, for leader election. Calls raise `StoreFailed`."""

    def try_to_lead(self, name: str, lease_s: float) -> Standing:
        """Begins to lead if no other does, or the leader has not renewed its lease for `lease_s`."""

    def renew(self, term: int) -> bool:
        """Renews the lease; returns False if another has begun a later term."""

    def close(self) -> None:
        """Gives leadership up at once."""


class Store(Protocol):
    """The tape of events, and a saved state; of each job its spec and its newest row; users' files, bundles and tokens.

    Calls raise `StoreFailed`; those that write also `Replaced`. `write` is called on one thread at a time; the others
    may run beside it and each other.
    """

    is_shared: bool
    """True if several coordinators may share it, of which one leads."""

    @property
    def name(self) -> str:
        """A description for people, without secrets."""

    def prepare(self) -> None:
        """Creates the store if there is none. Raises `BadStore` for one of another version or a damaged one."""

    def close(self) -> None:
        """Ends all connections."""

    def candidacy(self) -> Candidacy:
        """This coordinator's candidacy; only for a shared store."""

    def fence(self, term: int, on_replaced: Callable[[str], None]) -> None:
        """Rejects writes once a later term has begun, and then calls `on_replaced` with the reason."""

    def identity(self) -> Identity:
        """The store's identity, created at the first call."""

    def write(
        self,
        rows: Sequence[JobRow],
        *,
        last: int = 0,
        entries: bytes = b"",
        saved: SavedState | None = None,
        forgotten: Collection[str] = (),
        sources: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Writes, in one transaction, rows of jobs, each with its spec if new, files by hash, and a piece of the tape
        up to event `last`. A saved state replaces the tape up to it. Removes `forgotten` jobs, and files without a job.
        """

    def load_state(self) -> LoadedState:
        """The newest saved state, and the tape since, in pieces."""

    def drop_tape(self) -> None:
        """Removes the saved state and the tape, which this version cannot use."""

    def load_rows(self) -> list[JobRow]:
        """The rows of all jobs, by id."""

    def load_row(self, job_id: str) -> JobRow:
        """A job's row. Raises `KeyError` for an unknown job."""

    def load_source(self, name: str) -> str:
        """The text of the file with this hash. Raises `KeyError` when it is not there."""

    def load_artifacts(self) -> dict[str, str]:
        """By job that has ended, what the artifact store has of it, as JSON."""

    def save_artifacts(self, job_id: str, record: str) -> None:
        """Keeps that of one job; of a job that is forgotten, nothing."""

    def load_tokens(self) -> list[TokenRecord]:
        """All tokens, oldest first."""

    def add_token(self, token: TokenRecord) -> None:
        """Adds a token."""

    def remove_token(self, token_id: str) -> None:
        """Removes a token."""

    def bundle_names(self) -> list[str]:
        """The names of all bundles."""

    def load_bundle(self, name: str) -> Iterator[bytes]:
        """The bundle's bytes, in parts."""

    def save_bundle(self, name: str, parts: Iterable[bytes]) -> None:
        """Stores a bundle, atomically."""

    def remove_bundle(self, name: str) -> None:
        """Removes a bundle, if it is there."""


def reason_of(error: BaseException) -> str:
    """The first line of an error; for a database driver's, without class names."""
    lines = str(getattr(error, "orig", None) or getattr(error, "reason", None) or error).strip().splitlines()
    return lines[0].partition(" with text ")[0] if lines else type(error).__name__  # SQLite repeats the written text
