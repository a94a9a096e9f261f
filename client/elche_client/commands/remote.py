"""The commands of `elche` that talk to a coordinator."""

import json
import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from queue import SimpleQueue

import click

from elche.errors import InvalidJob, Unreachable
from elche.requirements import inline_requirements
from elche_client.client import Client, JobHandle
from elche_client.commands.naming import folder_or_job, known_as_folder, of_job
from elche_client.display.formatting import printable
from elche_client.display.notices import print_notice
from elche_client.display.output import UploadNotice, exit_code_of, print_ending, print_made
from elche_client.display.progress import make_progress
from elche_client.display.record import JobRecord, to_json
from elche_client.display.summary import host_problems, hosts_table, jobs_table, says_why, wide_console
from elche_client.events import JobState, JobView, LogLine
from elche_client.local.check import NEEDED_BY_WORKER, check_file, missing_of
from elche_client.local.notifications import (
    Interrupted,
    NotificationQueue,
    ProcessRestarted,
    Shown,
    forward_signals,
    start_watch,
    wait_for_result,
)
from elche_client.local.processes import ChildProcesses
from elche_client.options import JobOptions, check_loop, has_own_loop, read_source
from elche_client.transport import contexts
from elche_client.transport.rank_output import RankOutput
from elche_client.transport.upload import file_of_module, folder_of


def submit(
    path: Path | None,
    options: JobOptions,
    address: str,
    *,
    folder: str | None,
    key: str,
    watch_it: bool,
    as_json: bool,
    checks: bool = True,
) -> int:
    if options.module:
        path, root = file_of_module(options.module, folder)
        folder = str(root)
    elif path is None:
        raise InvalidJob("name the file of the job, or the job of a module: --module PACKAGE.MODULE:NAME")
    is_job = bool(options.module) or not has_own_loop(path)
    if not is_job:
        check_loop(path, options)
    requires = options.requirements or inline_requirements(read_source(path))
    sent = folder_of(path, folder)
    with Client(address) as client:
        client.jobs()  # first, since the check takes seconds: raises if the coordinator does not answer
        handle = client.find(key) if key else None
        if handle is not None:
            print_notice(f"job {handle.id} was submitted with this key before")
        else:
            try:
                if checks and is_job and not requires and not options.module and not missing_of(NEEDED_BY_WORKER):
                    _check(path, options, sent)
            except Interrupted as interrupted:
                return interrupted.exit_code
            handle = client.submit_options(path, options, sent, UploadNotice(), key=key)
            if watch_it:
                print_notice(f"submitted job {handle.id}")
        if watch_it:
            return _watch(handle, as_json=as_json)
    print_made(to_json({"job_id": handle.id}) if as_json else printable(handle.id), f"job {handle.id} is submitted")
    if not as_json:
        _print_next_commands(handle)
    return 0


def _print_next_commands(handle: JobHandle) -> None:
    """Prints next steps on stderr, so that stdout has only the id, for scripts."""
    name, where = shlex.quote(handle.id), _where(handle)
    print_notice("next commands:")
    for command, purpose in (
        ("watch {}", "shows it"),
        ("logs {} -f", "what its ranks print"),
        ("cancel {}", "ends it"),
    ):
        print_notice(f"  elche {command.format(name)}{where}  {purpose}")


def watch(job_id: str, address: str, *, as_json: bool) -> int:
    with Client(address) as client:
        return of_job(client, job_id, lambda known: _watch(client.job(known), as_json=as_json))[1]


def jobs(address: str, *, as_json: bool) -> int:
    with Client(address) as client:
        views = client.jobs()
    if as_json:
        click.echo(to_json([asdict(view) for view in views]))
        return 0
    console = wide_console()
    console.print(jobs_table(views) if views else "no jobs")
    if client.problem:
        console.print(f"all jobs wait: {printable(client.problem)}", markup=False, soft_wrap=True)
    for view in views:
        if says_why(view):
            console.print(f"{printable(view.job_id)}: {printable(view.reason)}", markup=False, soft_wrap=True)
    return 0


def hosts(address: str, *, as_json: bool) -> int:
    with Client(address) as client:
        found = client.hosts()
    if as_json:
        click.echo(to_json([asdict(host) for host in found]))
        return 0
    console = wide_console()
    console.print(hosts_table(found) if found else "no hosts: start elche-worker on those that are to train")
    for line in host_problems(found):
        console.print(line, markup=False, soft_wrap=True)
    return 0


def _print(text: str, document: dict[str, object], *, as_json: bool) -> None:
    """Prints a line for people, or the same as a JSON object."""
    click.echo(to_json(document) if as_json else text)


def cancel(job_id: str, address: str, *, as_json: bool = False) -> int:
    with Client(address) as client:
        job_id, change = of_job(client, job_id, client.cancel)
    if as_json:
        click.echo(to_json({"job_id": job_id, **asdict(change)}))
    elif change.before.has_ended:
        click.echo(f"job {job_id} has ended already ({change.before}): nothing was changed")
    else:
        click.echo(f"job {job_id} is being stopped" + ("" if change.is_made else " already"))
    return 0


def logs(
    job_id: str, rank: int | None, address: str, *, follow: bool, with_times: bool = False, as_json: bool = False
) -> int:
    """Prints the ranks' logs: each line with its rank, or those of one rank without it. Exit code 2 without any log."""
    code = 2
    with Client(address) as client:
        for line in _lines(client, job_id, rank, follow=follow):
            code = 2 if line.error and code else 0
            if as_json:
                click.echo(to_json(asdict(line)))
                continue
            if line.error:
                print_notice(f"rank {line.rank}: {line.error}")
                continue
            text = printable(line.text.expandtabs(4))
            when = f"{line.at.astimezone():%Y-%m-%d %H:%M:%S} " if with_times and line.at else ""
            click.echo(when + (text if rank is not None else f"rank {line.rank} | {text}"))
    return code


def _lines(client: Client, job_id: str, rank: int | None, *, follow: bool) -> Iterator[LogLine]:
    """The lines of the named job."""

    def ask(known: str) -> Iterator[LogLine]:
        lines = client.logs(known, rank=rank, follow=follow)
        first = next(lines, None)  # raises if there is no such job
        return chain([] if first is None else [first], lines)

    return of_job(client, job_id, ask)[1]


def fetch(job_id: str, file: Path, address: str, *, best: bool = False, as_json: bool = False) -> int:
    try:
        with Client(address) as client:
            job_id, _ = of_job(client, job_id, lambda known: client.download(known, file, best=best))
    except OSError as error:
        raise InvalidJob(f"{file} cannot be written: {error.strerror}") from None
    size = file.stat().st_size
    _print(f"{file}: {size} bytes", {"job_id": job_id, "path": str(file), "size_bytes": size}, as_json=as_json)
    return 0


def checkpoint(job_id: str, address: str, *, as_json: bool = False) -> int:
    with Client(address) as client:
        job_id, _ = of_job(client, job_id, client.checkpoint)
    _print(f"job {job_id} writes a checkpoint with its next round", {"job_id": job_id}, as_json=as_json)
    return 0


def scale(job_id: str, num_ranks: int, address: str, *, as_json: bool = False) -> int:
    with Client(address) as client:
        job_id, before = of_job(client, job_id, lambda known: client.scale(known, num_ranks))
    how = {
        -1: "others join when there are slots for them",
        0: "as before",
        1: "the highest leave once their work is committed",
    }[(before > num_ranks) - (before < num_ranks)]
    text = f"job {job_id} is to have {num_ranks} rank{'s' if num_ranks != 1 else ''}: {how}"
    _print(text, {"job_id": job_id, "num_ranks": num_ranks, "num_ranks_before": before}, as_json=as_json)
    return 0


def drain(host: str, address: str, *, is_drained: bool, as_json: bool = False) -> int:
    with Client(address) as client:
        num_ranks = client.drain(host, is_drained=is_drained)
    which = "rank, which leaves once its" if num_ranks == 1 else "ranks, which leave once their"
    leave = f"; it has {num_ranks} {which} work is committed" if num_ranks else ""
    text = f"{host} gets no more ranks{leave}" if is_drained else f"{host} is offered again"
    _print(text, {"host": host, "is_drained": is_drained, "num_ranks": num_ranks}, as_json=as_json)
    return 0


def pause(job_id: str, address: str, *, is_paused: bool, as_json: bool = False) -> int:
    with Client(address) as client:
        job_id, change = of_job(client, job_id, lambda known: client.pause(known, is_paused=is_paused))
        stalled = _stalled_ranks(client, job_id) if change.is_made and is_paused else []
    if as_json:
        click.echo(to_json({"job_id": job_id, **asdict(change), "stalled_ranks": stalled}))
    elif stalled:
        click.echo(f"job {job_id} pauses once {_make_batches_again(stalled)}, and its open round has ended")
    elif change.is_made:
        click.echo(f"job {job_id} pauses after its open round" if is_paused else f"job {job_id} goes on")
    elif change.before is JobState.PAUSED:
        click.echo(f"job {job_id} is paused already")
    else:
        click.echo(f"job {job_id} is {change.before}: nothing was changed")
    return 0


def _stalled_ranks(client: Client, job_id: str) -> list[int]:
    view = next(iter(client.watch(job_id)), None)
    return [rank.rank for rank in view.ranks if rank.stalled_s] if isinstance(view, JobView) else []


def _make_batches_again(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}, which is stalled, makes batches again"
    return f"ranks {', '.join(map(str, ranks))}, which are stalled, make batches again"


def show_timeline(job: str, address: str, output: Path, *, as_page: bool) -> int:
    from elche_client.display import timeline

    found = timeline.read(_timeline_lines(job, address), job)
    if not found.spans:
        raise InvalidJob(f"the timeline of {job} is empty: its ranks have not begun")
    text = timeline.to_page(found, Path(job).name) if as_page else json.dumps(timeline.to_trace(found))
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidJob(f"{output} cannot be written: {error.strerror}") from None
    how = "open it in a browser" if as_page else "open it at ui.perfetto.dev"
    ranks = "1 rank" if len(found.ranks) == 1 else f"{len(found.ranks)} ranks"
    click.echo(f"{output}: {len(found.spans)} spans of {ranks}; {how}")
    return 0


def _timeline_lines(job: str, address: str) -> list[str]:
    """The timeline in a run's folder, or of a job at a coordinator. Raises `InvalidJob` when there is none."""
    if not Path(job).is_dir():
        with folder_or_job(job, address), Client(address) as client:
            return of_job(client, job, client.timeline)[1].splitlines()
    files = sorted((Path(job) / "coordinator" / "timelines").glob("*.jsonl"))
    if not files:
        with known_as_folder(job):
            raise InvalidJob(f"{job} has no timeline: run it with --timeline true")
    return files[-1].read_text(encoding="utf-8").splitlines()


def _check(path: Path, options: JobOptions, folder: Path | None) -> None:
    """Checks the file on this machine before it is sent. Raises as `check_file` does."""
    print_notice(f"loading {path} here to check it; --no-check leaves that to the ranks")
    notifications: NotificationQueue = SimpleQueue()
    with ChildProcesses() as processes, forward_signals(notifications, processes.kill):
        report = check_file(path, options, device=None, folder=folder, notifications=notifications, processes=processes)
    placed = options.settings.get("group_size", 1)
    if report.group_size != placed:
        raise InvalidJob(
            f"{path}: its group_size is {report.group_size}, but the job would be placed in groups of {placed}: "
            f"submit it with --group-size {report.group_size}"
        )
    for note in report.notes:
        print_notice(note)
    if folder is None and report.imports_beside:
        print_notice(
            f"{path} imports {', '.join(report.imports_beside)} from its folder, and only {path.name} is sent: the job "
            "fails on a host that lacks it. Send the folder, too (without --folder none)"
        )


def _watch(handle: JobHandle, *, as_json: bool) -> int:
    record = JobRecord(job_id=handle.id, name=handle.id)
    notifications: NotificationQueue = SimpleQueue()
    try:
        with forward_signals(notifications), make_progress(on_stderr=as_json) as progress:

            def show(event: Shown) -> None:
                if not isinstance(event, RankOutput | ProcessRestarted):
                    record.add(event)
                    progress.show(event)

            start_watch(handle, notifications.put)
            result = wait_for_result(notifications, show)
    except Interrupted as interrupted:
        with suppress(OSError):  # its terminal may be closed
            print_notice(f"the job goes on; `elche cancel {handle.id}` cancels it")
        return interrupted.exit_code
    except Unreachable as error:
        if hint := _hint(handle, record):
            raise Unreachable(f"{error}; {hint}, once it is back") from error
        raise
    print_ending(result, record, as_json=as_json, resume=_hint(handle, record))
    return exit_code_of(result)


def _hint(handle: JobHandle, record: JobRecord) -> str:
    """The command that resumes the job from its newest checkpoint; "" if none is known."""
    if record.checkpoint is None:
        return ""
    if record.last_view is not None and not any(rank.log_path for rank in record.last_view.ranks):
        return f"to go on, start the script again with ELCHE_RESUME={shlex.quote(record.checkpoint.path)}"
    return f"to go on: elche resume {shlex.quote(handle.id)}{_where(handle)}"


def _where(handle: JobHandle) -> str:
    """The option that names the job's coordinator; "" if it is the default."""
    address = handle.client.address
    return "" if address == contexts.address() else f" --coordinator {address}"
