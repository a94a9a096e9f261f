"""Leader election among coordinators that share a database: one leads, and a standby takes over.

Each leader has a term, higher than the previous one's, and renews its lease every second. The store decides when
another may take over, and rejects writes of a leader that was replaced without knowing it (`Election`,
`SqlStore.fence`; Gray and Cheriton 1989 on leases, Kleppmann 2016 on fencing).
"""

import logging
import threading
import time
from collections.abc import Callable

from elche_coordinator.storage.sql.store import SqlStore
from elche_coordinator.storage.store import BadStore, StoreFailed

log = logging.getLogger(__name__)

LEASE_S = 5.0
"""Seconds after which a lease expires that is not renewed."""
RENEW_S = 1.0
"""Seconds between two renewals: several may fail before the lease expires."""
POLL_S = 0.1
"""Seconds between the standbys' attempts to lead."""
RETRY_S = 0.5
"""Seconds between two attempts while the store does not answer."""
LOG_EVERY_S = 60.0
"""Seconds between two lines in the log of a coordinator that waits."""


class Leadership:
    """One coordinator's leadership: it waits, leads, and is replaced or resigns."""

    def __init__(
        self, store: SqlStore, name: str, on_replaced: Callable[[str], None], *, lease_s: float = LEASE_S
    ) -> None:
        """`name` is shown to others. `on_replaced` is called with the reason, on any thread, when this coordinator does
        not lead any more, and must end its service.
        """
        self.term = 0
        """The term; 0 before it leads."""
        self.problem = "it has not asked the database yet"
        """The reason why it could not take over now; empty if it could."""
        self._store = store
        self._candidacy = store.candidacy()
        self._name = name
        self._on_replaced = on_replaced
        self._lease_s = lease_s
        self._ended = threading.Event()
        self._renewed_s = 0.0
        """Time of the lease's last renewal, by this process's clock."""
        self._threads: list[threading.Thread] = []

    def await_turn(self, stopped: threading.Event) -> bool:
        """Waits until this coordinator leads; returns False if `stopped` is set before. Retries a database that does
        not answer; raises `BadStore` if it refuses.
        """
        logged, logged_s = "", 0.0
        while not stopped.is_set():
            try:
                self.term, leader = self._candidacy.try_to_lead(self._name, self._lease_s)
                if self.term:
                    break
                what, pause_s, self.problem = f"{leader} leads; waiting to take over", POLL_S, ""
            except StoreFailed as error:
                if error.is_final:
                    raise BadStore(f"the database {self._store.name} cannot be used: {error.reason}") from None
                what, pause_s = f"{self._store.name} does not answer ({error.reason}); trying again", RETRY_S
                self.problem = "the database does not answer"
            if what != logged or time.monotonic() - logged_s > LOG_EVERY_S:
                logged, logged_s = what, time.monotonic()
                log.info(what)
            stopped.wait(pause_s)
        if not self.term:
            self._candidacy.close()
            return False
        log.info("leads as %s, term %d", self._name, self.term)
        self._store.fence(self.term, self._end)
        self._renewed_s = time.monotonic()
        for work in (self._renew, self._watch):
            thread = threading.Thread(target=work, name="leadership", daemon=True)
            thread.start()
            self._threads.append(thread)  # after `start`: `resign` joins it
        return True

    def _renew(self) -> None:
        """Renews the lease until this coordinator resigns or is replaced."""
        while not self._ended.wait(RENEW_S):
            began_s = time.monotonic()
            try:
                if self._candidacy.renew(self.term):
                    self._renewed_s = began_s  # not when the call ended: the lease may be as old as the call
                else:
                    self._end("another coordinator has taken over")
            except StoreFailed as error:
                log.warning("the lease cannot be renewed: %s", error.reason)

    def _watch(self) -> None:
        """Ends this leadership when the lease has expired: a renewal may hang forever."""
        while not self._ended.wait(RENEW_S):
            # Another may lead by now, but its term fences this one's writes.
            if time.monotonic() - self._renewed_s > self._lease_s + RENEW_S:
                self._end(f"the database has not answered for {self._lease_s:g} s")

    def _end(self, reason: str) -> None:
        if not self._ended.is_set():
            self._ended.set()
            self._on_replaced(reason)

    def resign(self) -> None:
        """Gives the lease up, so that another takes over at once. All writes must be complete before."""
        self._ended.set()
        for thread in self._threads:
            # A renewal may hang: then the lease runs out by itself.
            thread.join(timeout=LEASE_S)
        self._candidacy.close()
