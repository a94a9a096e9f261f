"""The audit log: one line of JSON for each call that was to change something or was refused for lack of a role."""

import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable
from logging import INFO, LogRecord
from logging.handlers import RotatingFileHandler
from pathlib import Path

from elche_coordinator.limits.sharing import crowded_out
from elche_coordinator.roles import Caller

log = logging.getLogger(__name__)

MAX_BYTES = 10 << 20
NUM_OLDER = 4
"""Older files that are kept, as audit.jsonl.1 and so on."""
MAX_TEXT = 300
"""Most characters of one text in a line."""
MAX_REFUSALS = 60
"""Lines per hour on calls of one caller that are refused or change nothing; more are only counted, so that no caller
displaces others' lines."""
UNCHANGED = "done: nothing to change"
"""The outcome of a call that has found all as it asks."""
HOUR_S = 3600


class _File(RotatingFileHandler):
    def doRollover(self) -> None:  # noqa: N802
        """Begins a new file, and joins the two oldest. If they are too long together, the callers with the most
        lines lose their oldest ones.
        """
        super().doRollover()
        oldest, older, joined = (Path(f"{self.baseFilename}.{end}") for end in (NUM_OLDER + 1, NUM_OLDER, "new"))
        if oldest.exists():
            lines = [line for path in (oldest, older) for line in path.read_bytes().splitlines(keepends=True)]
            sizes = ((number, _who(line), len(line)) for number, line in enumerate(lines))
            for number in crowded_out(sizes, MAX_BYTES):
                lines[number] = b""
            joined.write_bytes(b"".join(lines))
            # Before the oldest is removed: after a crash between the two, lines are there twice, and not gone.
            joined.replace(older)
            oldest.unlink()

    def handleError(self, record: LogRecord) -> None:  # noqa: N802
        """Logs an error of writing to the coordinator's log."""
        log.error("%s cannot be written: %s: %s", self.baseFilename, sys.exception(), record.getMessage())


class Audit:
    """The file `audit.jsonl`, bounded."""

    def __init__(self, path: Path, now: Callable[[], float] = time.time) -> None:
        self._handler = _File(path, maxBytes=MAX_BYTES, backupCount=NUM_OLDER + 1, encoding="utf-8", delay=True)
        self._now = now
        self._hour = 0
        self._refusals: Counter[Caller] = Counter()
        """Calls of each caller in this hour that were refused or have changed nothing."""

    def note(self, caller: Caller, call: str, what: str, peer: str, outcome: str) -> None:
        """Adds a line; `what` is the job, host or token of the call."""
        if (hour := int(self._now() // HOUR_S)) != self._hour:
            refusals, self._refusals, self._hour = self._refusals, Counter(), hour
            for one, num in refusals.items():
                if num > MAX_REFUSALS:
                    self._write(
                        one,
                        "",
                        "",
                        "",
                        f"refused or without effect: {num - MAX_REFUSALS} more calls in one hour, which have no lines",
                    )
        if outcome not in ("done", "begun"):
            self._refusals[caller] += 1
        if outcome in ("done", "begun") or self._refusals[caller] <= MAX_REFUSALS:
            self._write(caller, call, what, peer, outcome)

    def _write(self, caller: Caller, call: str, what: str, peer: str, outcome: str) -> None:
        entry = {
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._now())),
            "who": str(caller),
            "token": caller.token,
            "from": peer,
            "call": call,
            "what": what,
            "outcome": outcome,
        }
        line = json.dumps({name: _short(text) for name, text in entry.items()})
        self._handler.handle(LogRecord("audit", INFO, "", 0, line, None, None))


def _who(line: bytes) -> str:
    """The caller of a line, as it is written there."""
    return line.partition(b'"who": ')[2].partition(b', "token": ')[0].decode(errors="replace")


def _short(text: str) -> str:
    """The text's beginning, so that its JSON has at most twice `MAX_TEXT` characters."""
    text = text[:MAX_TEXT]
    while len(json.dumps(text)) > 2 * MAX_TEXT:
        text = text[: len(text) * 3 // 4]
    return text
