"""Who did what: one line of JSON for each call that changed something or was refused for want of a role."""

import json
import logging
import time
from logging import INFO, LogRecord
from logging.handlers import RotatingFileHandler
from pathlib import Path

from elche_coordinator.roles import Caller

log = logging.getLogger(__name__)

MAX_BYTES = 10 << 20
NUM_OLDER = 4
"""Older files that are kept, as audit.jsonl.1 and so on."""
MAX_TEXT = 300


class _File(RotatingFileHandler):
    def handleError(self, record: LogRecord) -> None:  # noqa: N802
        """What cannot be written is in the coordinator's log at least."""
        log.error("audit.jsonl cannot be written: %s", record.getMessage())


class Audit:
    """The file `audit.jsonl`, bounded."""

    def __init__(self, path: Path) -> None:
        self._handler = _File(path, maxBytes=MAX_BYTES, backupCount=NUM_OLDER, encoding="utf-8", delay=True)

    def note(self, caller: Caller, call: str, what: str, peer: str, outcome: str) -> None:
        """Adds a line; `what` is the job, host or token that the call was about."""
        entry = {
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "who": str(caller),
            "token": caller.token,
            "from": peer,
            "call": call[:MAX_TEXT],
            "what": what[:MAX_TEXT],
            "outcome": outcome[:MAX_TEXT],
        }
        self._handler.handle(LogRecord("audit", INFO, "", 0, json.dumps(entry), None, None))
