"""The SQL database of a coordinator: a file of SQLite, or PostgreSQL, which several coordinators share."""

import logging
import os
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import sqlalchemy as sa

from elche_coordinator.storage.store import BadStore, DamagedStore, Replaced, StoreFailed, reason_of

log = logging.getLogger(__name__)

REVISION = "0004"
"""The newest one in `migrations/versions`."""
OLDEST = "0003"
"""The oldest one there; of those before it no version was published."""
POSTGRESQL = ("postgresql", "postgres", "postgresql+psycopg")
REFUSALS = (
    *("does not exist", "authentication failed", "password", "no pg_hba.conf entry", "permission denied"),
    *("invalid ", "could not match"),  # of a URL
)
"""Messages of PostgreSQL, for which its drivers have no code, of errors for which a retry does not help."""
OF_THE_DISK = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN)
"""SQLite's errors of a disk that is full, broken or may not be written, as after a restore by another user."""
PRIMARY = 0xFF
"""The bits of an error's number that say its kind."""
TRIED_BYTES = 1 << 20
"""What is written to find out why SQLite cannot: it leaves a quota, or a limit, hardly room for less."""
NETWORK_S = 5
"""Seconds after which a connection without answers is closed."""
POSTGRESQL_OPTIONS: dict[str, Any] = {
    "application_name": "elche-coordinator",
    "connect_timeout": NETWORK_S,
    "keepalives_idle": 2,
    "keepalives_interval": 1,
    "keepalives_count": 3,
    "tcp_user_timeout": NETWORK_S * 1000,
    "options": f"-c idle_in_transaction_session_timeout={NETWORK_S}s",
}
"""A coordinator that is stopped in the middle of a transaction must not keep the next one waiting."""
TERM = sa.text("SELECT term, name FROM leader FOR SHARE")
"""Reads the leader's term and keeps others from changing it until the transaction ends: a write of a replaced
coordinator cannot come after the first of its successor.
"""

metadata = sa.MetaData()
jobs = sa.Table(
    "jobs",
    metadata,
    sa.Column("id", sa.String, primary_key=True),
    sa.Column("record", sa.Text, nullable=False),
    sa.Column("spec", sa.Text),
    sa.Column("source", sa.String),
)
sources = sa.Table(
    "sources",
    metadata,
    sa.Column("hash", sa.String, primary_key=True),
    sa.Column("text", sa.Text, nullable=False),
)
"""The texts of users' files, each once; `jobs.source` names them."""
store = sa.Table(
    "store",
    metadata,
    sa.Column("id", sa.String, primary_key=True),
    sa.Column("secret", sa.LargeBinary, nullable=False),
)
tape = sa.Table(
    "tape",
    metadata,
    sa.Column("last", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("entries", sa.LargeBinary, nullable=False),
    sa.Column("written_at", sa.Float),
)
states = sa.Table(
    "states",
    metadata,
    sa.Column("last", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("code", sa.String, nullable=False),
    sa.Column("state", sa.LargeBinary, nullable=False),
    sa.Column("written_at", sa.Float),
)
parts = sa.Table(
    "parts",
    metadata,
    sa.Column("job", sa.String, primary_key=True),
    sa.Column("state", sa.LargeBinary, nullable=False),
)
"""The saved state's parts of jobs."""
tokens = sa.Table(
    "tokens",
    metadata,
    sa.Column("id", sa.String, primary_key=True),
    sa.Column("hash", sa.String, nullable=False, unique=True),
    sa.Column("name", sa.String, nullable=False),
    sa.Column("role", sa.String, nullable=False),
    sa.Column("made_at", sa.Float, nullable=False),
    sa.Column("expires_at", sa.Float, nullable=False),
    sa.Column("made_by", sa.String, nullable=False),
)
bundles = sa.Table(
    "bundles",
    metadata,
    sa.Column("name", sa.String, primary_key=True),
    sa.Column("part", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("data", sa.LargeBinary, nullable=False),
)
"""Packed folders of user code, in parts, where several coordinators share a database."""

artifacts = sa.Table(
    "artifacts",
    metadata,
    sa.Column("job", sa.String, primary_key=True),
    sa.Column("record", sa.Text, nullable=False),
)
"""Per ended job, its files in the artifact store and their digests, as JSON."""


@contextmanager
def converted_errors(folder: Path | None = None) -> Iterator[None]:
    """Converts errors of the database to `StoreFailed`, which is final if the database has refused the statement.
    `folder`: that of a file of SQLite, whose "disk I/O error" may be a quota.
    """
    try:
        yield
    except sa.exc.SQLAlchemyError as error:
        is_refused = not isinstance(error, sa.exc.DBAPIError) or any(text in str(error.orig) for text in REFUSALS)
        why = f"; {problem}" if folder is not None and (problem := _problem_of(folder, error)) else ""
        raise StoreFailed(f"{reason_of(error)}{why}", is_final=is_refused) from error


def is_of_the_disk(error: BaseException | None) -> bool:
    """True for an error of SQLite's that is one of its file's disk."""
    return getattr(getattr(error, "orig", None), "sqlite_errorcode", 0) & PRIMARY in OF_THE_DISK


def _problem_of(folder: Path, error: sa.exc.SQLAlchemyError) -> str:
    """What the system says of a write beside SQLite's file, and what to do; empty if that is not why SQLite failed."""
    if not is_of_the_disk(error):
        return ""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(TRIED_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as found:
        return f"{folder} cannot be written ({found.strerror}): make room there, or have the limit raised"
    return ""


class Database:
    """Connections and transactions. If several coordinators share the database, a writing transaction first checks the
    term under a lock on its row, so that no other can begin to lead before it ends.
    """

    def __init__(self, url: sa.URL) -> None:
        self.is_shared = url.get_backend_name() == "postgresql"
        self._term = 0
        """The term in which this coordinator may write; 0: there are no terms."""
        self._on_replaced: Callable[[str], None] = lambda reason: None
        self._engine = sa.create_engine(
            url,
            poolclass=sa.pool.NullPool,
            hide_parameters=True,  # errors must not show parameters, which contain users' source code
            connect_args=POSTGRESQL_OPTIONS if self.is_shared else {},
        )

    @classmethod
    def in_file(cls, path: Path) -> Self:
        """A file of SQLite, brought to the present schema."""
        database = cls(sa.URL.create("sqlite", database=str(path)))
        database.prepare()
        return database

    @classmethod
    def at(cls, url: str) -> Self:
        """PostgreSQL at a URL. Raises `BadStore` for an invalid one."""
        try:
            parsed = sa.make_url(url)
        except (sa.exc.ArgumentError, ValueError):
            raise BadStore("--store is not a URL, such as postgresql://elche@db/elche") from None
        if parsed.drivername not in POSTGRESQL:
            raise BadStore(f"--store names {parsed.drivername}, and only postgresql:// can be shared; see --data")
        try:
            import psycopg  # noqa: F401
        except ImportError:
            raise BadStore("PostgreSQL needs psycopg: pip install 'elche[postgresql]'") from None
        try:
            return cls(parsed.set(drivername="postgresql+psycopg"))
        except sa.exc.ArgumentError as error:
            raise BadStore(f"--store: {reason_of(error)}") from None

    @property
    def name(self) -> str:
        """Its URL, without the password; of SQLite, the file."""
        url = self._engine.url
        return url.render_as_string(hide_password=True) if self.is_shared else str(url.database)

    @property
    def _folder(self) -> Path | None:
        return None if self.is_shared else Path(self.name).parent

    def connect(self) -> sa.Connection:
        """A connection of its own."""
        return self._engine.connect()

    @contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """A connection of its own. Raises `StoreFailed`."""
        with converted_errors(self._folder), self._engine.connect() as connection:
            yield connection

    @contextmanager
    def writing(self, connection: sa.Connection | None = None) -> Iterator[sa.Connection]:
        """A transaction that writes, on this connection or a new one. Raises `StoreFailed` and `Replaced`."""
        if connection is None:
            with self.reading() as own, self.writing(own):
                yield own
            return
        with converted_errors(self._folder), connection.begin():
            if self._term:
                self._check_term(connection)
            yield connection

    def fence(self, term: int, on_replaced: Callable[[str], None]) -> None:
        """Rejects writes once a later term has begun, and then calls `on_replaced` with the reason."""
        self._term, self._on_replaced = term, on_replaced

    def _check_term(self, connection: sa.Connection) -> None:
        term, leader = connection.execute(TERM).one()
        if term != self._term:
            error = Replaced(f"{leader} leads, since term {term}; this one was term {self._term}")
            self._on_replaced(str(error))
            raise error

    @property
    def now(self) -> sa.ColumnElement[float]:
        """The database's clock, in seconds since 1970: the same one for all coordinators."""
        text = (
            "extract(epoch from clock_timestamp())::float8"
            if self.is_shared
            else "(julianday('now') - 2440587.5) * 86400"
        )
        return sa.literal_column(text, sa.Float)

    def prepare(self) -> None:
        """Brings the tables to the present schema. Raises `BadStore` for those of a newer version and damaged ones."""
        with self.writing() as connection:
            if not self.is_shared:
                if (found := _check_pages(connection)) != "ok":
                    raise DamagedStore(self.name, found)
                connection.exec_driver_sql("BEGIN IMMEDIATE")  # its driver begins no transaction for changes of tables
            tables = set(sa.inspect(connection).get_table_names())
            if not tables & {"alembic_version", *metadata.tables}:
                metadata.create_all(connection)
                connection.execute(
                    sa.text("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY)")
                )
                connection.execute(sa.text("INSERT INTO alembic_version VALUES (:now)"), {"now": REVISION})
                return
            if "alembic_version" not in tables:
                raise DamagedStore(self.name, "it lacks the table alembic_version")
            found = connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar() or ""
            if found < OLDEST:
                raise BadStore(
                    f"its tables are those of a version before the first release ({found or 'no number'}): begin with "
                    "another folder or database; checkpoints of its jobs can be resumed (elche resume)"
                )
            if found > REVISION:
                raise BadStore(
                    f"its tables are those of a newer version ({found}; this one knows {REVISION}): start that, or go "
                    "on from a backup that was made before it (elche-coordinator restore)"
                )
            if found != REVISION:
                self._upgrade(connection, found)
            if lacks := _missing(connection):
                raise DamagedStore(self.name, f"it lacks {', '.join(lacks)}")

    def _upgrade(self, connection: sa.Connection, found: str) -> None:
        from alembic import command  # needed only here, and slow to import
        from alembic.config import Config

        log.info("the tables of %s go from %s to %s", self.name, found, REVISION)
        config = Config()
        config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def _check_pages(connection: sa.Connection) -> str:
    """Result of SQLite's check of its file; "ok" if there is no problem."""
    try:
        return " ".join(str(connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()).split())
    except sa.exc.DatabaseError as error:
        if isinstance(error, sa.exc.OperationalError):  # it is locked, say
            raise
        return reason_of(error)
    except UnicodeDecodeError:  # what is damaged is in the answer, such as a table's name
        return "its own descriptions are not text"


def _missing(connection: sa.Connection) -> list[str]:
    """Missing tables and columns."""
    there = {
        name: {column["name"] for column in columns}
        for (_, name), columns in sa.inspect(connection).get_multi_columns().items()
    }
    lacks = []
    for table in metadata.sorted_tables:
        if table.name not in there:
            lacks.append(f"the table {table.name}")
        else:
            gone = sorted({column.name for column in table.columns} - there[table.name])
            lacks += [f"{table.name}.{column}" for column in gone]
    return lacks
