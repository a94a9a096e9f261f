"""The coordinator's store in a SQL database: queries and statements."""

import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType

import sqlalchemy as sa

from elche.token import Role
from elche_coordinator.roles import TokenRecord
from elche_coordinator.storage.sql import database as tables
from elche_coordinator.storage.sql.database import Database, converted_errors
from elche_coordinator.storage.sql.election import Election
from elche_coordinator.storage.store import DamagedStore, Identity, JobRow, LoadedState, SavedState, StoreFailed

PUT_JOB = sa.text(
    "INSERT INTO jobs (id, record, spec, source) VALUES (:id, :record, :spec, :source) "
    "ON CONFLICT (id) DO UPDATE SET record = excluded.record, spec = coalesce(excluded.spec, jobs.spec), "
    "source = coalesce(excluded.source, jobs.source)"
)
ADD_SOURCE = sa.text("INSERT INTO sources (hash, text) VALUES (:hash, :text) ON CONFLICT (hash) DO NOTHING")
PUT_ARTIFACTS = sa.text(
    "INSERT INTO artifacts (job, record) SELECT id, :record FROM jobs WHERE id = :job "
    "ON CONFLICT (job) DO UPDATE SET record = excluded.record"
)
JOB_ROW = sa.select(tables.jobs)


class SqlStore(Database):
    """The tape of events, and a saved state; of each job its spec and its newest row; users' files, bundles and tokens.

    Calls raise `StoreFailed`; those that write also `Replaced`. `write` is called on one thread at a time, and keeps
    its connection open; the others may run beside it and each other, and open one each.
    """

    def __init__(self, url: sa.URL) -> None:
        super().__init__(url)
        self._writer: sa.Connection | None = None

    def candidacy(self) -> Election:
        """This coordinator's candidacy; only for a shared store."""
        return Election(self)

    def identity(self) -> Identity:
        """The store's identity, created at the first call."""
        with self.writing() as connection:
            row = connection.execute(sa.select(tables.store.c.id, tables.store.c.secret)).first()
            if row is None:
                identity = Identity(secrets.token_hex(8), secrets.token_bytes(32))
                connection.execute(tables.store.insert().values(id=identity.id, secret=identity.secret))
                return identity
        return Identity(row.id, row.secret)

    # Jobs, the tape and the saved state

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
        After a failure the next write opens a new connection.
        """
        try:
            with self.writing(self._connected()) as connection:
                if sources:
                    connection.execute(ADD_SOURCE, [{"hash": name, "text": text} for name, text in sources.items()])
                if rows:
                    connection.execute(PUT_JOB, [row._asdict() for row in rows])
                if forgotten:
                    self._forget(connection, forgotten)
                if saved is not None:
                    self._save(connection, saved)
                if entries:  # a retry: the first attempt may have committed, with its answer lost
                    connection.execute(tables.tape.delete().where(tables.tape.c.last == last))
                    connection.execute(tables.tape.insert().values(last=last, entries=entries, written_at=self.now))
        except StoreFailed:
            if self._writer is not None:
                # Alone, `close` would first roll back, on a connection that may answer nothing.
                self._writer.invalidate()
                self._writer.close()
                self._writer = None
            raise

    def _forget(self, connection: sa.Connection, job_ids: Collection[str]) -> None:
        for job_id in job_ids:
            connection.execute(tables.jobs.delete().where(tables.jobs.c.id == job_id))
            connection.execute(tables.artifacts.delete().where(tables.artifacts.c.job == job_id))
        # With a NULL in the list, NOT IN is true for no row, and no file would ever be removed.
        used = sa.select(tables.jobs.c.source).where(tables.jobs.c.source.is_not(None))
        connection.execute(tables.sources.delete().where(tables.sources.c.hash.not_in(used)))

    def _save(self, connection: sa.Connection, saved: SavedState) -> None:
        for job_id in {*saved.parts, *saved.gone}:
            connection.execute(tables.parts.delete().where(tables.parts.c.job == job_id))
        if saved.parts:
            parts = [{"job": job_id, "state": part} for job_id, part in saved.parts.items()]
            connection.execute(tables.parts.insert(), parts)
        connection.execute(tables.states.delete())
        connection.execute(tables.tape.delete().where(tables.tape.c.last <= saved.last))
        state = {"last": saved.last, "code": saved.code, "state": saved.state, "written_at": self.now}
        connection.execute(tables.states.insert().values(**state))

    def _connected(self) -> sa.Connection:
        if self._writer is None:
            with converted_errors(self._folder):
                connection = self.connect()
                if not self.is_shared:
                    connection.execute(sa.text("PRAGMA journal_mode = WAL"))
                    # What is told must outlast a power cut, which NORMAL does not promise in WAL mode.
                    connection.execute(sa.text("PRAGMA synchronous = FULL"))
                    connection.commit()
                self._writer = connection
        return self._writer

    def load_state(self) -> LoadedState:
        """The newest saved state, and the tape since, in pieces."""
        with self.reading() as connection:
            row = connection.execute(sa.select(tables.states).order_by(tables.states.c.last.desc())).first()
            parts = connection.execute(sa.select(tables.parts)).all()
            pieces = connection.execute(sa.select(tables.tape).order_by(tables.tape.c.last)).all()
            now = connection.execute(sa.select(self.now)).scalar_one()
        times = [one.written_at for one in (*pieces, *([row] if row else [])) if one.written_at is not None]
        saved = SavedState(row.last, row.code, row.state, {part.job: part.state for part in parts}) if row else None
        age_s = max(0.0, now - max(times, default=now))
        return LoadedState(saved, [piece.entries for piece in pieces], age_s, [piece.last for piece in pieces])

    def drop_tape(self) -> None:
        """Removes the saved state and the tape, which this version cannot use."""
        with self.writing() as connection:
            for table in (tables.states, tables.parts, tables.tape):
                connection.execute(table.delete())

    def load_rows(self) -> list[JobRow]:
        """The rows of all jobs, by id."""
        with self.reading() as connection:
            return [JobRow(*row) for row in connection.execute(JOB_ROW.order_by(tables.jobs.c.id))]

    def load_row(self, job_id: str) -> JobRow:
        """A job's row. Raises `KeyError` for an unknown job."""
        with self.reading() as connection:
            row = connection.execute(JOB_ROW.where(tables.jobs.c.id == job_id)).first()
        if row is None:
            raise KeyError(job_id)
        return JobRow(*row)

    def load_source(self, name: str) -> str:
        """The text of the file with this hash. Raises `KeyError` when it is not there."""
        with self.reading() as connection:
            text = connection.execute(sa.select(tables.sources.c.text).where(tables.sources.c.hash == name)).scalar()
        if text is None:
            raise KeyError(name)
        return str(text)

    def source_sizes(self) -> dict[str, int]:
        """The size in bytes of each file, by hash."""
        text = tables.sources.c.text
        size = sa.func.octet_length(text) if self.is_shared else sa.func.length(sa.cast(text, sa.LargeBinary))
        with self.reading() as connection:
            return {
                row.hash: row.size for row in connection.execute(sa.select(tables.sources.c.hash, size.label("size")))
            }

    def load_artifacts(self) -> dict[str, str]:
        """By job that has ended, what the artifact store has of it, as JSON."""
        with self.reading() as connection:
            return {row.job: row.record for row in connection.execute(sa.select(tables.artifacts))}

    def save_artifacts(self, job_id: str, record: str) -> None:
        """Keeps that of one job; of a job that is forgotten, nothing."""
        with self.writing() as connection:
            connection.execute(PUT_ARTIFACTS, {"job": job_id, "record": record})

    # Tokens and bundles

    def load_tokens(self) -> list[TokenRecord]:
        """All tokens, oldest first. Raises `DamagedStore` for one with an unknown role."""
        with self.reading() as connection:
            rows = connection.execute(sa.select(tables.tokens).order_by(tables.tokens.c.made_at)).mappings().all()
        try:
            return [TokenRecord(**{**row, "role": Role(row["role"])}) for row in rows]
        except ValueError as error:
            raise DamagedStore(self.name, f"a token has an unknown role: {error}") from None

    def add_token(self, token: TokenRecord) -> None:
        with self.writing() as connection:
            connection.execute(tables.tokens.insert().values(**{**asdict(token), "role": str(token.role)}))

    def remove_token(self, token_id: str) -> None:
        with self.writing() as connection:
            connection.execute(tables.tokens.delete().where(tables.tokens.c.id == token_id))

    def bundle_names(self) -> list[str]:
        with self.reading() as connection:
            return list(connection.execute(sa.select(tables.bundles.c.name).distinct()).scalars())

    def load_bundle(self, name: str) -> Iterator[bytes]:
        """The bundle's bytes, in parts."""
        query = sa.select(tables.bundles.c.part).where(tables.bundles.c.name == name).order_by(tables.bundles.c.part)
        with self.reading() as connection:
            for number in connection.execute(query).scalars().all():
                here = (tables.bundles.c.name == name) & (tables.bundles.c.part == number)
                yield connection.execute(sa.select(tables.bundles.c.data).where(here)).scalar_one()

    def save_bundle(self, name: str, parts: Iterable[bytes]) -> None:
        with self.writing() as connection:
            connection.execute(tables.bundles.delete().where(tables.bundles.c.name == name))
            for number, data in enumerate(parts):
                connection.execute(tables.bundles.insert().values(name=name, part=number, data=data))

    def remove_bundle(self, name: str) -> None:
        with self.writing() as connection:
            connection.execute(tables.bundles.delete().where(tables.bundles.c.name == name))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._engine.dispose()
