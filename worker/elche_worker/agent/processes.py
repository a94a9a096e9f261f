"""Rank processes on this host: starts them with their secret, watches them and ends them.

A rank is one process, or all processes of a replica group, which start and end together. All are forked from the
spawner (`elche_worker.rank.spawner`), a process that has imported torch; it is started with the agent, and again after
it has died.
"""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elche.processors import THREADS, environment_of_ranks, threads_per_rank
from elche.token import FILE_VARIABLE, VARIABLE
from elche.v1 import agent_pb2
from elche_worker.agent.confinement import Confinement, host_pid
from elche_worker.process.anonymous_files import anonymous_file
from elche_worker.process.leaving import ASK, END
from elche_worker.process.rank_files import RankFiles
from elche_worker.process.stacks import ask

log = logging.getLogger(__name__)

LOG_TAIL_BYTES = 4096
"""Bytes of a log's end that go with the report of a rank's exit."""

NO_FORK_SUPPORT = {"GRPC_ENABLE_FORK_SUPPORT": "false"}
"""Disables gRPC's fork handlers, which crash data loader workers forked in a process with a torch process group. The
workers use no gRPC."""

LOOK_EVERY_S = 0.2
"""Seconds between looks at a process that should end."""
GONE_S = 10.0
"""Seconds for which killed processes are waited for."""

GO_ON_EVERY_S = 1.0
"""Seconds between two looks at whether the spawner is stopped."""
LATER = "--compiles-later"
"""Tells the spawner not to import PyTorch's compiler."""
CHECK = 0
"""Number of the process that checks a file; those of ranks begin at 1."""
Key = tuple[str, int, int]
"""(job id, rank, incarnation)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStart:
    """One process of a rank."""

    launch_line: str
    log_path: Path
    group_size: int = 1
    is_loop: bool = False
    """True for a script with a loop of its own, which cannot be asked to leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """The exit of a rank: that of the first of its processes to end."""

    code: int
    """Exit code, or the negative number of the signal that ended it."""
    log_tail: str = ""
    member: int = 0
    """The process's position in the rank's replica group."""
    log_path: str = ""
    """The process's log, if it is not the rank's main log."""
    was_stopped: bool = False
    """True if the process was stopped (SIGSTOP) when the agent tried to end it."""
    not_started: bool = False
    """True if it was not started, since this host can start none."""


@dataclass(slots=True)
class _Running:
    """The processes of one rank that have not ended."""

    logs: list[Path]
    """By position in the replica group."""
    spawner: "SpawnerProcess"
    living: dict[int, int] = field(default_factory=dict)
    """Number of each process that has not ended, and its position in the replica group."""
    first: Exit | None = None
    """Exit of the process that ended first: it is the cause, and the others are ended because of it."""
    was_stopped: bool = False
    """As in `Exit`."""
    is_loop: bool = False
    """As in `RankStart`."""


class Processes:
    """The rank processes of this host. `on_exit` is called on another thread for each rank that ends."""

    def __init__(
        self,
        on_exit: Callable[[Key, Exit], None],
        num_slots: int,
        confinement: Confinement | None = None,
        spawner: "SpawnerProcess | None" = None,
    ) -> None:
        """`num_slots` ranks share the processors; confined ones have a container and a spawner each."""
        self._on_exit = on_exit
        self._num_slots = num_slots
        self._confinement = confinement
        self.files = RankFiles(None if confinement is None else confinement.writable)
        """Opens files that ranks have written."""
        self._changed = threading.Condition(threading.RLock())
        """Lock of the fields below."""
        self._running: dict[Key, _Running] = {}
        """Ranks with a process that has not ended."""
        self._num_started = 0
        """Processes started so far. It numbers them, for the spawner: process ids are known only later, and reused."""
        self._spawner: SpawnerProcess | None = None
        """The spawner of all ranks, unless they are confined."""
        self._is_closed = False
        if spawner is not None:
            spawner.num_slots = num_slots
            with self._changed:  # it may have ended by now
                self._use(spawner)

    def warm_up(self) -> None:
        """Starts the spawner, so that it is ready when ranks are wanted."""
        with self._changed, suppress(OSError):  # an error is reported when ranks are wanted
            if self._confinement is None:
                self._need_spawner()

    def start(self, key: Key, starts: Sequence[RankStart]) -> None:
        """Starts a rank's processes, the leader first. Raises `OSError`, also after `close`."""
        for one in starts:
            self.files.make_folder(one.log_path.parent)
            self.files.append(one.log_path).close()
        with self._changed:
            if self._is_closed:
                raise OSError("the agent ends")
            spawner = self._need_spawner()
            with ExitStack() as stack:
                launches = [stack.enter_context(anonymous_file(one.launch_line)) for one in starts]
                running = self._running[key] = _Running(
                    [one.log_path for one in starts], spawner, is_loop=any(one.is_loop for one in starts)
                )
                for member, (one, launch) in enumerate(zip(starts, launches, strict=True)):
                    self._num_started += 1
                    running.living[self._num_started] = member
                    spawner.fork(self._num_started, one, launch.fileno())

    @property
    def num_running(self) -> int:
        """Number of ranks that run here."""
        with self._changed:
            return len(self._running)

    def wait_until_idle(self, limit_s: float) -> bool:
        """Waits until no rank runs here; returns False when the time is over first."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._running, timeout=limit_s)

    def has(self, job_id: str, rank: int) -> bool:
        """True if the rank runs here."""
        with self._changed:
            return any(key[:2] == (job_id, rank) for key in self._running)

    def stop(self, key: Key, grace_s: float, *, waits_while_stopped: bool = False) -> None:
        """Asks a rank's leader to end, and kills it after the grace time. The rank's other processes end with it.

        With `waits_while_stopped`, a rank that was stopped (SIGSTOP) is killed only after it continues; a hanging one
        first has its stacks written to its log.
        """
        try:
            threading.Thread(target=self._end, args=(key, grace_s, waits_while_stopped), daemon=True).start()
        except RuntimeError:  # no thread can be started, as when this very rank has taken all: it gets no grace
            self._signal_leader(key, signal.SIGKILL)

    def _end(self, key: Key, grace_s: float, waits_while_stopped: bool) -> None:
        """Carries out `stop`."""
        while waits_while_stopped and _state_of(self._leader_pid(key)) == "T":
            with self._changed:
                if (running := self._running.get(key)) is not None:
                    running.was_stopped = True
            time.sleep(LOOK_EVERY_S)
        if waits_while_stopped:
            self._log_stacks(key)
        if self._signal_leader(key, END):
            with self._changed:
                self._changed.wait_for(lambda: key not in self._running, timeout=grace_s)
            self._signal_leader(key, signal.SIGKILL)

    def _log_stacks(self, key: Key) -> None:
        with self._changed:
            running = self._running.get(key)
        if running is not None:
            text = f"elche: the rank is ended because it hangs; its threads:\n{self.stacks(key)}\n"
            with suppress(OSError), self.files.append(running.logs[0]) as file:
                file.write(text.encode(errors="replace"))

    def _leader_pid(self, key: Key) -> int | None:
        with self._changed:
            running = self._running.get(key)
            leader = next((one for one, member in running.living.items() if member == 0), None) if running else None
            return running.spawner.pids.get(leader) if running is not None and leader is not None else None

    def stacks(self, key: Key) -> str:
        """The stacks of the threads of a rank's leader, or the reason why they are not available."""
        with self._changed:
            running, pid = self._running.get(key), self._leader_pid(key)
        if running is None or pid is None:
            return "the process has ended"
        return ask(pid, running.logs[0], lambda number: self._signal_leader(key, number), self.files)

    def signal(self, job_id: str, rank: int, number: int) -> None:
        """Sends a signal to all processes of a rank, if it runs here."""
        with self._changed:
            for running in (one for key, one in self._running.items() if key[:2] == (job_id, rank)):
                for process in running.living:
                    running.spawner.signal(process, number)

    def ask_all(self) -> None:
        """Asks each rank's leader to leave, which it may do without a coordinator; not scripts with own loops."""
        with self._changed:
            for key, running in self._running.items():
                if not running.is_loop:
                    self._signal_leader(key, ASK)

    def kill_all(self) -> None:
        """Kills every process and waits until they have ended."""
        with self._changed:
            for running in self._running.values():
                self._kill(running)
            self._changed.wait_for(lambda: not self._running)

    def close(self) -> None:
        """Kills every process and the spawner. No rank can be started afterwards."""
        with self._changed:
            self._is_closed = True
            for spawner in {running.spawner for running in self._running.values()}:
                if not spawner.has_forked:  # no need to wait for it, and it may be importing torch
                    spawner.kill()
        self.kill_all()
        with self._changed:
            if self._spawner is not None:
                self._spawner.kill()

    def watch(self, is_over: threading.Event) -> None:
        """Until `is_over`, continues a spawner that was stopped (SIGSTOP): no rank could begin or end meanwhile."""
        while not is_over.wait(GO_ON_EVERY_S):
            with self._changed:
                spawner = self._spawner
            if spawner is not None:
                spawner.go_on()

    def _need_spawner(self) -> "SpawnerProcess":
        if self._spawner is not None:
            return self._spawner
        return self._use(SpawnerProcess(self._num_slots, self._confinement))

    def _use(self, spawner: "SpawnerProcess") -> "SpawnerProcess":
        try:
            threading.Thread(target=self._listen, args=(spawner,), name="spawner", daemon=True).start()
        except RuntimeError as error:  # nobody would hear of its ranks
            spawner.kill()
            raise OSError(str(error)) from None
        if self._confinement is None:
            self._spawner = spawner
        return spawner

    def _listen(self, spawner: "SpawnerProcess") -> None:
        """Reads the spawner's reports of processes that have begun or ended, on a thread. When the spawner ends, the
        kernel kills its ranks, which are reported as killed.
        """
        for report in spawner.read_reports():
            if "pid" in report:
                spawner.note(report["number"], report["pid"])
            else:
                spawner.pids.pop(report["number"], None)
                self._take_end(report["number"], report["code"], report["error"])
        # the reports end with the spawner
        code, pids = spawner.wait(), spawner.pids
        _end_sessions(list(pids.values()))
        with self._changed:
            self._spawner = None
            mine = [running for running in self._running.values() if running.spawner is spawner]
            lost = [number for running in mine for number in running.living]
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        what = f"the spawner, from which ranks are forked, has ended ({how})"
        if lost:
            log.warning("%s, and %d with it", what, len(lost))
        for number in lost:
            self._take_end(number, -signal.SIGKILL if number in pids else code or 1, what)

    def _take_end(self, number: int, code: int, error: str) -> None:
        """Handles the end of one process. The first one of a rank to end is the cause: the others are killed."""
        with self._changed:
            key, running = next((key, one) for key, one in self._running.items() if number in one.living)
            member = running.living.pop(number)
            if running.first is None:
                path = running.logs[member]
                other_path = str(path) if member else ""
                running.first = Exit(
                    code=code,
                    log_tail=error or _tail(path, self.files),
                    member=member,
                    log_path=other_path,
                    was_stopped=running.was_stopped,
                )
                self._kill(running)
            # the rank's exit is reported only when all of its processes have ended and its devices are free
            if running.living:
                return
            del self._running[key]
            if self._confinement is not None:
                running.spawner.kill()
            self._changed.notify_all()
        self._on_exit(key, running.first)

    def _signal_leader(self, key: Key, number: int) -> bool:
        """Sends a signal to a rank's leader; returns True if it was running."""
        with self._changed:
            running = self._running.get(key)
            leader = next((one for one, member in running.living.items() if member == 0), None) if running else None
            if running is None or leader is None:
                return False
            running.spawner.signal(leader, number)
            return True

    def _kill(self, running: _Running) -> None:
        """Kills a rank's processes. The spawner then kills the processes that user code has started in them."""
        for number in running.living:
            running.spawner.signal(number, signal.SIGKILL)


class SpawnerProcess:
    """The agent's handle of the spawner, the process from which ranks are forked."""

    def __init__(
        self,
        num_slots: int,
        confinement: Confinement | None = None,
        *,
        output: int | None = None,
        compiles_later: bool = False,
    ) -> None:
        """A spawner for `num_slots` ranks, which share the processors unless the environment sets OMP_NUM_THREADS. Its
        output goes to the file descriptor `output`, by default to this process's output. With `compiles_later` the
        ranks import PyTorch's compiler when they use it.
        """
        self.num_slots = num_slots
        self.pids: dict[int, int] = {}
        """Process ids as the host sees them, by number."""
        self.has_forked = False
        """True once a process has begun."""
        self._is_confined = confinement is not None
        # Without the cluster's token: user code must not see it, and a rank has its own secret.
        inherited = {name: text for name, text in os.environ.items() if name not in (VARIABLE, FILE_VARIABLE)}
        environment = {**NO_FORK_SUPPORT, **inherited, **environment_of_ranks(num_slots, os.environ)}
        before = confinement.command() if confinement is not None else []
        self._socket, other = socket.socketpair()
        how = [LATER] if compiles_later else []
        # Closed here, or this process would not see the spawner's end.
        with other:
            self._process = subprocess.Popen(
                [*before, sys.executable, "-u", "-P", "-m", "elche_worker.rank", *how, str(other.fileno())],
                stdin=subprocess.PIPE,  # closed when this process ends; ranks inherit it and then end too
                stdout=output,
                pass_fds=[other.fileno()],
                env=environment,
                # Otherwise Ctrl-C in the agent's terminal would end the spawner, and with it all ranks, whose work is
                # to be committed.
                start_new_session=True,
            )
        self._reports = self._socket.makefile("rb")

    def read_reports(self) -> Iterator[dict[str, Any]]:
        """The spawner's reports, until it ends."""
        with suppress(ConnectionResetError):
            for line in self._reports:
                yield json.loads(line)

    def check(self, request: str) -> tuple[int, str]:
        """Has a fork check a job's file, before any rank is forked; `request` is the argument of
        `elche_worker.rank.check.answer`. Returns the fork's exit code, negative for a signal, and its line of output.
        Without one, returns the reason why the fork was not started, or "".
        """
        with tempfile.TemporaryFile() as answers, anonymous_file(request) as asked:
            order = json.dumps({"number": CHECK, "check": True}).encode()
            with suppress(OSError):
                socket.send_fds(self._socket, [order + b"\n"], [asked.fileno(), answers.fileno()])
            for report in self.read_reports():
                if "code" in report:
                    answers.seek(0)
                    return report["code"], answers.read().decode().strip() or report["error"]
        return self.wait() or 1, ""

    def write_to(self, log: int) -> None:
        """Redirects its output to this file."""
        with suppress(OSError):
            socket.send_fds(self._socket, [json.dumps({"number": CHECK, "log": True}).encode() + b"\n"], [log])

    def note(self, number: int, pid: int) -> None:
        """Records a process that has begun, with its process id as the spawner sees it."""
        self.has_forked = True
        found = host_pid(self._process.pid, pid) if self._is_confined else pid
        if found is not None:
            self.pids[number] = found

    def wait(self) -> int:
        """Waits for its end; returns its exit code, negative for a signal."""
        return self._process.wait()

    def fork(self, number: int, start: RankStart, launch: int) -> None:
        """Forks a process. The launch line is passed as a file descriptor, so that the spawner never holds a secret."""
        request = {"number": number, "log_path": str(start.log_path), "group_size": start.group_size}
        if THREADS not in os.environ:
            request["num_threads"] = threads_per_rank(self.num_slots)
        with suppress(OSError):  # the spawner has died with its ranks, which `read_reports` reports
            socket.send_fds(self._socket, [json.dumps(request).encode() + b"\n"], [launch])

    def signal(self, number: int, value: int) -> None:
        """Sends a signal to a process, if it has not ended."""
        with suppress(OSError):  # the spawner has died with its ranks, which `read_reports` reports
            self._socket.sendall(json.dumps({"number": number, "signal": int(value)}).encode() + b"\n")

    def go_on(self) -> None:
        """Continues it if it is stopped."""
        if _state_of(self._process.pid) == "T":
            log.warning("the spawner, from which ranks are forked, was stopped (SIGSTOP): it goes on")
            self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kills it and waits for its end."""
        self._process.kill()
        self._process.wait()


def _end_sessions(pids: list[int]) -> None:
    """Kills processes whose parent has died, with those that they started, and waits for their end."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    deadline_s = time.monotonic() + GONE_S
    while not all(map(_is_gone, pids)) and time.monotonic() < deadline_s:
        time.sleep(0.01)


def _is_gone(pid: int) -> bool:
    """True if a process has ended; a zombie counts as ended."""
    return _state_of(pid) in ("Z", "X", None)


def _state_of(pid: int | None) -> str | None:
    """The letter of a process's state, such as T for stopped; None without such a process, or without /proc."""
    try:
        # From the last parenthesis on: the program's name, in parentheses, may have some itself, and spaces.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None


def rank_exited(key: Key, ended: Exit) -> agent_pb2.AttendRequest:
    """The message that reports a rank's end."""
    job_id, rank, incarnation = key
    exited = agent_pb2.RankExited(
        job_id=job_id,
        rank=rank,
        incarnation=incarnation,
        exit_code=ended.code,
        log_tail=ended.log_tail,
        group_position=ended.member,
        log_path=ended.log_path,
        was_stopped=ended.was_stopped,
        not_started=ended.not_started,
    )
    return agent_pb2.AttendRequest(rank_exited=exited)


def _tail(path: Path, files: RankFiles) -> str:
    """The end of a log; "" if the file has been removed."""
    try:
        with files.read(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LOG_TAIL_BYTES))
            return file.read(LOG_TAIL_BYTES).decode(errors="replace").strip()
    except OSError:
        return ""
