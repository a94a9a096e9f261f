"""Prints a job's journal: a line for each event, and under it the coordinator's commands and refusals."""

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from elche.errors import InvalidJob
from elche_client.client import Client
from elche_client.commands.naming import known_as_folder, of_job
from elche_client.display.formatting import printable
from elche_client.display.notices import print_notice

MAX_FIELD = 60
"""Longest text of a field that is shown; `--json` prints all."""
ADDRESS = ("job_id", "rank", "incarnation", "agent_id")
"""Fields that are hidden, or shown before the others."""


def show(job: str, address: str, *, num_events: int | None, as_json: bool) -> int:
    """Prints the journal of a job of a coordinator, or of a run's folder."""
    about, *events = read(job, address, num_events)
    if as_json:
        for line in (about, *events):
            click.echo(line)
        return 0
    try:
        head = json.loads(about)
        texts = [text for line in events for text in described(json.loads(line), head["wall_s"])]
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, OSError, RecursionError) as error:
        raise InvalidJob(f"the journal of {job} is damaged, or of another version of elche: {error!r}") from None
    if num_events is None and head["num_dropped"]:
        print_notice(f"{head['num_dropped']} earlier events are not kept, so this journal cannot be replayed")
    for text in texts:
        click.echo(printable(text))
    return 0


def read(job: str, address: str, num_events: int | None) -> list[str]:
    """The journal's lines: one about the journal, then one for each event."""
    if not Path(job).is_dir():
        with Client(address) as client:
            return of_job(client, job, lambda known: client.journal(known, num_events=num_events))[1].splitlines()
    files = sorted((Path(job) / "coordinator" / "journals").glob("*.jsonl.gz"))
    if not files:
        with known_as_folder(job):
            raise InvalidJob(f"{job} has no journal: a run that has ended has one only if it did not succeed")
    try:
        about, *events = gzip.decompress(files[-1].read_bytes()).decode("utf-8").splitlines()
        kept = events if num_events is None else events[max(0, len(events) - num_events) :]
        head = json.loads(about)
        head["num_dropped"] += len(events) - len(kept)
    except (OSError, EOFError, ValueError, TypeError, KeyError, RecursionError, zlib.error) as error:
        raise InvalidJob(f"{files[-1]} cannot be read: {error}") from None
    return [json.dumps(head, separators=(",", ":")), *kept]


def described(entry: Mapping[str, Any], wall_s: float) -> Iterator[str]:
    """One event as text: its time and kind, the commands and the refusals."""
    at = datetime.fromtimestamp(wall_s + entry["at"]).astimezone()
    yield f"{at:%H:%M:%S}.{at.microsecond // 1000:03d}  {_message(entry['event'])}"
    for command in entry.get("commands", ()):
        yield f"{'':12}  -> {_message(command)}"
    for refusal in entry.get("refusals", ()):
        yield f"{'':12}  refused, because {refusal['state']}: {refusal['trigger']} has no place there; {refusal['why']}"
    if "error" in entry:
        yield f"{'':12}  the coordinator has a bug: {_shortened(entry['error'])}"


def _message(tagged: Mapping[str, Any]) -> str:
    (name, values), *_ = tagged.items()
    who = f" {values['rank']}" if "rank" in values else ""
    fields = [f"{field} {_shortened(value)}" for field, value in values.items() if field not in ADDRESS]
    return f"{name}{who}{': ' if fields else ''}{', '.join(fields)}"


def _shortened(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= MAX_FIELD else f"{text[:MAX_FIELD]}..."
