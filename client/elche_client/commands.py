"""What `elche submit`, `jobs`, `watch` and `cancel` do with a coordinator."""

import json
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue

import click
from rich.console import Console

from elche.errors import InvalidJob
from elche_client.check import NEEDED_BY_WORKER, check_file, missing_of
from elche_client.children import Children
from elche_client.client import Client, JobHandle
from elche_client.ending import PIPE_WIDTH, exit_code_of, print_ending
from elche_client.events import Event
from elche_client.inbox import Inbox, Interrupted, follow, signals_into, start_watch
from elche_client.options import JobOptions, read_source
from elche_client.progress import make_progress
from elche_client.record import JobRecord, to_json
from elche_client.summary import jobs_table


def submit(path: Path, options: JobOptions, address: str, *, watch_it: bool, as_json: bool) -> int:
    read_source(path)
    with Client(address) as client:
        client.jobs()  # the check takes seconds: see first whether anybody answers
        try:
            _check_if_possible(path, options)
        except Interrupted as interrupted:
            return interrupted.exit_code
        handle = client.submit_options(path, options)
        if watch_it:
            click.echo(f"elche: submitted job {handle.id}", err=True)
            return _watch(handle, as_json=as_json)
    click.echo(to_json({"job_id": handle.id}) if as_json else handle.id)
    return 0


def watch(job_id: str, address: str, *, as_json: bool) -> int:
    with Client(address) as client:
        return _watch(client.job(job_id), as_json=as_json)


def jobs(address: str, *, as_json: bool) -> int:
    with Client(address) as client:
        views = client.jobs()
    if as_json:
        click.echo(to_json([asdict(view) for view in views]))
        return 0
    console = Console(highlight=False)
    if not console.file.isatty():
        console.width = PIPE_WIDTH
    console.print(jobs_table(views) if views else "no jobs")
    return 0


def cancel(job_id: str, address: str) -> int:
    with Client(address) as client:
        client.cancel(job_id)
    click.echo(f"job {job_id} is being stopped")
    return 0


def fetch(job_id: str, file: Path, address: str) -> int:
    try:
        with Client(address) as client:
            client.fetch_model(job_id, file)
    except OSError as error:
        raise InvalidJob(f"{file} cannot be written: {error.strerror}") from None
    click.echo(f"{file}: {file.stat().st_size} bytes")
    return 0


def checkpoint(job_id: str, address: str) -> int:
    with Client(address) as client:
        client.checkpoint(job_id)
    click.echo(f"job {job_id} writes a checkpoint with its next round")
    return 0


def pause(job_id: str, address: str, *, is_paused: bool) -> int:
    with Client(address) as client:
        client.pause(job_id, is_paused=is_paused)
    click.echo(f"job {job_id} stops after its open round" if is_paused else f"job {job_id} goes on")
    return 0


def show_timeline(job: str, address: str, output: Path, *, as_page: bool) -> int:
    from elche_client import timeline

    found = timeline.read(_timeline_lines(job, address), job)
    if not found.spans:
        raise InvalidJob(f"the timeline of {job} has no spans yet; its ranks have not begun")
    text = timeline.to_page(found, Path(job).name) if as_page else json.dumps(timeline.to_trace(found))
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidJob(f"{output} cannot be written: {error.strerror}") from None
    how = "open it in a browser" if as_page else "open it at ui.perfetto.dev"
    click.echo(f"{output}: {len(found.spans)} spans of {len(found.ranks)} ranks; {how}")
    return 0


def _timeline_lines(job: str, address: str) -> list[str]:
    """Of a run's folder, or of a job of a coordinator."""
    if not Path(job).is_dir():
        with Client(address) as client:
            return client.timeline(job).splitlines()
    files = sorted((Path(job) / "coordinator" / "timelines").glob("*.jsonl"))
    if not files:
        raise InvalidJob(f"{job} has no timeline: run it with --timeline true")
    return files[-1].read_text(encoding="utf-8").splitlines()


def _check_if_possible(path: Path, options: JobOptions) -> None:
    """Finds a mistake in the file before it is sent, where the worker is installed; else the ranks will."""
    if missing_of(NEEDED_BY_WORKER):
        return
    inbox: Inbox = SimpleQueue()
    with Children() as children, signals_into(inbox, children.kill):
        report = check_file(path, options, device=None, inbox=inbox, children=children)
    placed = options.settings.get("group_size", 1)
    if report.group_size != placed:
        raise InvalidJob(
            f"{path}: group_size is {report.group_size}, and the job would be placed in groups of {placed}: "
            f"submit it with --group-size {report.group_size}"
        )
    for note in report.notes:
        click.echo(f"elche: {note}", err=True)


def _watch(handle: JobHandle, *, as_json: bool) -> int:
    record = JobRecord(job_id=handle.id, name=handle.id)
    inbox: Inbox = SimpleQueue()
    try:
        with signals_into(inbox), make_progress(on_stderr=as_json) as progress:

            def show(event: Event) -> None:
                record.take(event)
                progress.show(event)

            start_watch(handle, inbox)
            result = follow(inbox, show)
    except Interrupted as interrupted:
        click.echo(f"elche: the job goes on; `elche cancel {handle.id}` stops it", err=True)
        return interrupted.exit_code
    print_ending(result, record, as_json=as_json)
    return exit_code_of(result)
