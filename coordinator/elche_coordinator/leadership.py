"""Which of several coordinators with one database leads: the others wait, and one of them takes over.

Each leader has a number, its term, higher than that of the one before. It renews its lease every second, and holds an
advisory lock of the database with its term as the key, which the database releases when the connection ends. Another
one takes over when it gets that lock, which is at once when the leader's process dies, or when the lease has run out:
the leader may be stopped, or cut off from the database. Each transaction of a leader first looks at the term, under a
lock on its row: one that has been replaced without knowing it can write nothing (Gray and Cheriton 1989 on leases;
Kleppmann 2016 on fencing).
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa

from elche_coordinator.database import BadStore, Database, Replaced, is_fatal, reason_of

log = logging.getLogger(__name__)

LEASE_S = 5.0
"""How long a leader that does not renew its lease is waited for."""
RENEW_S = 1.0
POLL_S = 0.1
"""Interval at which the others look."""
RETRY_S = 0.5
SAY_EVERY_S = 60.0
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
TERM = "SELECT term, name FROM leader FOR SHARE"


class Leadership:
    """One coordinator's part in this: it waits, leads, and is replaced or ends."""

    def __init__(
        self, database: Database, name: str, on_replaced: Callable[[str], None], *, lease_s: float = LEASE_S
    ) -> None:
        """`name`: what others see of this one; `on_replaced` is called with the reason, on any thread, when this one
        leads no more, and must see to it that it serves nobody.
        """
        self.term = 0
        """0: it has not led yet."""
        self._database = database
        self._name = name
        self._on_replaced = on_replaced
        self._lease_s = lease_s
        self._ended = threading.Event()
        self._session: sa.Connection | None = None
        """The connection with the advisory lock, and of renewals."""
        self._renewed_s = 0.0
        """When the lease was last renewed, by this process's clock."""
        self._threads: list[threading.Thread] = []

    def await_turn(self, stopped: threading.Event) -> bool:
        """Waits until this one leads; False when `stopped` is set before. Raises `BadStore` when the database refuses.

        A database that does not answer is tried again.
        """
        said, said_s = "", 0.0
        while not stopped.is_set():
            try:
                leader = self._try()
                if self.term:
                    break
                what, pause_s = f"{leader} leads; waiting to take over", POLL_S
            except sa.exc.DBAPIError as error:
                self._drop_session()
                if is_fatal(error):
                    raise BadStore(f"the database {self._database.name} cannot be used: {reason_of(error)}") from None
                what, pause_s = f"{self._database.name} does not answer ({reason_of(error)}); trying again", RETRY_S
            if what != said or time.monotonic() - said_s > SAY_EVERY_S:
                said, said_s = what, time.monotonic()
                log.info(what)
            stopped.wait(pause_s)
        if not self.term:
            self._drop_session()
            return False
        log.info("leads as %s, term %d", self._name, self.term)
        self._database.fence = self.check
        self._renewed_s = time.monotonic()
        for work in (self._renew, self._watch):
            thread = threading.Thread(target=work, name="leadership", daemon=True)
            thread.start()
            self._threads.append(thread)  # once it runs: who resigns meanwhile joins it
        return True

    def _try(self) -> str:
        """Leads if nobody else does, else returns who does."""
        if self._session is None:
            self._session = self._database.connect()
            with self._session.begin():
                self._session.execute(sa.text(CREATE))
                self._session.execute(sa.text(FIRST))
        session = self._session
        with session.begin():
            found = self._ask(LOOK, lease_s=self._lease_s).one()
            term, leader, has_run_out = int(found.term), str(found.name), bool(found.has_run_out)
            has_lock = (
                term > 0 and self._ask("SELECT pg_try_advisory_lock(:lock, :term)", lock=LOCK, term=term).scalar()
            )
            if term > 0 and not has_lock and not has_run_out:
                return leader
            is_mine = self._ask(TAKE, term=term, name=self._name).rowcount == 1
            if is_mine:  # the lock before the commit: nobody may see a term whose lock is free
                self._ask("SELECT pg_advisory_lock(:lock, :term)", lock=LOCK, term=term + 1)
        if is_mine:
            if term > 0:
                why = "whose connection has ended" if has_lock else f"which has said nothing for {self._lease_s:g} s"
                log.warning("takes over from %s, %s", leader, why)
            self.term = term + 1
        elif has_lock:
            self._ask("SELECT pg_advisory_unlock(:lock, :term)", lock=LOCK, term=term)
            session.commit()
        return leader

    def _ask(self, statement: str, **values: Any) -> sa.CursorResult[Any]:
        assert self._session is not None
        return self._session.execute(sa.text(statement), values)

    def check(self, connection: sa.Connection) -> None:
        """Fences a transaction: nobody else can begin to lead before it ends. Raises `Replaced`."""
        term, leader = connection.execute(sa.text(TERM)).one()
        if term != self.term:
            error = Replaced(f"{leader} leads, since term {term}; this one was term {self.term}")
            self._end(str(error))
            raise error

    def _renew(self) -> None:
        """Renews the lease until this one ends or is replaced."""
        while not self._ended.wait(RENEW_S):
            began_s = time.monotonic()
            try:
                if self._session is None:
                    self._session = self._database.connect()
                    self._ask("SELECT pg_try_advisory_lock(:lock, :term)", lock=LOCK, term=self.term)
                    self._session.commit()
                with self._session.begin():
                    is_mine = self._ask(RENEW, term=self.term).rowcount == 1
                if not is_mine:
                    return self._end("another coordinator has taken over")
                self._renewed_s = began_s
            except sa.exc.DBAPIError as error:
                self._drop_session()
                log.warning("the lease cannot be renewed: %s", reason_of(error))
        return None

    def _watch(self) -> None:
        """Ends when the lease has run out: a renewal may wait for an answer that never comes."""
        while not self._ended.wait(RENEW_S):
            if time.monotonic() - self._renewed_s > self._lease_s + RENEW_S:
                return self._end(f"the database has not answered for {self._lease_s:g} s")
        return None

    def _end(self, reason: str) -> None:
        if not self._ended.is_set():
            self._ended.set()
            self._on_replaced(reason)

    def _drop_session(self) -> None:
        if self._session is not None:
            self._session.invalidate()
            self._session.close()
            self._session = None

    def resign(self) -> None:
        """Ends: another one takes over at once. What is to be written must have been."""
        self._ended.set()
        for thread in self._threads:
            thread.join(timeout=LEASE_S)
        self._drop_session()
