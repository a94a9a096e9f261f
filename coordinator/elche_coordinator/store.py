"""What the coordinator keeps, and by which calls: whatever offers `Store` may be its database."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple, Protocol

from elche.errors import ElcheError
from elche_coordinator.roles import Token


class StoreFailed(ElcheError):
    """The store does not answer, or does not take what is written. The same may succeed later."""

    def __init__(self, reason: str, *, is_final: bool = False) -> None:
        """`is_final`: waiting will not change that."""
        super().__init__(f"the coordinator's database cannot be used: {reason}")
        self.reason = reason
        self.is_final = is_final


class BadStore(ElcheError):
    """The store cannot be used, and waiting will not change that."""


class DamagedStore(BadStore):
    """What is in the store is not what was written. Nothing of it has been changed."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(
            f"the database {name} is damaged ({reason}): put back a copy of it, or move it away to begin anew, without "
            "its jobs and tokens. Nothing in it was changed"
        )


class Replaced(ElcheError):
    """Another coordinator leads: this one may not write any more."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What tells one store from every other."""

    id: str
    secret: bytes
    """The key from which ranks' secrets are made."""


@dataclass(frozen=True, slots=True)
class SavedState:
    """The state after event number `last`, and the code that made it."""

    last: int
    code: str
    state: bytes
    """What the jobs have in common."""
    parts: Mapping[str, bytes] = field(default_factory=dict)
    """By job, its own; when it is written, of those alone that have changed."""
    gone: Collection[str] = ()
    """Jobs that have a part in the store, and have none any more."""

    def after(self, before: "SavedState | None") -> "SavedState":
        """This state, and what was to be written of the one before it."""
        if before is None:
            return self
        gone = set(before.gone) | set(self.gone)
        parts = {job_id: part for job_id, part in before.parts.items() if job_id not in gone} | dict(self.parts)
        return replace(self, parts=parts, gone=gone - parts.keys())


class LoadedState(NamedTuple):
    """What a former coordinator has left."""

    saved: SavedState | None
    pieces: list[bytes]
    """Of the tape since."""
    age_s: float
    """How long ago it wrote the last of it, by the store's clock, in seconds."""


class JobRow(NamedTuple):
    """What is kept of a job beside the tape, as JSON."""

    id: str
    record: str
    spec: str | None = None
    """When it is written, of a new job; None: it stays what it is."""
    source: str | None = None
    """Hash of its file."""


class Standing(NamedTuple):
    """How a candidate has fared."""

    term: int
    """Of this one, which leads now; 0: it does not."""
    leader: str
    """Who leads, or did before."""


class Candidacy(Protocol):
    """One coordinator's connection to a store that several share, by which it leads. Calls raise `StoreFailed`."""

    def try_to_lead(self, name: str, lease_s: float) -> Standing:
        """Leads if nobody does, or who does has not renewed its lease for so long."""

    def renew(self, term: int) -> bool:
        """Renews the lease; False when another one has begun a later term."""

    def close(self) -> None:
        """Gives up at once whatever this one has."""


class Store(Protocol):
    """The tape of events, and a saved state; of each job its spec and its newest row; users' files, bundles and tokens.

    Calls raise `StoreFailed`; those that write also `Replaced`. `write` is called on one thread at a time; the others
    may run beside it and each other.
    """

    is_shared: bool
    """True if several coordinators may have the same one, of which one leads."""

    @property
    def name(self) -> str:
        """For people; without secrets."""

    def prepare(self) -> None:
        """Makes a new store, or brings an older one to the present format. Raises `BadStore` for one of a newer
        version, and for one that is damaged.
        """

    def close(self) -> None:
        """Ends all connections."""

    def candidacy(self) -> Candidacy:
        """This coordinator's, if the store is shared."""

    def fence(self, term: int, on_replaced: Callable[[str], None]) -> None:
        """From now on nothing is written once a later term has begun; `on_replaced` is then called with the reason."""

    def identity(self) -> Identity:
        """The store's own, made when it is first asked for."""

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
        """Writes, in one transaction, rows of jobs, each with its spec if that is new, files by their hash, and a piece
        of the tape up to event `last`. A saved state replaces the tape up to it. Nothing of `forgotten` jobs is left,
        nor files that no job has.
        """

    def load_state(self) -> LoadedState:
        """The newest saved state, and the tape since, in pieces."""

    def drop_tape(self) -> None:
        """Removes the saved state and the tape, of which nothing can be made."""

    def load_rows(self) -> list[JobRow]:
        """Those of all jobs, by id."""

    def load_row(self, job_id: str) -> JobRow:
        """A job's. Raises `KeyError` for an unknown one."""

    def load_source(self, name: str) -> str:
        """The text of the file with this hash. Raises `KeyError` when it is not there."""

    def load_artifacts(self) -> dict[str, str]:
        """By job that has ended, what the artifact store has of it, as JSON."""

    def save_artifacts(self, job_id: str, record: str) -> None:
        """Keeps that of one job; of a job that is forgotten, nothing."""

    def load_tokens(self) -> list[Token]:
        """All, oldest first."""

    def add_token(self, token: Token) -> None:
        """Keeps one more."""

    def remove_token(self, token_id: str) -> None:
        """It is no token any more."""

    def bundle_names(self) -> list[str]:
        """Those of all bundles."""

    def load_bundle(self, name: str) -> Iterator[bytes]:
        """The bundle's bytes, in parts."""

    def save_bundle(self, name: str, parts: Iterable[bytes]) -> None:
        """Keeps a bundle, all of it or nothing."""

    def remove_bundle(self, name: str) -> None:
        """Removes a bundle, if it is there."""


def reason_of(error: BaseException) -> str:
    """The first line of an error; of one of a database's driver, without the class names."""
    lines = str(getattr(error, "orig", None) or getattr(error, "reason", None) or error).strip().splitlines()
    return lines[0].partition(" with text ")[0] if lines else type(error).__name__  # SQLite repeats what is written
