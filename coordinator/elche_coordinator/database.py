"""The SQL database of a coordinator: a file of SQLite, or PostgreSQL, which several coordinators share."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from elche.errors import ElcheError
from elche_coordinator import schema

log = logging.getLogger(__name__)

REVISION = "0003"
"""The newest one in `migrations/versions`."""
POSTGRESQL = ("postgresql", "postgres", "postgresql+psycopg")
REFUSALS = (
    *("does not exist", "authentication failed", "password", "no pg_hba.conf entry", "permission denied"),
    *("invalid ", "could not match"),  # of a URL
)
"""What PostgreSQL says, whose drivers give no code for it, when waiting will not help."""
NETWORK_S = 5
"""Seconds after which a connection on which nothing comes back is given up."""
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


class BadStore(ElcheError):
    """The database cannot be used, and waiting will not change that."""


class Replaced(ElcheError):
    """Another coordinator leads: this one may not write any more."""


class Database:
    """Connections and transactions. Every transaction that writes is `fence`d: where several coordinators share the
    database, it fails in one that another has replaced.
    """

    def __init__(self, url: sa.URL) -> None:
        self.is_shared = url.get_backend_name() == "postgresql"
        self.fence: Callable[[sa.Connection], None] | None = None
        """Is called at the beginning of each such transaction; raises `Replaced`."""
        self._engine = sa.create_engine(
            url,
            poolclass=sa.pool.NullPool,
            hide_parameters=True,  # errors must not show what is written: it contains users' source code
            connect_args=POSTGRESQL_OPTIONS if self.is_shared else {},
        )

    @classmethod
    def in_file(cls, path: Path) -> "Database":
        """A file of SQLite, brought to the present schema."""
        database = cls(sa.URL.create("sqlite", database=str(path)))
        database.migrate()
        return database

    @classmethod
    def at(cls, url: str) -> "Database":
        """PostgreSQL at a URL. Raises `BadStore` for what is none."""
        try:
            parsed = sa.make_url(url)
        except (sa.exc.ArgumentError, ValueError):
            raise BadStore("--store is no URL, such as postgresql://elche@db/elche") from None
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
        """Its URL, without the password."""
        return self._engine.url.render_as_string(hide_password=True)

    def connect(self) -> sa.Connection:
        """A connection of its own."""
        return self._engine.connect()

    @contextmanager
    def writing(self, connection: sa.Connection | None = None) -> Iterator[sa.Connection]:
        """A transaction that writes, on this connection or a new one."""
        if connection is None:
            with self._engine.connect() as own, self.writing(own):
                yield own
            return
        with connection.begin():
            if self.fence is not None:
                self.fence(connection)
            yield connection

    @property
    def now(self) -> sa.ColumnElement[float]:
        """The database's clock, in seconds since 1970: the same one for all coordinators."""
        text = (
            "extract(epoch from clock_timestamp())::float8"
            if self.is_shared
            else "(julianday('now') - 2440587.5) * 86400"
        )
        return sa.literal_column(text, sa.Float)

    def migrate(self) -> None:
        """Brings the tables to the present schema. Raises `BadStore` for those of a newer version."""
        with self.writing() as connection:
            tables = sa.inspect(connection).get_table_names()
            if "jobs" not in tables:
                schema.metadata.create_all(connection)
                connection.execute(
                    sa.text("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY)")
                )
                connection.execute(sa.text("INSERT INTO alembic_version VALUES (:now)"), {"now": REVISION})
                return
            found = ""
            if "alembic_version" in tables:
                found = connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar() or ""
            if found == REVISION:
                return
            if found > REVISION:
                raise BadStore(
                    f"its tables are those of a newer version ({found}; this one knows {REVISION}): start that"
                )
            self._upgrade(connection, found)

    def _upgrade(self, connection: sa.Connection, found: str) -> None:
        from alembic import command  # needed only here, and slow to import
        from alembic.config import Config

        log.info("the tables of %s go from %s to %s", self.name, found or "those before numbers", REVISION)
        config = Config()
        config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
        config.attributes["connection"] = connection
        if not self.is_shared:  # its driver begins no transaction for a change of tables
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        command.upgrade(config, "head")

    def close(self) -> None:
        """Closes what is not in use."""
        self._engine.dispose()


def is_fatal(error: sa.exc.DBAPIError) -> bool:
    """Whether the database refuses, and will go on to; else it does not answer, or not yet."""
    return any(text in str(error.orig) for text in REFUSALS)


def reason_of(error: BaseException) -> str:
    """The first line of an error, without the driver's class names."""
    lines = str(getattr(error, "orig", None) or error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
