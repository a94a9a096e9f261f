"""The programs' own logs on standard error: lines of text, or JSON objects."""

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import Any

from elche.output import open_standard_streams

VARIABLE = "ELCHE_LOG_FORMAT"
FORMATS = ("text", "json")
DIRECTIVE = re.compile(r"(?:(?P<name>[a-z_]+)=)?%[-#0 +]*\d*(?:\.\d+)?(?P<kind>[a-z%])")
"""A place of a message's template, with the name before it, as in `job=%s`."""


class TextLines(logging.Formatter):
    """Formats a message as one line: text from outside may contain line breaks and terminal control codes."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """The line, with an escape for each character that is not printable."""
        line = super().formatMessage(record)
        return line if line.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)


class JsonLines(logging.Formatter):
    """Formats a record as one line with a JSON object: `time` in UTC, `level`, `logger`, `message`; what the message
    names, such as `job` and `rank`, as fields, too; and the traceback of an exception.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line, in ASCII."""
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")[:-6] + "Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            **named(record),
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def named(record: logging.LogRecord) -> dict[str, Any]:
    """The values that the record's template names, and those given as `extra=fields(...)`."""
    if not isinstance(record.args, tuple):
        return dict(getattr(record, "fields", {}))
    places = [place for place in DIRECTIVE.finditer(str(record.msg)) if place["kind"] != "%"]
    pairs = zip(places, record.args, strict=False)
    found = {place["name"]: one if isinstance(one, int) else str(one) for place, one in pairs if place["name"]}
    return found | getattr(record, "fields", {})


def fields(**named: int | str) -> dict[str, dict[str, int | str]]:
    """The argument `extra` of a message that is of a rank or round which its template does not name."""
    return {"fields": named}


def set_up(log_format: str = "text") -> None:
    """Has this process log to standard error from the level INFO on, in one of `FORMATS`."""
    open_standard_streams()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if log_format == "json" else TextLines())
    handler.addFilter(is_of_interest)
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def is_of_interest(record: logging.LogRecord) -> bool:
    """False for what gRPC's server logs as an error, with a traceback: a caller goes in the middle of an answer, and
    its code learns of the broken write before the end of the call; or a caller's header is not UTF-8, of which a
    stranger's 8 kB filled 57 kB of the log, and which may be a token.
    """
    named = ("ExecuteBatchError", "Invalid encoding on")
    return not (record.name == "grpc._cython.cygrpc" and str(record.msg).startswith(named))


def print_reason(program: str, problem: str, log_format: str) -> None:
    """Says on standard error why the program exits."""
    if log_format == "json":
        logging.getLogger(program).critical("%s", problem)
    else:
        print(f"{program}: {problem}", file=sys.stderr)
