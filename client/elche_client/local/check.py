"""Checks the user's file in a worker process before anything else is started."""

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from elche.errors import HelpShown, InvalidJob, JobFailed
from elche_client.display.formatting import printable
from elche_client.local.notifications import NotificationQueue, ProcessExited, next_notification
from elche_client.local.processes import ChildProcess, ChildProcesses, exit_error, signal_name
from elche_client.options import JobOptions

CHECK = "check"
"""Name of the process, in its notifications."""
MODULE = "elche_worker.rank.check"
NEEDED_BY_WORKER = ("elche_worker", "torch", "numpy", "safetensors", "setproctitle")
"""Packages that a rank imports."""
MAX_REPORT_BYTES = 2**20
"""Bytes of the output's end that are read: the file may print without end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """The result of checking a valid file."""

    slots: tuple[Mapping[str, Any], ...]
    """Slots to offer on this machine, `group_size` per rank: `device`, `model`, `memory_bytes`."""
    notes: tuple[str, ...]
    """Notes for the user before the training starts."""
    group_size: int = 1
    """Processes per rank, by the file or a setting."""
    imports_beside: tuple[str, ...] = ()
    """Modules that the file imports from its own folder."""


def missing_of(names: tuple[str, ...]) -> list[str]:
    """The packages in `names` that are not installed."""
    return [name for name in names if find_spec(name) is None]


def check_file(
    path: Path,
    options: JobOptions,
    *,
    device: str | None,
    folder: Path | None = None,
    notifications: NotificationQueue,
    processes: ChildProcesses,
) -> CheckReport:
    """Checks the file in its own process. Raises `InvalidJob`, `JobFailed` with the user's traceback, or `HelpShown`.

    `device` is the kind of this machine's devices to use; None if the job runs elsewhere. `folder` is the ranks'
    working directory, which is sent with the file; None: this process's.
    """
    arguments = arguments_of(path if folder is None else path.absolute(), options, device)
    started = {"environment": options.environment, "folder": folder}
    return _checked(arguments, path, notifications, processes, **started)


def arguments_of(path: Path, options: JobOptions, device: str | None) -> list[str]:
    """Arguments for the check of a file; `device` None: the job runs elsewhere."""
    num_ranks = options.min_ranks or options.num_ranks  # of a range the least: it may have no end
    return [
        str(path),
        *("--device", device or "cpu"),
        *(("--ranks", str(num_ranks)) if num_ranks else ()),
        *(("--runs-here",) if device else ()),
        *("--settings", json.dumps(dict(options.settings))),
        *(("--resume", options.resume) if options.resume else ()),
        *("--arguments", json.dumps(list(options.arguments))),
    ]


def check_devices(
    num_ranks: int, *, device: str, notifications: NotificationQueue, processes: ChildProcesses
) -> tuple[str, ...]:
    """The devices of this machine for `num_ranks` ranks; 0: all. Raises `InvalidJob` if there are too few."""
    if device == "cpu":
        return (device,) * max(1, num_ranks)
    arguments = ["--device", device, "--ranks", str(num_ranks)]
    report = _checked(arguments, Path("this machine"), notifications, processes)
    return tuple(str(slot["device"]) for slot in report.slots)


def _checked(
    arguments: list[str], path: Path, notifications: NotificationQueue, processes: ChildProcesses, **started: Any
) -> CheckReport:
    """The report of a check's process; `started` are further arguments of `ChildProcess`."""
    arguments = [*arguments, "--parent-pid", str(os.getpid())]
    with tempfile.TemporaryFile() as output:
        check = ChildProcess(CHECK, MODULE, arguments, notifications, output=output, **started)
        processes.add(check)
        code = _end_of_check(notifications)
        processes.end(check)
        return read_report(_last_line(output), code, path)


def _end_of_check(notifications: NotificationQueue) -> int:
    while True:
        notification = next_notification(notifications)
        if isinstance(notification, ProcessExited) and notification.process == CHECK:
            return notification.code
        if isinstance(notification, ProcessExited):
            raise exit_error(notification)


def _last_line(output: IO[bytes]) -> str:
    output.seek(max(output.seek(0, 2) - MAX_REPORT_BYTES, 0))
    lines = output.read().decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else ""


def read_report(line: str, code: int, path: Path) -> CheckReport:
    """Parses the last line of the check's output. Raises as `check_file` does."""
    try:
        report: dict[str, Any] = json.loads(line)
        if report["ok"] and report["devices"]:
            return CheckReport(
                slots=tuple(report["devices"]),
                notes=tuple(str(note) for note in report.get("notes", ())),
                group_size=int(report.get("group_size", 1)),
                imports_beside=tuple(str(name) for name in report.get("imports_beside", ())),
            )
        error, traceback = str(report["error"]), str(report.get("traceback", ""))
    except (ValueError, KeyError, TypeError):
        how = f"exited with code {code}" if code >= 0 else f"was killed by {signal_name(-code)}"
        last = f": {printable(line)}" if line else ""
        raise InvalidJob(f"{path} could not be checked, the process that loaded it {how}{last}") from None
    if report.get("has_answered"):
        raise HelpShown(error)
    raise JobFailed(error, traceback=traceback, invalid=True)
