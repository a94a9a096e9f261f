"""Leader election in a row of PostgreSQL, with a term, a lease, and an advisory lock whose key is the term.

The database releases the lock when the leader's connection ends, so that another takes over at once when its process
dies. If it is stopped, or cut off from the database, another takes over when the lease has expired.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa

from elche_coordinator.storage.sql.database import Database, converted_errors
from elche_coordinator.storage.store import Standing, StoreFailed

log = logging.getLogger(__name__)

LOCK = 0x656C6368
"""First key of the advisory locks; the second one is the term."""

CREATE = """
CREATE TABLE IF NOT EXISTS leader (
    id integer PRIMARY KEY, term integer NOT NULL, name text NOT NULL, renewed_at timestamptz NOT NULL
)
"""
FIRST = "INSERT INTO leader VALUES (1, 0, '', to_timestamp(0)) ON CONFLICT DO NOTHING"
LOOK = """
SELECT term, name, clock_timestamp() - renewed_at > make_interval(secs => :lease_s) AS has_run_out FROM leader
"""
TAKE = """
UPDATE leader SET term = term + 1, name = :name, renewed_at = clock_timestamp() WHERE term = :term
"""
RENEW = "UPDATE leader SET renewed_at = clock_timestamp() WHERE term = :term"
"""Statements on the table's one row. Times are the database's own, so that clocks of coordinators need not agree; the
condition on the term lets one of several coordinators win.
"""


class Election:
    """A connection that holds the lock while this coordinator leads."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._session: sa.Connection | None = None

    def try_to_lead(self, name: str, lease_s: float) -> Standing:
        """Begins to lead if no other does."""
        with self._asking():
            if self._session is None:
                self._session = self._database.connect()
                with self._session.begin():
                    self._ask(CREATE)
                    self._ask(FIRST)
            return self._try(self._session, name, lease_s)

    def _try(self, session: sa.Connection, name: str, lease_s: float) -> Standing:
        with session.begin():
            found = self._ask(LOOK, lease_s=lease_s).one()
            term, leader, has_run_out = int(found.term), str(found.name), bool(found.has_run_out)
            has_lock = (
                term > 0 and self._ask("SELECT pg_try_advisory_lock(:lock, :term)", lock=LOCK, term=term).scalar()
            )
            if term > 0 and not has_lock and not has_run_out:
                return Standing(0, leader)
            is_mine = self._ask(TAKE, term=term, name=name).rowcount == 1
            if is_mine:  # lock before commit: a visible term whose lock is free would look abandoned
                self._ask("SELECT pg_advisory_lock(:lock, :term)", lock=LOCK, term=term + 1)
        if is_mine:
            if term > 0:
                why = "whose connection has ended" if has_lock else f"which has said nothing for {lease_s:g} s"
                log.warning("takes over from %s, %s", leader, why)
            return Standing(term + 1, leader)
        if has_lock:
            # A session's lock outlives its transaction, and nobody else frees it.
            self._ask("SELECT pg_advisory_unlock(:lock, :term)", lock=LOCK, term=term)
            session.commit()
        return Standing(0, leader)

    def renew(self, term: int) -> bool:
        """Renews the lease, with a new connection and lock if the previous one has ended."""
        with self._asking():
            if self._session is None:
                self._session = self._database.connect()
                self._ask("SELECT pg_try_advisory_lock(:lock, :term)", lock=LOCK, term=term)
                self._session.commit()
            with self._session.begin():
                return self._ask(RENEW, term=term).rowcount == 1

    def close(self) -> None:
        """Ends the connection, and with it the lock."""
        if self._session is not None:
            # Alone, `close` would first roll back, and wait for a database that does not answer.
            self._session.invalidate()
            self._session.close()
            self._session = None

    def _ask(self, statement: str, **values: Any) -> sa.CursorResult[Any]:
        assert self._session is not None
        return self._session.execute(sa.text(statement), values)

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Converts errors to `StoreFailed` and closes the connection."""
        try:
            with converted_errors():
                yield
        except StoreFailed:
            self.close()
            raise
