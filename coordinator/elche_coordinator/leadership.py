"""Which of several coordinators with one database leads: the others wait, and one of them takes over.

Each leader has a number, its term, higher than that of the one before, and renews its lease every second. The store
tells when another one may take over, and takes nothing from a leader that has been replaced without knowing it
(`Candidacy`, `Store.fence`; Gray and Cheriton 1989 on leases, Kleppmann 2016 on fencing).
"""

import logging
import threading
import time
from collections.abc import Callable

from elche_coordinator.store import BadStore, Store, StoreFailed

log = logging.getLogger(__name__)

LEASE_S = 5.0
"""How long a leader that does not renew its lease is waited for."""
RENEW_S = 1.0
POLL_S = 0.1
"""Interval at which the others look."""
RETRY_S = 0.5
SAY_EVERY_S = 60.0


class Leadership:
    """One coordinator's part in this: it waits, leads, and is replaced or ends."""

    def __init__(
        self, store: Store, name: str, on_replaced: Callable[[str], None], *, lease_s: float = LEASE_S
    ) -> None:
        """`name`: what others see of this one; `on_replaced` is called with the reason, on any thread, when this one
        leads no more, and must see to it that it serves nobody.
        """
        self.term = 0
        """0: it has not led yet."""
        self.problem = "it has not asked the database yet"
        """Why it could not take over now; empty when it could."""
        self._store = store
        self._candidacy = store.candidacy()
        self._name = name
        self._on_replaced = on_replaced
        self._lease_s = lease_s
        self._ended = threading.Event()
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
                self.term, leader = self._candidacy.try_to_lead(self._name, self._lease_s)
                if self.term:
                    break
                what, pause_s, self.problem = f"{leader} leads; waiting to take over", POLL_S, ""
            except StoreFailed as error:
                if error.is_final:
                    raise BadStore(f"the database {self._store.name} cannot be used: {error.reason}") from None
                what, pause_s = f"{self._store.name} does not answer ({error.reason}); trying again", RETRY_S
                self.problem = "the database does not answer"
            if what != said or time.monotonic() - said_s > SAY_EVERY_S:
                said, said_s = what, time.monotonic()
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
            self._threads.append(thread)  # once it runs: who resigns meanwhile joins it
        return True

    def _renew(self) -> None:
        """Renews the lease until this one ends or is replaced."""
        while not self._ended.wait(RENEW_S):
            began_s = time.monotonic()
            try:
                if not self._candidacy.renew(self.term):
                    return self._end("another coordinator has taken over")
                self._renewed_s = began_s
            except StoreFailed as error:
                log.warning("the lease cannot be renewed: %s", error.reason)
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

    def resign(self) -> None:
        """Ends: another one takes over at once. What is to be written must have been."""
        self._ended.set()
        for thread in self._threads:
            thread.join(timeout=LEASE_S)
        self._candidacy.close()
