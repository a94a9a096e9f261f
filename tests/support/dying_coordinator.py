"""A coordinator that kills itself at a chosen point of its n-th write to the database, as `python -m` this file.

DIE=before: the write has not begun. DIE=after: it is durable, and nobody knows. DIE=shown: the first thing that waited
for it has been done. DIE_AT counts the writes of this process that are waited for.
"""

import os
import signal
from collections.abc import Sequence
from typing import Any

from elche_coordinator import driver, main
from elche_coordinator.storage.sql.store import SqlStore
from elche_coordinator.storage.store import JobRow

WHEN, LAST = os.environ["DIE"], int(os.environ["DIE_AT"])


class DyingStore(SqlStore):
    """Counts its writes."""

    num_writes = 0

    def write(self, rows: Sequence[JobRow], **tape: Any) -> None:
        DyingStore.num_writes += 1
        die("before")
        super().write(rows, **tape)
        die("after")


class DyingDriver(driver.Driver):
    """Dies when the first command after a write has been done."""

    def _show(self, visible: driver.Visible) -> None:
        super()._show(visible)
        die("shown")


def die(when: str) -> None:
    """Kills this process at once if its time has come."""
    if when == WHEN and DyingStore.num_writes >= LAST:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    from elche_coordinator import daemon
    from elche_coordinator.lifecycle import standby

    standby.SqlStore = DyingStore  # type: ignore[misc]
    daemon.Driver = DyingDriver  # type: ignore[misc]
    main.main()
