"""`elche run`: starts a coordinator, an agent and one job on this machine, and stops them together.

The processes are started before this one imports gRPC and the panel, so that the slowest step, the spawner's import of
PyTorch, begins at once and runs in parallel with all others.
"""

import errno
import json
import os
import re
import secrets
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from typing import IO, TYPE_CHECKING

import click

from elche.errors import ElcheError, HelpShown, InvalidJob, JobFailed, Unreachable
from elche.folders import keep_out
from elche.manifest import SOURCE, checkpoints_in
from elche.output import outlive_readers
from elche.token import VARIABLE
from elche_client.display.formatting import printable
from elche_client.display.notices import print_notice
from elche_client.display.output import exit_code_of, print_ending
from elche_client.display.record import JobRecord, to_json
from elche_client.events import Checkpoint, JobResult, JobState, JobView, RoundReport
from elche_client.local.check import NEEDED_BY_WORKER, CheckReport, arguments_of, missing_of, read_report
from elche_client.local.notifications import (
    Interrupted,
    NotificationQueue,
    ProcessExited,
    ProcessOutput,
    ProcessRestarted,
    Shown,
    forward_signals,
    next_notification,
    start_watch,
    wait_for_result,
)
from elche_client.local.processes import ChildProcess, ChildProcesses, ProcessError, exit_error, last_lines, signal_name
from elche_client.options import JobOptions, read_source
from elche_client.transport.rank_output import LogTail, RankOutput

if TYPE_CHECKING:
    from elche_client.client import Client, JobHandle
    from elche_client.display.progress import ProgressDisplay

COMMAND = "run.json"
"""File, in the run's folder, with the arguments of the run, for `elche resume` and `elche replay`."""
CADENCE = "cadence.binpb"
"""File with the recording of its rounds: parts of a `JobSpec`, each with one round, end to end."""
TOKEN = "token"
"""File with the run's token."""
AGENT = "elche_worker.agent.for_run"
COORDINATOR = "elche_coordinator.for_run"
NEEDED = (*NEEDED_BY_WORKER, "elche_coordinator", "sqlalchemy")
CHECKED = "checked "
"""Begins the line in which the agent reports the check of the file."""
NO_HOST = "no host offers"
"""Part of the coordinator's reason if there are no slots."""
LISTENING = "elche-coordinator listening on "
"""Begins the line in which the coordinator prints its address."""
OF_OTHERS = (
    "ELCHE_TLS",
    "ELCHE_CLIENT_CERTIFICATES",
    "ELCHE_STORE",
    "ELCHE_QUOTAS",
    "ELCHE_INTERFACE",
    "ELCHE_ARTIFACTS",
    "ELCHE_LOG_FORMAT",
)
"""Environment variables for another coordinator, which are removed for the run's own."""
START_TIMEOUT_S = 60.0
"""Seconds in which the coordinator must print its address."""
RECONNECT_S = 30.0
"""Seconds in which a killed coordinator must be back."""
RESTART_S = 1.0
"""Seconds for which a submission waits for a killed coordinator before each further attempt."""
CANCEL_TIMEOUT_S = 15.0
"""Seconds to wait for the result of a job that was cancelled."""
CHECKPOINT_TIMEOUT_S = 60.0
"""Seconds to wait for the checkpoint before a job is cancelled: a rank may be in a long batch or evaluation, or the
model be large."""
EXPLANATION_TIMEOUT_S = 2.0
"""Seconds to wait for the coordinator's exit, whose message explains why it does not answer."""


@dataclass(slots=True, kw_only=True)
class LocalRun:
    """One `elche run`, from its arguments to its exit code."""

    path: Path
    options: JobOptions
    device: str
    out: Path | None
    """Folder for logs, model and record; None: a new folder under runs/."""
    as_json: bool
    as_events: bool = False
    shows_logs: bool = True
    """True if the output of the ranks is shown."""
    working_folder: Path | None = None
    """Working directory of the ranks; None: this process's."""
    is_checked: bool = False
    """True if the checkpoint to resume has just been found whole: its files are not read once more before ranks do."""
    folder: Path | None = None
    """`out`, once it is created."""
    notifications: NotificationQueue = field(default_factory=SimpleQueue)
    processes: ChildProcesses = field(default_factory=ChildProcesses)
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    """This run's own token: any caller of the coordinator can run code on this machine."""
    record: JobRecord = field(default_factory=JobRecord)
    _was_queued: bool = False
    """True if the job was seen to wait for slots before."""
    _cadence: IO[bytes] | None = None
    """File of the rounds so far, for `elche replay`."""
    _log_tail: LogTail | None = None
    """Follows the ranks' logs."""

    def run(self) -> int:
        """Runs the job to its end and prints the outcome. Returns the exit code."""
        outlive_readers(lambda why: print_notice(f"{why}; the run goes on"))
        self.record.name = self.options.name or self.path.stem
        try:
            with forward_signals(self.notifications, self._leave_at_once), self.processes:
                result, code = self._train()
        except Interrupted as interrupted:
            result = JobResult(state=JobState.CANCELLED, error=str(interrupted))
            code = interrupted.exit_code
        except HelpShown:
            return 0
        except ElcheError as error:
            result, code = _result_of(error)
        self._write_late_lines()
        record_path = self._write_record(result)
        print_ending(
            result,
            self.record,
            as_json=self.as_json or self.as_events,
            as_event=self.as_events,
            record_path=record_path,
            here=True,
            resume=self._hint(was_refused=result.invalid),
        )
        return code

    def _train(self) -> tuple[JobResult, int]:
        source = read_source(self.path)
        require_installed()
        agent, coordinator = self._begin_check(), self._begin_coordinator()
        if sys.stderr.isatty():
            print_notice(f"loading PyTorch and {self.path.name}, to check it before anything is started")
        from elche_client.client import Client  # slow, in parallel with the processes' imports

        report = self._await_check()
        slots, group_size = report.slots, report.group_size
        options = replace(self.options, num_ranks=len(slots) // group_size)
        if group_size > 1:  # the coordinator needs it to place the job, before a rank reads the file
            options = replace(options, settings={**options.settings, "group_size": group_size})
        self.folder = make_folder(self.out, Path(self.options.name or self.path.stem).name)
        self._write_command(self.folder, source, options)
        # Unbuffered: `elche replay` and `elche audit` have each round that a killed run has heard of.
        with (self.folder / CADENCE).open("ab", buffering=0) as self._cadence:
            self._start_log_tail(self.folder)
            address = self._start_coordinator(coordinator, self.folder)
            self._begin_agent(agent, self.folder, address, slots)
            options = replace(options, output_dir=str(self.folder.resolve()))
            try:
                with Client(address, token=self.token, tls="", reconnect_s=RECONNECT_S) as client:
                    handle = self._submit(client, options)
                    self.record.job_id = handle.id
                    followed = self._follow(handle)
            except Unreachable as error:
                raise self._explain(error) from error
        if followed[0].state is JobState.SUCCEEDED:  # its ranks have left, with all output read
            self.processes.ask_to_end()
        return followed

    def _submit(self, client: "Client", options: JobOptions) -> "JobHandle":
        """Submits the job, again while the coordinator, which was killed, is started again. Raises `ProcessError` once
        it is not.
        """
        key, give_up_s = secrets.token_hex(16), time.monotonic() + RECONNECT_S  # the key: it may have the job already
        while True:
            try:
                return client.submit_options(self.path, options, key=key)
            except Unreachable:
                if time.monotonic() >= give_up_s:
                    raise
            with suppress(TimeoutError):
                wait_for_result(self.notifications, self._tell, _early_end, timeout_s=RESTART_S)

    def _write_command(self, folder: Path, source: str, options: JobOptions) -> None:
        """Writes the arguments of this run for `elche replay` and `elche resume`."""
        command = {
            "name": self.record.name,
            "file": str(self.path.resolve()),
            "folder": str(self.working_folder or Path.cwd()),
            "settings": dict(options.settings),
            "num_ranks": options.num_ranks,
            "slow_factors": dict(options.slow_factors),
            "resume": options.resume,
            "arguments": list(options.arguments),
            "environment": dict(options.environment),
        }
        path = folder / COMMAND
        path.touch(mode=0o600)  # the environment may hold secrets
        path.write_text(to_json(command, indent=1) + "\n", encoding="utf-8")
        (folder / SOURCE).write_text(source, encoding="utf-8")

    def _start_log_tail(self, folder: Path) -> None:
        if self.shows_logs:
            self._log_tail = LogTail(folder, self.notifications)
            self._log_tail.start()

    def _write_late_lines(self) -> None:
        """Prints output of the ranks that was not shown before they exited."""
        if self._log_tail is None:
            return
        late = self._log_tail.stop()
        waiting = [self.notifications.get_nowait() for _ in range(self.notifications.qsize())]
        for printed in (*(one for one in waiting if isinstance(one, RankOutput)), *late):
            self._print(printed)

    def _print(self, printed: RankOutput) -> None:
        """Prints output of a rank while no progress is shown."""
        from elche_client.display.progress import printed_text

        click.echo(printed_text(printed), err=self.as_json or self.as_events)

    def _hint(self, *, was_refused: bool = False) -> str:
        """The command that resumes from the run's newest checkpoint, or else from the one with which it began, unless
        that was refused; "" if there is none.
        """
        if self.folder is not None:
            with suppress(InvalidJob):
                checkpoints_in(self.folder, lambda *damaged: None)
                return f"to go on: elche resume {shlex.quote(str(self.folder))}"
        before = "" if was_refused else self.options.resume
        place = self.record.checkpoint.path if self.record.checkpoint else before
        if not place:
            return ""
        file = f" {shlex.quote(str(self.path))}" if "://" in place else ""
        return f"to go on: elche resume {shlex.quote(place)}{file}"

    def _leave_at_once(self) -> None:
        """On a second signal: kills all processes."""
        self.processes.kill()
        if hint := self._hint():
            begin = "\n" if os.isatty(2) else ""  # in case a line, or the panel, is being printed
            # Within a signal's handler: a print that it has interrupted holds the stream's lock, and a second one would
            # fail.
            os.write(2, f"{begin}elche: {printable(hint)}\n".encode())

    def _record(self, event: Shown) -> None:
        if isinstance(event, RankOutput | ProcessRestarted):
            return
        self.record.add(event)
        if isinstance(event, RoundReport) and self._cadence is not None:
            self._note_round(event.recorded, self._cadence)

    def _begin_check(self) -> ChildProcess:
        """Starts the agent, which checks the file before it gets the coordinator's address."""
        options, environment = self.options, {VARIABLE: self.token, **dict.fromkeys(OF_OTHERS, "")}
        agent = ChildProcess(
            "agent",
            AGENT,
            [str(os.getpid())],
            self.notifications,
            captures_stdout=True,
            environment=environment,
            folder=self.working_folder,
        )
        self.processes.add(agent)
        words = [*arguments_of(self.path, options, self.device), *["--is-whole"] * self.is_checked]
        asked = {"words": words, "environment": dict(options.environment), "num_ranks": options.num_ranks}
        agent.tell(json.dumps(asked))  # not as arguments, which all users of the machine see
        return agent

    def _await_check(self) -> CheckReport:
        """Waits for the check's report. Raises `InvalidJob`, or `JobFailed` with the user's traceback."""
        while True:
            notification = next_notification(self.notifications)
            if isinstance(notification, ProcessExited) and notification.process != "agent":
                raise exit_error(notification)
            if isinstance(notification, ProcessExited):
                report = read_report("", notification.code, self.path)
            elif isinstance(notification, ProcessOutput) and notification.line.startswith(CHECKED):
                code, _, line = notification.line.removeprefix(CHECKED).partition(" ")
                report = read_report(line, int(code), self.path)
            else:
                continue  # other output of Python's startup
            break
        for note in report.notes:
            print_notice(note)
        return report

    def _begin_coordinator(self) -> ChildProcess:
        """Starts the coordinator's process, which imports its modules until it gets its arguments."""
        environment = {VARIABLE: self.token, **dict.fromkeys(OF_OTHERS, "")}
        coordinator = ChildProcess(
            "coordinator", COORDINATOR, [], self.notifications, captures_stdout=True, environment=environment
        )
        self.processes.add(coordinator)
        return coordinator

    def _start_coordinator(self, coordinator: ChildProcess, folder: Path) -> str:
        """Has the coordinator serve and returns its address. Raises `ProcessError` if it exits."""
        rest = ["--exit-with-stdin", "--grace", "0", "--data", str(folder / "coordinator")]
        log, secret = _new_log(folder / "coordinator.log"), folder / TOKEN
        secret.touch(mode=0o600)  # for `elche watch` and other commands while the run lasts
        secret.write_text(self.token + "\n", encoding="utf-8")
        coordinator.log = log
        arguments = ["--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", *rest]
        coordinator.tell(json.dumps({"arguments": arguments, "log": str(log)}))
        try:
            notification = next_notification(self.notifications, timeout_s=START_TIMEOUT_S)
        except TimeoutError:
            raise ProcessError(f"the coordinator did not start in {START_TIMEOUT_S:.0f} s (log: {log})") from None
        if isinstance(notification, ProcessOutput) and notification.line.startswith(LISTENING):
            address, page = notification.line.removeprefix(LISTENING).split()[0], self._print_page(log)
            # At the same addresses: agent, ranks, this command and an open page know no others.
            coordinator.restart_with(["--listen", address, "--http", page, *rest])
            return address
        if isinstance(notification, ProcessExited):
            raise _early_end(notification)
        raise ProcessError(f"the coordinator did not print its address but {notification!r} (log: {log})")

    def _print_page(self, log: Path) -> str:
        """Prints and returns the address of the page, which the coordinator has logged before it printed its own
        address.

        It contains the token only on a terminal: other output may be stored and read by others.
        """
        found = re.search(r"page and metrics on (\S+)", log.read_text(encoding="utf-8"))
        if found and sys.stderr.isatty():
            print_notice(f"{found[1]}/#token={self.token} shows this run while it lasts")
        elif found:
            print_notice(f"{found[1]} shows this run while it lasts; its token is in {log.with_name(TOKEN)}")
        return found[1].removeprefix("http://") if found else "127.0.0.1:0"

    def _begin_agent(
        self, agent: ChildProcess, folder: Path, address: str, slots: Sequence[Mapping[str, object]]
    ) -> None:
        self.processes.stop_first(agent)  # while the coordinator runs, for the ranks' last messages
        agent.log = _new_log(folder / "agent.log")
        order = {
            "coordinator": address,
            "slots": slots,
            "work_dir": str(folder.absolute()),
            "log": str(agent.log.absolute()),
        }
        agent.tell(json.dumps(order))

    def _follow(self, handle: "JobHandle") -> tuple[JobResult, int]:
        from elche_client.display.progress import make_progress

        with make_progress(on_stderr=self.as_json, as_events=self.as_events) as progress:

            def show(event: Shown) -> None:
                self._show(event, progress)

            start_watch(handle, self.notifications.put)
            try:
                result = wait_for_result(self.notifications, show, _early_end)
                return result, exit_code_of(result)
            except Interrupted as interrupted:
                result = self._save_and_cancel([handle], show, interrupted)
                # It may have ended by itself first: then its model is there.
                return result, 0 if result.state is JobState.SUCCEEDED else interrupted.exit_code

    def _tell(self, event: Shown) -> None:
        """Shows what comes while no job is followed: the ranks of one that is submitted again may run already."""
        self._record(event)
        self._tell_restart(event)
        if isinstance(event, RankOutput):
            self._print(event)

    def _tell_restart(self, event: Shown) -> None:
        if isinstance(event, ProcessRestarted):
            print_notice(f"the {event.process} was killed by {signal_name(event.number)}; it is started again")

    def _show(self, event: Shown, progress: "ProgressDisplay") -> None:
        self._record(event)
        if isinstance(event, ProcessRestarted):
            self._tell_restart(event)
        elif isinstance(event, RankOutput):
            progress.write(event)
        elif isinstance(event, JobView) and event.state is JobState.QUEUED and not self.as_events:
            was_queued, self._was_queued = self._was_queued, True
            at_first = replace(event, state=JobState.STARTING, reason="")  # it waits for this run's own agent
            why = "its agent has not reached the coordinator yet" if NO_HOST in event.reason else event.reason
            progress.show(replace(event, reason=why) if was_queued else at_first)
        else:
            progress.show(event)

    def _save_and_cancel(
        self, jobs: Sequence["JobHandle"], show: Callable[[Shown], None], interrupted: Interrupted
    ) -> JobResult:
        """Waits for a checkpoint if a job can write one, then cancels the jobs. Returns the first one's result."""
        with suppress(ElcheError, TimeoutError):
            if self._asks_for_checkpoint(jobs):
                try:
                    until_saved = self._until_saved(show, is_one_job=len(jobs) == 1)
                    return wait_for_result(self.notifications, until_saved, _early_end, timeout_s=CHECKPOINT_TIMEOUT_S)
                except TimeoutError:
                    print_notice(f"no checkpoint was written in {CHECKPOINT_TIMEOUT_S:g} s")
                except _Saved:
                    pass
            if self._has_trained_all:
                print_notice("all epochs are trained: waiting for the model; Ctrl-C again to leave at once")
                # A cancelled job would have no model, and nothing to go on with.
                with suppress(TimeoutError):
                    return wait_for_result(self.notifications, show, _early_end, timeout_s=CHECKPOINT_TIMEOUT_S)
            print_notice("cancelling the job; Ctrl-C again to leave at once")
            for job in jobs:
                job.cancel()
            return wait_for_result(self.notifications, show, _early_end, timeout_s=CANCEL_TIMEOUT_S)
        return JobResult(state=JobState.CANCELLED, error=str(interrupted))

    def _asks_for_checkpoint(self, jobs: Sequence["JobHandle"]) -> bool:
        """Requests a checkpoint of each. Returns False if none of them trains, so that none is written."""
        num_asked = 0
        for job in jobs:
            with suppress(ElcheError):  # it does not train
                job.checkpoint()
                num_asked += 1
        if num_asked:
            print_notice("writing a checkpoint; Ctrl-C again to leave at once")
        return num_asked > 0

    @property
    def _has_trained_all(self) -> bool:
        """True if the newest checkpoint is of a job that has only to be evaluated and saved."""
        view, saved = self.record.last_view, self.record.checkpoint
        return view is not None and saved is not None and 0 < view.num_epochs <= saved.epoch

    def _until_saved(self, show: Callable[[Shown], None], *, is_one_job: bool) -> Callable[[Shown], None]:
        """`show` that raises `_Saved` once a checkpoint is written, or has failed. If it is of one job, a newer one
        than its rounds so far; the versions of several are not comparable.
        """
        version = self.record.rounds[-1].version if is_one_job and self.record.rounds else 0
        num_failures = self.record.last_view.num_checkpoint_failures if self.record.last_view else 0

        def shown(event: Shown) -> None:
            show(event)
            is_saved = isinstance(event, Checkpoint) and event.version > version
            has_failed = isinstance(event, JobView) and event.num_checkpoint_failures > num_failures
            if is_saved or has_failed:
                raise _Saved

        return shown

    def _explain(self, error: Unreachable) -> ElcheError:
        """The error to show if the coordinator does not answer: its own exit, if it has exited."""
        try:
            wait_for_result(self.notifications, self._tell, _early_end, timeout_s=EXPLANATION_TIMEOUT_S)
        except ProcessError as ended:
            return ended
        except (TimeoutError, Unreachable):
            pass
        return ProcessError(f"{error} (logs: {self.folder})")

    def _note_round(self, recorded: bytes, file: IO[bytes]) -> None:
        """Adds a round to the file for `elche replay`. The run goes on without that file where it cannot be written."""
        try:
            # An unbuffered write may write a part only, without an error; what follows could not be read then.
            if file.write(recorded) != len(recorded):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._cadence = None
            print_notice(f"{self.folder}/{CADENCE}: {error.strerror}; `elche replay` cannot repeat this run")

    def _write_record(self, result: JobResult) -> Path | None:
        if self.folder is None:
            return None
        path = self.folder / "record.json"
        try:
            self.record.write(path, result)
        except OSError as error:
            print_notice(f"the record {path} could not be written: {error.strerror}")
            return None
        return path


class _Saved(Exception):
    """The requested checkpoint is written, or cannot be."""


def require_installed() -> None:
    """Raises `InvalidJob` when a package that `elche run` needs is missing."""
    missing = missing_of(NEEDED)
    if missing:
        what = "the coordinator" if missing[0] not in NEEDED_BY_WORKER else "the worker"
        raise InvalidJob(f"elche run needs {what}: pip install 'elche[all]' ({', '.join(missing)} is missing)")


def make_folder(out: Path | None, stem: str) -> Path:
    """A folder for this run alone. Raises `InvalidJob` when it cannot be created or holds another."""
    try:
        if out is None:
            return _new_folder(Path("runs") / f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}")
        if not out.exists():
            out.mkdir(parents=True, exist_ok=True)
            keep_out(out)
        _claim(out)
        return out
    except OSError as error:
        raise InvalidJob(f"the folder {error.filename} cannot be created: {error.strerror}") from error


def _new_log(path: Path) -> Path:
    """Makes the file, so that this command says so on a full disk, and no child has a traceback. Raises `OSError`."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
    return path


def _claim(folder: Path) -> None:
    """Makes the folder of a run's coordinator. Of two runs that begin at once only one makes it."""
    try:
        (folder / "coordinator").mkdir()
    except FileExistsError:
        raise InvalidJob(f"{folder} holds another run; remove it or name another folder with --out") from None


def _new_folder(wanted: Path) -> Path:
    wanted.parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        with suppress(FileExistsError):
            folder.mkdir()
            keep_out(folder)
            return folder
        number += 1


def _result_of(error: ElcheError) -> tuple[JobResult, int]:
    """The result and exit code of a run that ended by an error."""
    traceback = error.traceback if isinstance(error, JobFailed) else ""
    code = error.exit_code if isinstance(error, ProcessError) else 2
    return JobResult(state=JobState.FAILED, error=str(error), traceback=traceback, invalid=code == 2), code


def _early_end(ended: ProcessExited) -> ProcessError:
    """The coordinator's message if it refused its arguments, else a description of its exit."""
    if ended.process == "coordinator" and ended.code == 2 and ended.log and (lines := last_lines(ended.log)):
        return ProcessError(re.sub(r"^elche-coordinator: ", "", lines[-1]), exit_code=2)
    return exit_error(ended)
