"""The process that an agent's ranks are forked from: it has imported torch, which takes most of a rank's start.

The agent's requests and what is told of the ranks are lines of JSON on a socket. The spawner has no thread, opens no
channel and never asks torch for a device, so that what it forks begins as a fresh process would. When it ends, the
kernel ends its ranks; it ends when the agent does.
"""

import gc
import json
import os
import selectors
import signal
import socket
import sys
import traceback
from contextlib import suppress
from importlib import import_module
from typing import Any, NoReturn

from setproctitle import setproctitle

from elche_worker.parent import end_with_parent
from elche_worker.rank.launch import Launch

CHUNK_BYTES = 1 << 20
FOR_ALL = ("elche_worker.rank.main", "torch._dynamo")
"""What every rank imports: the first optimizer imports the latter, half as much as torch itself."""
FOR_GROUPS = ("elche_worker.rank.pieces", "elche_worker.sharding", "elche_worker.trainer.world")
"""What the processes of replica groups import besides; imported when the first group is wanted."""


class Spawner:
    """Serves one agent until it is gone."""

    def __init__(self, agent: socket.socket) -> None:
        self._agent = agent
        self._running: dict[int, int] = {}
        """Process id to the number that the agent knows the process by. What is in it has not been waited for, so
        that a signal reaches no other process.
        """
        self._wakeup, self._wake = os.pipe()
        os.set_blocking(self._wake, False)

    def serve(self) -> None:
        """Returns when the agent is gone."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        rest = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._agent, selectors.EVENT_READ)
            selector.register(self._wakeup, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._agent:
                        data = self._agent.recv(CHUNK_BYTES)
                        if not data:
                            return
                        *lines, rest = (rest + data).split(b"\n")
                        for line in lines:
                            self._do(json.loads(line))
                    else:
                        os.read(self._wakeup, 4096)
                        self._reap()

    def _do(self, request: dict[str, Any]) -> None:
        number = request["number"]
        if "signal" in request:
            for pid in [pid for pid, known in self._running.items() if known == number]:
                os.kill(pid, request["signal"])
            return
        launch, parent = Launch.from_line(request["launch_line"]), os.getpid()
        if launch.group_size > 1:
            _import(*FOR_GROUPS)
        try:
            pid = os.fork()
        except OSError as error:
            self._tell(number, 1, f"the rank cannot be started: {error}")
            return
        if pid == 0:
            self._become(launch, request["log_path"], parent)
        self._running[pid] = number

    def _reap(self) -> None:
        """Tells of processes that have ended, and ends what user code has left in their sessions."""
        for pid in list(self._running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
                self._tell(self._running.pop(pid), os.waitstatus_to_exitcode(status))

    def _tell(self, number: int, code: int, error: str = "") -> None:
        with suppress(OSError):  # the agent is gone: that is seen next
            self._agent.sendall(json.dumps({"number": number, "code": code, "error": error}).encode() + b"\n")

    def _become(self, launch: Launch, log_path: str, parent: int) -> NoReturn:
        """The forked process becomes a rank, or one of a rank's processes."""
        try:
            end_with_parent(parent)
            os.setsid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._agent.close()
            os.close(self._wakeup)
            os.close(self._wake)
            log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
            setproctitle(f"elche rank {launch.rank} of {launch.job_id}")
            from elche_worker.rank.main import main

            main(launch)
        except SystemExit as error:
            os._exit(error.code if isinstance(error.code, int) else 1)
        except BaseException:
            traceback.print_exc()
        os._exit(1)


def _import(*modules: str) -> None:
    """What cannot be imported here is imported again by the rank, which says so in its log. So is everything where the
    system's own libraries do not bear a fork.
    """
    if not sys.platform.startswith("linux"):
        return
    with suppress(Exception):
        for module in modules:
            import_module(module)


def serve(agent_fd: int) -> None:
    """Imports what ranks need, and serves the agent at the other end of the socket."""
    _import(*FOR_ALL)
    gc.collect()
    gc.freeze()  # what is not collected is not written to, and stays shared with the ranks
    os.environ["SPT_NOENV"] = "1"  # or titles are written over what /proc shows of the environment
    setproctitle("elche spawner")
    del os.environ["SPT_NOENV"]
    Spawner(socket.socket(fileno=agent_fd)).serve()
