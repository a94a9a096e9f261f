"""Real coordinators, agents and commands as processes, found again by a mark in their environment."""

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from elche_client import Client

MARK = "ELCHE_TEST_MARK"
LISTENING = re.compile(r"elche-coordinator listening on (\S+)")
PAGE = re.compile(r'page and metrics on (https?://[^\s"]+)')
ATTENDED = re.compile(r"connected as (\S+)")
LIMIT_S = 400.0
"""A hang: whatever a test waits for comes long before, on a busy machine too."""
CRASHES = (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS)
"""How a process with a bug ends, which no test asks a daemon for."""

Value = TypeVar("Value")


def eventually(condition: Callable[[], Value | None], what: str, limit_s: float = LIMIT_S) -> Value:
    """What the condition returns once it is true. Fails with `what` when that is not in time."""
    deadline_s = time.monotonic() + limit_s
    while True:
        asked_s = time.monotonic()
        if value := condition():
            return value
        assert asked_s < deadline_s, f"not in {limit_s} s: {what}"
        took_s = time.monotonic() - asked_s
        time.sleep(min(max(0.01, 2 * took_s), 2.0))  # what is waited for needs the processors more than the question


@dataclass(slots=True)
class Mark:
    """Marks processes through their environment, which their children inherit, whoever their parent is later."""

    value: str = field(default_factory=lambda: uuid.uuid4().hex)

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        inherited = {name: text for name, text in os.environ.items() if not name.startswith("ELCHE_")}
        of_tests = ("ELCHE_FOLDER", "ELCHE_CONFIG")  # see conftest.py
        inherited |= {name: os.environ[name] for name in of_tests if name in os.environ}
        return {**inherited, MARK: self.value, **(extra or {})}

    def living(self, containing: str = "") -> dict[int, str]:
        """The command lines of marked processes that run, by process id."""
        wanted = f"{MARK}={self.value}".encode()
        found = {}
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            try:
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue  # it ended while we looked
        return {pid: line for pid, line in found.items() if line and containing in line}

    def assert_none_left(self, containing: str = "", limit_s: float = LIMIT_S) -> None:
        try:
            eventually(lambda: not self.living(containing), "all processes end", limit_s)
        finally:
            for pid in (left := self.living(containing)):
                os.kill(pid, signal.SIGKILL)
            assert not left, f"left: {left}"


@dataclass(slots=True)
class Coordinator:
    """A coordinator process that ends with its standard input."""

    process: subprocess.Popen[str]
    address: str
    log: Path
    data: Path
    num_read: int = 0

    def new_errors(self) -> list[str]:
        """What it logged as errors, which are its bugs, since the last call."""
        text = self.log.read_text()[self.num_read :]
        self.num_read += len(text)
        return [line for line in text.splitlines() if " ERROR " in line or '"level": "error"' in line]

    @property
    def page_url(self) -> str:
        return eventually(lambda: PAGE.search(self.log.read_text()), "the page's address is logged").group(1)


@contextmanager
def coordinator(
    mark: Mark,
    folder: Path,
    *,
    data: Path | None = None,
    env: Mapping[str, str] | None = None,
    listen: str = "",
    module: str = "elche_coordinator",
) -> Iterator[Coordinator]:
    """A coordinator that listens. Leaving the context ends it and checks that it ends in order."""
    log, data = folder / "coordinator.log", data or folder / "data"
    arguments = ["--listen", listen or "127.0.0.1:0", "--http", "127.0.0.1:0", "--data", str(data)]
    with log.open("a") as log_file:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments, "--exit-with-stdin"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log_file,
            text=True,
            env=mark.environment(env),
        )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        found = LISTENING.fullmatch(process.stdout.readline().strip())
        assert found, log.read_text()
        yield Coordinator(process, found.group(1), log, data)
        if process.poll() is None:
            process.stdin.close()
            code = process.wait(400)  # a test may have killed it a moment ago
            assert code in (0, -signal.SIGKILL), log.read_text()
    finally:
        code = process.poll()
        process.kill()
        process.wait()
        process.stdout.close()
        process.stdin.close()
        assert code not in CRASHES, f"it crashed, with {code}: {log.read_text()}"


@dataclass(slots=True)
class Agent:
    """An agent process that ends with its standard input."""

    process: subprocess.Popen[str]
    log: Path


@contextmanager
def agent(
    mark: Mark,
    folder: Path,
    address: str,
    *more: str,
    devices: str = "cpu,cpu",
    env: Mapping[str, str] | None = None,
) -> Iterator[Agent]:
    """An agent that attends. Leaving the context ends it and checks that it ends in order."""
    log = folder / "agent.log"
    arguments = ["--coordinator", address, "--devices", devices, "--work-dir", str(folder / "work"), *more]
    with log.open("a") as log_file:
        process = subprocess.Popen(
            [sys.executable, "-m", "elche_worker.agent", *arguments, "--exit-with-stdin"],
            stdin=subprocess.PIPE,
            stderr=log_file,
            text=True,
            env=mark.environment(env),
        )
    assert process.stdin is not None
    try:
        eventually(lambda: ATTENDED.search(log.read_text()) or process.poll() is not None, "the agent attends")
        assert process.poll() is None, log.read_text()
        yield Agent(process, log)
        if process.poll() is None:
            process.stdin.close()
            code = process.wait(400)  # a test may have killed it a moment ago
            assert code in (0, -signal.SIGKILL), log.read_text()
    finally:
        code = process.poll()
        process.kill()
        process.wait()
        process.stdin.close()
        assert code not in CRASHES, f"it crashed, with {code}: {log.read_text()}"


@dataclass(frozen=True, slots=True)
class Command:
    """How a command ended, and what it said."""

    code: int
    out: str
    err: str

    @property
    def complaint(self) -> str:
        """The one line on stderr. Fails when there is more, or something on stdout."""
        lines = [line for line in self.err.splitlines() if line.strip()]
        assert len(lines) == 1, self.err
        assert "Traceback" not in self.err
        assert not self.out.strip(), self.out
        return lines[0]


def command(
    mark: Mark, module: str, *arguments: str, cwd: Path, env: Mapping[str, str] | None = None, limit_s: float = LIMIT_S
) -> Command:
    """Runs `python -m module arguments` to its end."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True,
        text=True,
        timeout=limit_s,
        cwd=cwd,
        env=mark.environment(env),
        stdin=subprocess.DEVNULL,
        check=False,
    )
    return Command(done.returncode, done.stdout, done.stderr)


@dataclass(frozen=True, slots=True)
class Cluster:
    """A coordinator, an agent with three slots, and a client of theirs."""

    coordinator: Coordinator
    agent: Agent
    client: Client
    mark: Mark

    @property
    def address(self) -> str:
        return self.coordinator.address
