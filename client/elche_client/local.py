"""`elche run`: a coordinator, an agent and one job on this machine, started and ended together."""

import re
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from typing import IO

import click

from elche.errors import ElcheError, InvalidJob, JobFailed, Unreachable
from elche.manifest import SOURCE
from elche_client.check import NEEDED_BY_WORKER, CheckReport, check_file, missing_of
from elche_client.children import Child, ChildError, Children, describe_end, last_lines
from elche_client.client import Client, JobHandle
from elche_client.ending import exit_code_of, print_ending
from elche_client.events import Event, JobResult, JobState, RoundReport
from elche_client.inbox import (
    Inbox,
    Interrupted,
    LineWritten,
    ProcessEnded,
    follow,
    signals_into,
    start_watch,
    take,
)
from elche_client.options import JobOptions, read_source
from elche_client.progress import make_progress
from elche_client.record import JobRecord, to_json

COMMAND = "run.json"
CADENCE = "cadence.binpb"
NEEDED = (*NEEDED_BY_WORKER, "elche_coordinator", "sqlalchemy")
LISTENING = "elche-coordinator listening on "
START_TIMEOUT_S = 60.0
CANCEL_TIMEOUT_S = 15.0
EXPLANATION_TIMEOUT_S = 2.0  # after the connection broke, the coordinator's own end may say why


@dataclass(slots=True, kw_only=True)
class LocalRun:
    """One `elche run`, from its arguments to its exit code."""

    path: Path
    options: JobOptions
    device: str
    out: Path | None  # where logs, model and record go; None: a new folder under runs/
    as_json: bool
    as_events: bool = False
    folder: Path | None = None  # `out` once it is made
    inbox: Inbox = field(default_factory=SimpleQueue)
    children: Children = field(default_factory=Children)
    record: JobRecord = field(default_factory=JobRecord)
    _cadence: IO[bytes] | None = None  # of the rounds so far, as `elche replay` repeats them

    def run(self) -> int:
        """Runs the job to its end and prints how it ended. Returns the exit code."""
        self.record.name = self.options.name or self.path.stem
        try:
            with signals_into(self.inbox, self.children.kill), self.children:
                result, code = self._train()
        except Interrupted as interrupted:
            result = JobResult(state=JobState.CANCELLED, error=str(interrupted))
            code = interrupted.exit_code
        except ElcheError as error:
            result, code = _result_of(error)
        record_path = self._write_record(result)
        as_json = self.as_json or self.as_events
        print_ending(result, self.record, as_json=as_json, as_event=self.as_events, record_path=record_path)
        return code

    def _train(self) -> tuple[JobResult, int]:
        source = read_source(self.path)
        require_installed()
        report = self._check()
        devices, group_size = report.devices, report.group_size
        options = replace(self.options, num_ranks=len(devices) // group_size)
        if group_size > 1:  # the coordinator places the job before a rank reads the file
            options = replace(options, settings={**options.settings, "group_size": group_size})
        self.folder = make_folder(self.out, Path(self.options.name or self.path.stem).name)
        self._write_command(self.folder, source, options)
        address = self._start_coordinator(self.folder)
        self._start_agent(self.folder, address, devices)
        options = replace(options, output_dir=str(self.folder.resolve()))
        try:
            with Client(address) as client:
                handle = client.submit_options(self.path, options)
                self.record.job_id = handle.id
                return self._follow(handle)
        except Unreachable as error:
            raise self._explain(error) from error

    def _write_command(self, folder: Path, source: str, options: JobOptions) -> None:
        """What `elche replay` needs to do the same again."""
        command = {
            "file": str(self.path.resolve()),
            "settings": dict(options.settings),
            "num_ranks": options.num_ranks,
            "slow_factors": dict(options.slow_factors),
            "resume": options.resume,
        }
        (folder / COMMAND).write_text(to_json(command, indent=1) + "\n", encoding="utf-8")
        (folder / SOURCE).write_text(source, encoding="utf-8")
        self._cadence = (folder / CADENCE).open("ab", buffering=0)

    def _take(self, event: Event) -> None:
        self.record.take(event)
        if isinstance(event, RoundReport) and self._cadence is not None:
            self._cadence.write(event.recorded)

    def _check(self) -> CheckReport:
        options = self.options
        report = check_file(self.path, options, device=self.device, inbox=self.inbox, children=self.children)
        for note in report.notes:
            click.echo(f"elche: {note}", err=True)
        return report

    def _start_coordinator(self, folder: Path) -> str:
        """The address at which it listens."""
        arguments = ["--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--exit-with-stdin"]
        arguments += ["--data", str(folder / "coordinator")]
        log = folder / "coordinator.log"
        self.children.add(Child("coordinator", "elche_coordinator", arguments, self.inbox, log=log, speaks=True))
        try:
            happening = take(self.inbox, timeout_s=START_TIMEOUT_S)
        except TimeoutError:
            raise ChildError(f"the coordinator did not start in {START_TIMEOUT_S:.0f} s (log: {log})") from None
        if isinstance(happening, LineWritten) and happening.line.startswith(LISTENING):
            self._tell_page(log)
            return happening.line.removeprefix(LISTENING).split()[0]
        if isinstance(happening, ProcessEnded):
            raise _early_end(happening)
        raise ChildError(f"the coordinator did not say where it listens but {happening!r} (log: {log})")

    def _tell_page(self, log: Path) -> None:
        """Where somebody at a terminal can look; the coordinator has logged it before it says that it listens."""
        if not sys.stderr.isatty():
            return
        found = re.search(r"page and metrics on (\S+)", log.read_text(encoding="utf-8"))
        if found:
            click.echo(f"elche: {found[1]} shows this run while it lasts", err=True)

    def _start_agent(self, folder: Path, address: str, devices: tuple[str, ...]) -> None:
        arguments = ["--coordinator", address, "--devices", ",".join(devices), "--work-dir", str(folder)]
        log = folder / "agent.log"
        self.children.add(Child("agent", "elche_worker.agent", [*arguments, "--exit-with-stdin"], self.inbox, log=log))

    def _follow(self, handle: JobHandle) -> tuple[JobResult, int]:
        with make_progress(on_stderr=self.as_json, as_events=self.as_events) as progress:

            def show(event: Event) -> None:
                self._take(event)
                progress.show(event)

            start_watch(handle, self.inbox)
            try:
                result = follow(self.inbox, show, _early_end)
                return result, exit_code_of(result)
            except Interrupted as interrupted:
                click.echo("elche: cancelling the job; again to end at once", err=True)
                return self._cancel(handle, show, interrupted), interrupted.exit_code

    def _cancel(self, handle: JobHandle, show: Callable[[Event], None], interrupted: Interrupted) -> JobResult:
        with suppress(ElcheError, TimeoutError):
            handle.cancel()
            return follow(self.inbox, show, _early_end, timeout_s=CANCEL_TIMEOUT_S)
        return JobResult(state=JobState.CANCELLED, error=str(interrupted))

    def _explain(self, error: Unreachable) -> ElcheError:
        """The coordinator's end, when that is why it does not answer."""
        try:
            follow(self.inbox, self.record.take, _early_end, timeout_s=EXPLANATION_TIMEOUT_S)
        except ChildError as ended:
            return ended
        except (TimeoutError, Unreachable):
            pass
        return ChildError(f"{error} (logs: {self.folder})")

    def _write_record(self, result: JobResult) -> Path | None:
        if self.folder is None:
            return None
        path = self.folder / "record.json"
        try:
            self.record.write(path, result)
        except OSError as error:
            click.echo(f"elche: the record {path} could not be written: {error.strerror}", err=True)
            return None
        return path


def require_installed() -> None:
    missing = missing_of(NEEDED)
    if missing:
        what = "the coordinator" if missing[0] not in NEEDED_BY_WORKER else "the worker"
        raise InvalidJob(f"elche run needs {what}: pip install 'elche[all]' ({', '.join(missing)} is missing)")


def make_folder(out: Path | None, stem: str) -> Path:
    """A folder for one run alone. Raises `InvalidJob` when it cannot be made or holds an earlier run."""
    try:
        if out is None:
            return _new_folder(Path("runs") / f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}")
        if (out / "coordinator").exists():
            raise InvalidJob(f"{out} holds an earlier run; remove it or name another folder with --out")
        out.mkdir(parents=True, exist_ok=True)
        return out
    except OSError as error:
        raise InvalidJob(f"the folder {error.filename} cannot be made: {error.strerror}") from error


def _new_folder(wanted: Path) -> Path:
    wanted.parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        with suppress(FileExistsError):
            folder.mkdir()
            return folder
        number += 1


def _result_of(error: ElcheError) -> tuple[JobResult, int]:
    """What an error that ended the run stands for, with its exit code."""
    traceback = error.traceback if isinstance(error, JobFailed) else ""
    code = error.exit_code if isinstance(error, ChildError) else 2
    return JobResult(state=JobState.FAILED, error=str(error), traceback=traceback, invalid=code == 2), code


def _early_end(ended: ProcessEnded) -> ChildError:
    """The coordinator's own line when it refused its arguments, else how the process ended."""
    if ended.process == "coordinator" and ended.code == 2 and ended.log and (lines := last_lines(ended.log)):
        return ChildError(re.sub(r"^elche-coordinator: ", "", lines[-1]), exit_code=2)
    return describe_end(ended)
