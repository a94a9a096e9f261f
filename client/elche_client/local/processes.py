"""The processes that a run starts, each in its own session, so that Ctrl-C reaches only the run."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock, Thread
from typing import IO, Self

from elche.errors import ElcheError
from elche.formatting import last_words
from elche_client.display.formatting import printable
from elche_client.local.notifications import NotificationQueue, ProcessExited, ProcessOutput, ProcessRestarted

MAX_LINE_BYTES = 2 << 20
"""Longest line of a process that is read as one."""
TAIL_BYTES = 4096
"""Bytes at the end of a log that are read for a message."""
STOP_GRACE_S = 10.0
"""Seconds between SIGTERM and SIGKILL."""
CLOSE_S = 1.0
"""Seconds for its pipes to be closed, which a process that it has left behind may keep open."""
MAX_RESTARTS = 5
RESTARTS_WITHIN_S = 60.0
"""A process that was killed more than `MAX_RESTARTS` times within this many seconds is not restarted."""


class ProcessError(ElcheError):
    """A process of the run has exited before the job ended, or did not start."""

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class ChildProcess:
    """One process. Its exit, and with `captures_stdout` its lines, go to the queue; other output goes to its log."""

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        notifications: NotificationQueue,
        *,
        log: Path | None = None,
        output: IO[bytes] | None = None,
        captures_stdout: bool = False,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        self.name = name
        self.log = log
        """File for its other output, with the reason of its end; None: this process's output."""
        self._module = module
        self._output = output
        self._captures_stdout = captures_stdout
        self._folder = folder
        self._environment = environment
        self._notifications = notifications
        self._lock = Lock()
        self._again: Sequence[str] | None = None
        """Arguments with which it is restarted after it was killed; None: it is not restarted."""
        self._restarts_s: list[float] = []
        self._process = self._start(arguments)
        self._listener = Thread(target=self._listen, name=f"{name} process", daemon=True)
        self._listener.start()

    def restart_with(self, arguments: Sequence[str]) -> None:
        """Has it restarted, with these arguments, when a signal kills it."""
        self._again = arguments

    def _start(self, arguments: Sequence[str]) -> "subprocess.Popen[bytes]":
        log_file = self.log.open("ab") if self.log else None
        try:
            return subprocess.Popen(
                # Without -P, `-m` would import from the working directory first, such as a user's own queue.py or
                # types.py.
                [sys.executable, "-P", "-m", self._module, *arguments],
                stdin=subprocess.PIPE,  # closed when this process ends, on which the child exits
                stdout=subprocess.PIPE if self._captures_stdout else self._output or log_file,
                stderr=log_file,
                env={**os.environ, **self._environment} if self._environment else None,
                cwd=self._folder,
                start_new_session=True,
            )
        finally:
            if log_file:
                log_file.close()

    def _listen(self) -> None:
        while True:
            if self._process.stdout:
                while line := self._process.stdout.readline(MAX_LINE_BYTES):
                    text = line.decode("utf-8", "replace").rstrip("\r\n")
                    self._notifications.put(ProcessOutput(process=self.name, line=text))
            code = self._process.wait()
            for pipe in filter(None, (self._process.stdin, self._process.stdout)):
                with suppress(OSError):  # it has not read all
                    pipe.close()
            if not self._restart(code):
                break
            self._notifications.put(ProcessRestarted(process=self.name, number=-code))
        self._notifications.put(ProcessExited(process=self.name, code=code, log=self.log))

    def tell(self, line: str) -> None:
        """Writes a line to its standard input. Ignores a process that has ended, which makes a notification."""
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):  # the other end, or this one, is closed
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()

    def _restart(self, code: int) -> bool:
        """Restarts it if a signal has killed it, and not too often. Returns True if it did."""
        now_s = time.monotonic()
        with self._lock:
            self._restarts_s = [at_s for at_s in self._restarts_s if now_s - at_s < RESTARTS_WITHIN_S]
            if self._again is None or code >= 0 or len(self._restarts_s) >= MAX_RESTARTS:
                return False
            self._restarts_s.append(now_s)
            self._process = self._start(self._again)
            return True

    def ask_to_end(self) -> None:
        """Sends SIGTERM, and does not wait."""
        with self._lock:
            # With the lock: of a restart at this moment the signal below reaches the new process.
            self._again = None
        self._process.terminate()

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Sends SIGTERM, waits for `grace_s`, then kills the process and the rest of its session."""
        self.ask_to_end()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_s)
        self.kill()
        self._process.wait()
        self._listener.join(CLOSE_S)

    def kill(self) -> None:
        """Kills the process and its session."""
        # Without the lock: a signal's handler calls this, and the code that it has interrupted may hold it.
        self._again = None
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


class ChildProcesses:
    """The processes of one run. Leaving the context stops them, newest first."""

    def __init__(self) -> None:
        self._processes: list[ChildProcess] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def add(self, child: ChildProcess) -> None:
        self._processes.append(child)

    def stop_first(self, child: ChildProcess) -> None:
        """Makes this process the first to be stopped."""
        self._processes.remove(child)
        self._processes.append(child)

    def end(self, child: ChildProcess) -> None:
        """Stops this process only."""
        child.stop()
        self._processes.remove(child)

    def ask_to_end(self) -> None:
        """Sends SIGTERM to all at once, when none needs another any more, before `stop` waits for each."""
        for child in self._processes:
            child.ask_to_end()

    def stop(self) -> None:
        while self._processes:
            # It stays in the list meanwhile, so that a second Ctrl-C kills it, too.
            self._processes[-1].stop()
            self._processes.pop()

    def kill(self) -> None:
        for child in self._processes:
            child.kill()


def exit_error(ended: ProcessExited) -> ProcessError:
    """The error for a process that exited too early, with the last line of its log and the log's path."""
    how = f"exited with code {ended.code}" if ended.code >= 0 else f"was killed by {signal_name(-ended.code)}"
    says_why = ended.log and ended.code != -signal.SIGKILL  # of that a process knows nothing
    last = last_words(last_lines(ended.log)) if ended.log and says_why else ""
    words = f": {last}" if last else ""
    where = f" (log: {ended.log})" if ended.log else ""
    if ended.log and not ended.log.exists():
        where = f" ({ended.log} is gone: a run needs its folder until it has ended)"
    who = ended.process if ended.process.startswith("rank") else f"the {ended.process}"
    return ProcessError(f"{who} {how}{words}{where}")


def last_lines(log: Path) -> list[str]:
    """The last lines of a log that are not empty, without terminal control codes."""
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - TAIL_BYTES, 0))
        lines = file.read().decode("utf-8", "replace").splitlines()
        return [printable(line).strip() for line in lines if line.strip()]
    return []


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
