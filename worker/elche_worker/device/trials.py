"""Trials of this host's devices in forked processes, while a job's file is loaded.

A fork has imported torch already, which takes a new process seconds. A process that has used a device, or listed
devices by its driver, cannot be forked for a trial. So one process is forked that does neither: it forks one that lists
the devices, and then one for each device, and ends once all have answered.
"""

import json
import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import IO, NoReturn

from elche.errors import InvalidJob
from elche_worker.device import discovery
from elche_worker.device.discovery import TRIAL_LIMIT_S, Unusable
from elche_worker.process.parent import end_with_parent
from elche_worker.user.device import Device

MEANT_FOR_DRIVERS = ("CUDA", "NVIDIA", "HIP", "HSA", "ROCR", "GPU_", "ZE_", "SYCL", "ONEAPI", "PYTORCH", "TORCH")
"""Prefixes of environment variables that select the visible devices, or change how they are used."""


class Trials:
    """Trials begun in a process that has used no device and has no threads. They end with that process or `outcome`."""

    def __init__(self, wanted: str, *, limit_s: float = TRIAL_LIMIT_S) -> None:
        """`wanted` as in `choose_devices`; each trial, and listing the devices, may take `limit_s` seconds."""
        self.wanted = wanted
        self._environment = _of_drivers(os.environ)
        self._all = _Forked(lambda outcome: _try_all(wanted, limit_s, outcome))

    def still_hold(self, wanted: str) -> bool:
        """True if the trials are of `wanted`, and the variables that select visible devices have not changed."""
        return wanted == self.wanted and _of_drivers(os.environ) == self._environment

    def outcome(self) -> tuple[list[str], dict[str, Device | Unusable]]:
        """Waits for the trials; returns the names of the devices and the outcome of each. Raises `InvalidJob`."""
        outcome, output, code = self._all.end(None)
        try:
            found = json.loads(outcome)
        except ValueError:
            raise InvalidJob(f"torch cannot list the devices ({discovery.ended(code, output)})") from None
        return found["names"], {
            name: Unusable(**one) if "problem" in one else Device(**one) for name, one in found["tried"].items()
        }


def begin_trials(wanted: str) -> Trials | None:
    """Begins trials; None if there is nothing to try, or the system's libraries do not support fork."""
    is_possible = sys.platform.startswith("linux") and wanted.partition(":")[0] != "cpu"
    return Trials(wanted) if is_possible else None


def _try_all(wanted: str, limit_s: float, outcome: IO[str]) -> None:
    """Lists the devices in a fork, tries each in a fork of its own, and writes the outcome to `outcome` as JSON."""
    listing = _Forked(lambda names: names.write(json.dumps(discovery.names_of(wanted))))
    text, output, code = listing.end(time.monotonic() + limit_s)
    if not text:
        sys.exit(f"the process that looked for them {discovery.ended(code, output)}")
    names: list[str] = json.loads(text)
    running = {name: _Forked(partial(_try_one, name)) for name in names}
    deadline_s = time.monotonic() + limit_s
    tried = {name: _outcome(name, one, deadline_s, limit_s) for name, one in running.items()}
    outcome.write(json.dumps({"names": names, "tried": tried}))


def _try_one(name: str, outcome: IO[str]) -> None:
    try:
        found: dict[str, object] = asdict(discovery.try_here(name))
    except Unusable as error:
        found = _described(error)
    outcome.write(json.dumps(found))


def _outcome(name: str, running: "_Forked", deadline_s: float, limit_s: float) -> dict[str, object]:
    text, output, code = running.end(deadline_s)
    with suppress(ValueError):
        found: dict[str, object] = json.loads(text)
        return found
    if code is None:
        return _described(discovery.hanging(name, limit_s))
    return _described(Unusable(name, f"the process that tried it {discovery.ended(code, output)}"))


def _described(error: Unusable) -> dict[str, object]:
    return {"label": error.label, "problem": error.problem, "hangs": error.hangs}


def _of_drivers(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in environment.items() if name.startswith(MEANT_FOR_DRIVERS)}


class _Forked:
    """A forked process that runs a function, which reports one text; its other output is not shown."""

    def __init__(self, do: Callable[[IO[str]], object]) -> None:
        # A file and no pipe: nobody reads while it runs, and a process that has filled a pipe stands still.
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        self._reading, writing = os.pipe()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            self._run(do, writing, parent)
        # Closed here, so that the pipe ends with the child.
        os.close(writing)

    def _run(self, do: Callable[[IO[str]], object], writing: int, parent: int) -> NoReturn:
        code = 1
        try:
            end_with_parent(parent)
            os.close(self._reading)
            for descriptor in (1, 2):
                os.dup2(self._output.fileno(), descriptor)
            sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
            with os.fdopen(writing, "w") as outcome:
                do(outcome)
            code = 0
        except BaseException as error:
            print(error or type(error).__name__)
        finally:
            with suppress(Exception):
                sys.stderr.flush()
            os._exit(code)

    def end(self, deadline_s: float | None) -> tuple[str, str, int | None]:
        """Returns its report, its output and its exit code. The code is None if it has reported, or has not ended by
        the deadline: it is killed then and not waited for, since in a hanging driver it may survive SIGKILL.
        """
        outcome, code = "", None
        if _is_readable(self._reading, deadline_s):
            with os.fdopen(self._reading, "rb") as file:
                outcome = file.read().decode()  # a short line, and then the end
            code = None if outcome else _code_of(self.pid, deadline_s)
        else:
            os.close(self._reading)
        if code is None:
            os.kill(self.pid, signal.SIGKILL)
        with self._output as file:
            file.seek(0)
            return outcome, file.read().decode(errors="replace"), code


def _is_readable(descriptor: int, deadline_s: float | None) -> bool:
    left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
    return bool(select.select([descriptor], [], [], left_s)[0])


def _code_of(pid: int, deadline_s: float | None) -> int | None:
    """The exit code of a child; None if it has not ended by the deadline."""
    descriptor = os.pidfd_open(pid)
    try:
        ended = _is_readable(descriptor, deadline_s)
    finally:
        os.close(descriptor)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) if ended else None
