"""Output of commands besides progress: notices on stderr, the summary or JSON at the end, and exit codes.

Imports little, so that notices are printed at once; the panel's imports are made when one is printed.
"""

import os
import sys
from pathlib import Path

import click

from elche.errors import ElcheError
from elche_client.display.formatting import printable, printable_lines
from elche_client.display.notices import print_notice
from elche_client.display.record import JobRecord, result_document, to_json
from elche_client.events import JobResult, JobState

MAX_LOGS = 4
SHOWN_BYTES = 10 << 20
"""Progress is shown for uploads of more bytes than this."""


def exit_code_of(result: JobResult) -> int:
    """The exit code: 0 for a job that succeeded, 2 for an invalid one, 1 for others."""
    if result.state is JobState.SUCCEEDED:
        return 0
    return 2 if result.invalid else 1


def print_error(message: str, *, traceback: str) -> None:
    """Prints one line on stderr, below the user's traceback if there is one."""
    if traceback:
        click.echo(printable_lines(traceback), err=True)
    print_notice(message)


def print_made(text: str, made: str) -> None:
    """Prints what a script needs of something that was made. Raises `ElcheError`, with `made`, if it cannot be written:
    the thing is there, and nobody would know it.
    """
    try:
        click.echo(text)
    except OSError as error:
        raise ElcheError(f"{made}, but standard output cannot be written: {error.strerror or error}") from error


class UploadNotice:
    """Prints the progress of a large upload, at each quarter."""

    def __init__(self) -> None:
        self._quarter = -1

    def __call__(self, uploaded: int, size: int) -> None:
        """Called with the number of uploaded bytes, and of all."""
        quarter = 4 * uploaded // max(1, size)
        is_news = quarter > self._quarter and not (self._quarter < 0 and quarter == 4)
        self._quarter = max(quarter, self._quarter)
        if is_news and size > SHOWN_BYTES:
            print_notice(f"uploads the folder: {uploaded / 1e6:.0f} of {size / 1e6:.0f} MB")


def print_ending(
    result: JobResult,
    record: JobRecord,
    *,
    as_json: bool,
    as_event: bool = False,
    record_path: Path | None = None,
    here: bool = False,
    resume: str,
) -> None:
    """Prints the summary of a job that succeeded, else its error, its logs and `resume`, the command that resumes it;
    with `as_json` also the result as JSON. `record_path`: the file with the job's record, if it was written. `here`:
    the ranks were on this machine.
    """
    if result.state is not JobState.SUCCEEDED:
        print_error(result.error or f"job {record.job_id} was {result.state}", traceback=result.traceback)
        for log in log_paths(record, record_path, here=here):
            print_notice(f"log: {log}")
        if record.last_view and record.last_view.artifacts:
            print_notice(f"artifacts: {printable(record.last_view.artifacts)}")
    for rank in record.last_view.ranks if record.last_view else ():
        if rank.callback_errors:
            times = "once" if rank.callback_errors == 1 else f"{rank.callback_errors} times"
            print_notice(f"callbacks of the job raised {times} on rank {rank.rank}; see {rank.log_path}")
    if result.state is not JobState.SUCCEEDED and resume:
        print_notice(resume)
    if as_json:
        document = result_document(result)
        sys.stdout.write(to_json({"event": "result", **document} if as_event else document) + "\n")
        sys.stdout.flush()
    elif result.state is JobState.SUCCEEDED:
        print_summary(result, record, record_path)


def print_summary(result: JobResult, record: JobRecord, record_path: Path | None) -> None:
    """Prints the summary as a panel, as wide as the terminal."""
    from elche_client.display.summary import summary_panel, wide_console

    console = wide_console()
    where = str(record_path) if record_path else ""
    width = console.width if console.file.isatty() else None
    artifacts = record.last_view.artifacts if record.last_view else ""
    console.print(summary_panel(result, name=record.name, record=where, artifacts=artifacts, width=width))


def log_paths(record: JobRecord, record_path: Path | None, *, here: bool) -> list[str]:
    """Paths of the logs of the job's ranks, or else the run's folder. Empty without a view. Of a run `here`, on this
    machine, only those that are there: its folder may have been removed.
    """
    if record.last_view is None:
        return []
    ranks = record.last_view.ranks
    several_hosts = len({rank.host for rank in ranks}) > 1
    logged = [rank for rank in ranks if rank.log_path and (not here or os.path.exists(rank.log_path))]
    logs = [f"{rank.host}:{rank.log_path}" if several_hosts else rank.log_path for rank in logged]
    logs = [printable(log) for log in dict.fromkeys(logs)]
    if not logs:
        return [str(record_path.parent)] if record_path else []
    more = [f"and {len(logs) - MAX_LOGS} more"] if len(logs) > MAX_LOGS else []
    return logs[:MAX_LOGS] + more
