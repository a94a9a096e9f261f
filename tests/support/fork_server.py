"""Processes of tests, forked from one that has imported what they need: imports take most of a short process's time.

`install()` replaces `subprocess.Popen` in this process and, through it, in those that it starts. A command such as
`python -m elche_coordinator ...` is then not executed: the fork server forks, and the new process takes on the
environment, folder, arguments, open files and session that it would have had, and runs the module. It is a process as
any other: /proc shows its own command line and environment, signals and exit codes are its own. Whatever else starts
is executed as always, and so is all with `TEST_EXECUTES=1` in the environment.

There are two servers: one without torch, of which coordinators, agents and commands are forked, and one with torch, for
what trains. They are started when one is first needed, or before the workers of xdist, and end with the tests.

A rank of a submitted script with its own loop replaces itself by a new Python. It has been forked of one with torch,
and goes on in that instead, without what would have been closed or reset.

A forked process ends as Python does: threads are waited for, exit handlers run, and its own modules and elche's are
destroyed with what they hold. What the server had imported else is left as it is: to destroy torch's modules and
libraries takes 0.4 s of processor, most of what a short script takes, and says nothing of elche.
"""

import atexit
import ctypes
import gc
import inspect
import io
import json
import os
import resource
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

ADDRESSES = "TEST_FORK_SERVERS"
"""Folder in which the servers listen."""
ROOT = "TEST_FORKS_FOR"
"""The process with which the servers end: it starts them."""
EXECUTES = "TEST_EXECUTES"
ROOM = "TEST_ROOM"
"""Makes room where the kernel keeps the first environment, for that of a forked process."""
ROOM_BYTES = 1 << 16
TITLE_BYTES = 1 << 13
LENGTH_BYTES = 8
TESTS = str(Path(__file__).parents[1])
"""Where `support` is; also in `PYTHONPATH` of what imports from it, and the servers have it."""
START_S = 60.0
"""For a server to import what it has: a bound for one that never will."""
HIGH_DESCRIPTOR = 600
"""Received files are moved beyond those that a process has."""

PLAIN, TORCH = "plain", "torch"
IMPORTS = {
    PLAIN: (
        *("elche_coordinator.daemon", "elche_coordinator.main", "elche_client.cli.main", "elche_client.local.job_run"),
        *(
            "elche_client.commands.doctor",
            "elche_client.commands.top",
            "elche_client.commands.journal",
            "elche_client.commands.sweep_run",
        ),
        *("elche_worker.agent.main", "elche_worker.agent.agent", "grpc._channel"),
    ),
    TORCH: (
        *(
            "elche_worker.rank.main",
            "elche_worker.run.job",
            "elche_worker.rank.check",
            "torch._dynamo",
            "grpc._channel",
        ),
        *("sklearn.datasets", "sklearn.model_selection"),  # of examples: each rank, and each check of a file
    ),
}
SERVER_OF = {
    "elche_coordinator": PLAIN,
    "elche_coordinator.for_run": PLAIN,
    "elche_coordinator.planning": PLAIN,
    "elche_client": PLAIN,
    "elche_worker.agent": PLAIN,
    "elche_worker.agent.for_run": PLAIN,
    "elche_worker.device.build": TORCH,
    "elche_worker.device.discovery": TORCH,
    "elche_worker.rank": TORCH,
    "elche_worker.rank.check": TORCH,
    "elche_worker.replaying": TORCH,
    "elche_worker.trainer": TORCH,
    "support.dying_coordinator": PLAIN,
    "torch.distributed.run": TORCH,
}
"""By module that is run: its server."""
END_WITH_PARENT = ("elche_worker.agent.for_run", "elche_worker.rank.check", "elche_worker.trainer")
"""Are killed by the kernel when their parent ends; here the parent is the server, which sees to it."""
REPLACES_ITSELF, REPLACEMENT = "elche_worker.rank", ["-u", "-P", "-m", "elche_worker.rank.script"]
"""What executes Python in its own place, and with which arguments."""
UNBUFFERED = "PYTHONUNBUFFERED"
DESTROYED = ("__main__", "builtins", "sys", "elche", "grpc", "support", "torch.distributed")
"""Begin the names of modules that are destroyed at the end of a process, whoever has imported them."""
OF_TORCHRUN = ("TORCHELASTIC_", "TORCH_NCCL_")
"""What `torchrun` tells its processes, which is read later."""
READ_AT_IMPORT = ("PYTHON", "LD_", "MALLOC", "TORCH", "MKL", "KMP", "OPENBLAS", "GRPC", "LC_", "LANG")
"""Variables that count when Python starts or a library is imported: who has others than the server is executed."""
OWN = {
    PLAIN: {"GRPC_VERBOSITY": "NONE"},  # which programs set before they import gRPC
    TORCH: {  # as an agent starts its spawner
        "GRPC_ENABLE_FORK_SUPPORT": "false",
        "GOMP_SPINCOUNT": "1000",
        "PYTHONHASHSEED": "0",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    },
}

Popen = subprocess.Popen


def folder_of_servers() -> Path | None:
    """Where the servers listen; None where nothing is forked."""
    folder = os.environ.get(ADDRESSES)
    return Path(folder) if folder and os.environ.get(EXECUTES) != "1" else None


def install() -> None:
    """From now on this process forks what it starts, where it can. A worker of xdist has the servers of its parent."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        os.environ[ADDRESSES] = tempfile.mkdtemp(prefix="fork-")
        os.environ[ROOT] = str(os.getpid())
        atexit.register(_remove, os.environ[ADDRESSES], os.getpid())
    subprocess.Popen = ForkedPopen  # type: ignore[misc]


def start() -> None:
    """Starts the servers, unless it has been done or is another process's affair."""
    folder = folder_of_servers()
    if folder is not None and os.environ[ROOT] == str(os.getpid()) and not _started:
        _started.extend(_start(one, folder / one) for one in IMPORTS)


def _remove(folder: str, pid: int) -> None:
    if os.getpid() == pid:  # and not in a process that has been forked from it
        shutil.rmtree(folder, ignore_errors=True)


class ForkedPopen(Popen):  # type: ignore[type-arg]
    """As `subprocess.Popen`, but forks from a server what that can run."""

    _server: socket.socket | None = None
    """Tells when the process has ended, with its status."""

    def _execute_child(self, *given: Any) -> None:
        how = inspect.signature(super()._execute_child).bind(*given).arguments  # type: ignore[misc]
        request = _request(how)
        if request is None:
            super()._execute_child(*given)  # type: ignore[misc]
            return
        kind, order = request
        streams = [how[name] if how[name] != -1 else number for number, name in enumerate(("p2cread", "c2pwrite"))]
        streams.append(how["errwrite"] if how["errwrite"] != -1 else 2)
        self._server = _connect(kind)
        _send(self._server, order, [*streams, *how["pass_fds"]])
        self.pid = int.from_bytes(_receive(self._server, LENGTH_BYTES), "big")
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(how[name] for name in pipes))  # type: ignore[attr-defined]

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._server is None:
            found: tuple[int, int] = super()._try_wait(wait_flags)  # type: ignore[misc]
            return found
        self._server.setblocking(not wait_flags & os.WNOHANG)
        try:
            answer = self._server.recv(LENGTH_BYTES, socket.MSG_WAITALL)
        except BlockingIOError:
            return 0, 0
        self._server.close()
        return self.pid, int.from_bytes(answer, "big") if answer else signal.SIGKILL

    def _internal_poll(self, _deadstate: int | None = None, **more: Any) -> int | None:
        if self._server is None:
            found: int | None = super()._internal_poll(_deadstate, **more)  # type: ignore[misc]
            return found
        if self.returncode is None and self._waitpid_lock.acquire(False):  # type: ignore[attr-defined]
            try:
                pid, status = self._try_wait(os.WNOHANG) if self.returncode is None else (0, 0)
                if pid:
                    self._handle_exitstatus(status)  # type: ignore[attr-defined]
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]
        return self.returncode


def _request(how: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """The server that can run the command, and the order; None when it is to be executed."""
    if folder_of_servers() is None or how["shell"] or how["preexec_fn"] or how["executable"] or how["uid"] is not None:
        return None
    words = how["args"]
    if isinstance(words, str | bytes | os.PathLike) or not words or words[0] != sys.executable:
        return None
    words = list(map(os.fspath, words))
    flags, rest = list[str](), words[1:]
    while rest and rest[0] in ("-u", "-P", "-W"):
        num_words = 2 if rest[0] == "-W" else 1
        flags, rest = flags + rest[:num_words], rest[num_words:]
    environment = dict(how["env"]) if how["env"] is not None else dict(os.environ)
    if rest[:1] == ["-m"] and rest[1] in SERVER_OF:
        kind = SERVER_OF[rest[1]]
    elif rest and rest[0].endswith(".py"):
        kind = TORCH
    else:
        return None
    if environment.get(EXECUTES) == "1" or _early(environment, kind) != _early(os.environ, kind):
        return None
    order = {
        "words": words,
        "flags": flags,
        "rest": rest,
        "environment": environment,
        "folder": os.fspath(how["cwd"] or os.getcwd()),
        "pass_fds": list(how["pass_fds"]),
        "new_session": bool(how["start_new_session"]),
        "umask": _umask(),
        "limits": [[number, *resource.getrlimit(number)] for number in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE)],
    }
    return kind, order


def _early(environment: Mapping[str, str], kind: str) -> dict[str, str]:
    found = {
        name: text
        for name, text in environment.items()
        if name.startswith(READ_AT_IMPORT) and not name.startswith((*OF_TORCHRUN, UNBUFFERED)) and text != TESTS
    }
    if _begins_with(environment):
        del found["PYTHONPATH"]
    return found | OWN[kind]


def _begins_with(environment: Mapping[str, str]) -> Path | None:
    """What Python runs first because of the environment, which a forked process runs as well."""
    path = Path(environment.get("PYTHONPATH", ""), "sitecustomize.py")
    return path if path.is_absolute() and path.exists() else None


def _umask() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("\nUmask:")[2].split()[0], 8)


def _connect(kind: str) -> socket.socket:
    """A connection to the server, once it listens."""
    folder = folder_of_servers()
    assert folder is not None
    start()
    deadline_s = time.monotonic() + START_S
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(folder / kind))
            return connection
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            assert time.monotonic() < deadline_s, f"the fork server with {kind} does not listen"
            time.sleep(0.01)


def _start(kind: str, address: Path) -> Any:
    """Starts a server, which ends when its standard input closes, with this process."""
    environment = {name: text for name, text in os.environ.items() if not name.startswith(("ELCHE_", "OMP_"))}
    environment |= {ROOM: "x" * ROOM_BYTES, **OWN[kind], "SPT_NOENV": "1"}
    code = f"import sys; sys.path.append({TESTS!r}); from support.fork_server import main; main()"
    words = [sys.executable, "-P", "-c", code, kind, str(address), "x" * TITLE_BYTES]
    return Popen(words, stdin=subprocess.PIPE, env=environment, start_new_session=True)


_started: list[Any] = []
"""The servers that this process has started."""


def _send(connection: socket.socket, order: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    data = json.dumps(order).encode()
    socket.send_fds(connection, [len(data).to_bytes(LENGTH_BYTES, "big")], list(descriptors))
    connection.sendall(data)


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    data = connection.recv(num_bytes, socket.MSG_WAITALL)
    if len(data) < num_bytes:
        raise ConnectionError("the fork server has ended")
    return data


def import_all() -> None:
    """Imports what both servers have, which compiles it where that was not done."""
    for modules in IMPORTS.values():
        for module in modules:
            import_module(module)


# In the server


def main() -> None:
    """Serves until standard input closes. In a forked process it returns when the module has ended."""
    kind, address, _ = sys.argv[1:]
    subprocess.Popen = ForkedPopen  # type: ignore[misc]
    from setproctitle import setproctitle

    setproctitle(f"fork server with {kind}")  # finds its room while everything is in its place
    del os.environ["SPT_NOENV"], os.environ[ROOM]
    atexit.register(_keep_imported)  # before others do: the last to be called
    for module in IMPORTS[kind]:
        import_module(module)
    for one in weakref.finalize._registry:  # type: ignore[attr-defined]
        one.atexit = False  # torch's, which take its libraries apart, and SQLAlchemy's
    gc.collect()
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(128)
    order = _serve(listener)
    if order is not None:
        _run_and_end_soon(order)


def _serve(listener: socket.socket) -> dict[str, Any] | None:
    """Returns the order in a forked process, and None when the server is to end."""
    wakeup, wake = os.pipe()
    for end in (wakeup, wake):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    selector = selectors.DefaultSelector()
    for one in (listener, 0, wakeup):
        selector.register(one, selectors.EVENT_READ)
    running: dict[int, socket.socket] = {}
    while True:
        for key, _ in selector.select():
            if key.fileobj == 0:
                return None
            if key.fileobj == wakeup:
                os.read(wakeup, 4096)
                for connection in _reap(running):
                    if connection in selector.get_map():
                        selector.unregister(connection)
                    connection.close()
                continue
            if key.data is not None:  # who has asked for the process has ended
                selector.unregister(key.fileobj)
                if key.data in running:
                    os.kill(key.data, signal.SIGKILL)
                continue
            connection, _ = listener.accept()
            length, descriptors, _, _ = socket.recv_fds(connection, LENGTH_BYTES, 64)
            data = _receive(connection, int.from_bytes(length, "big"))
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                for one in (selector, listener, connection, *running.values()):
                    one.close()
                for end in (wakeup, wake):
                    os.close(end)
                order: dict[str, Any] = json.loads(data)
                _take_on(order, descriptors)
                return order
            for descriptor in descriptors:
                os.close(descriptor)
            running[pid] = connection
            if any(f'"-m", "{module}"'.encode() in data for module in END_WITH_PARENT):
                selector.register(connection, selectors.EVENT_READ, pid)
            with suppress(OSError):
                connection.sendall(pid.to_bytes(LENGTH_BYTES, "big"))


def _reap(running: dict[int, socket.socket]) -> Iterator[socket.socket]:
    """Tells of processes that have ended; the connections of which nothing more comes."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            connection = running.pop(ended[0])
            with suppress(OSError):
                connection.sendall(ended[1].to_bytes(LENGTH_BYTES, "big"))
            yield connection


# In a forked process


def _take_on(order: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    """Makes the process what it would be if it had been executed."""
    import fcntl

    wanted = [0, 1, 2, *order["pass_fds"]]
    moved = [fcntl.fcntl(one, fcntl.F_DUPFD, HIGH_DESCRIPTOR) for one in descriptors]
    for one in descriptors:
        os.close(one)
    for one, number in zip(moved, wanted, strict=True):
        os.dup2(one, number)
        os.close(one)
    if order["new_session"]:
        os.setsid()
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    os.chdir(order["folder"])
    os.umask(order["umask"])
    for number, soft, hard in order["limits"]:
        resource.setrlimit(number, (soft, hard))
    os.environ.clear()
    os.environ.update(order["environment"])
    _show_environment(order["environment"])


def _show_environment(environment: Mapping[str, str]) -> None:
    """Has /proc show this environment, in the place of the server's."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    text = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())
    assert len(text) <= end - start, "no room for the environment"
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


class _End:
    """Ends the process when Python destroys it with `sys`, after all modules: it names nothing that they have."""

    def __init__(self, code: int) -> None:
        self.code, self.end, self.flush = code & 0xFF, os._exit, ctypes.CDLL(None).fflush
        self.files = sys.stdout, sys.stderr

    def __del__(self) -> None:
        try:
            for file in self.files:
                if file and not file.closed:
                    file.flush()
            self.flush(None)
        except BaseException:
            self.code = 120  # as Python's own
        finally:
            self.end(self.code)


_imported: list[str] = []
"""By the server, in a process that has been forked of it."""


def _run_and_end_soon(order: Mapping[str, Any]) -> None:
    """Runs the module, and has Python leave alone at its end what the server had imported."""
    _imported.extend(name for name in sys.modules if not name.startswith(DESTROYED))
    code = 1
    try:
        _run(order)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        raise
    except KeyboardInterrupt:
        _imported.clear()  # Python ends itself by the signal
        raise
    finally:
        if _imported:
            sys.end = _End(code)  # type: ignore[attr-defined]


class _StandIn:
    """Of a module, for what still imports it; Python destroys only what is a module."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _keep_imported() -> None:
    """Hides the server's modules from Python, which destroys those that it finds; they stay alive."""
    modules = {name: module for name in _imported if inspect.ismodule(module := sys.modules.get(name))}
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(modules))
    sys.modules.update((name, _StandIn(module)) for name, module in modules.items())  # type: ignore[misc]


def _run(order: Mapping[str, Any]) -> None:
    from setproctitle import setproctitle

    setproctitle(" ".join(order["words"])[: TITLE_BYTES - 1])
    is_unbuffered = "-u" in order["flags"] or bool(order["environment"].get(UNBUFFERED))
    for name in ("stdout", "stderr"):
        if isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            is_prompt = name == "stderr" or os.isatty(stream.fileno())
            anew = io.TextIOWrapper(  # the server's knows whether the server could seek in it
                open(stream.fileno(), "wb", 0 if is_unbuffered else -1, closefd=False),  # noqa: SIM115
                encoding=stream.encoding,
                errors=stream.errors,
                line_buffering=is_prompt,
                write_through=is_unbuffered,
            )
            setattr(sys, name, anew)
    sys.orig_argv = list(order["words"])
    filters = [text for flag, text in pairwise(order["flags"]) if flag == "-W"]
    sys.warnoptions.extend(filters)
    warnings._processoptions(filters)  # type: ignore[attr-defined]
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules and (num_threads := order["environment"].get("OMP_NUM_THREADS")):
        sys.modules["torch"].set_num_threads(int(num_threads))
    if first := _begins_with(order["environment"]):
        sys.path.insert(0, str(first.parent))
        runpy.run_path(str(first), run_name="sitecustomize")
    rest = order["rest"]
    if rest[0] == "-m":
        sys.argv = ["-m", *rest[2:]]
        if rest[1] in END_WITH_PARENT:
            import_module("elche_worker.process.parent").end_with_parent = lambda _: None
        if "-P" not in order["flags"]:
            sys.path.insert(0, order["folder"])
        if rest[1] == REPLACES_ITSELF:
            os.execv = _go_on_instead(os.execv)
        import_module("support.gpus").take_part(rest[1])
        if not hasattr(sys.modules.get(rest[1]), "__path__"):
            sys.modules.pop(rest[1], None)  # it is run, and is not an import of the server any more
        runpy.run_module(rest[1], run_name="__main__", alter_sys=True)
    else:
        import_module("support.gpus").take_part(rest[0])
        sys.argv = list(rest)
        sys.path.insert(0, str(Path(rest[0]).resolve().parent))
        runpy.run_path(rest[0], run_name="__main__")


def _go_on_instead(execv: Any) -> Any:
    """What stands for `os.execv` in a process that would start Python anew: all is as a new one would find it."""

    def go_on(path: str, words: Sequence[str]) -> NoReturn:
        if list(words[1:5]) != REPLACEMENT or os.environ.get(EXECUTES) == "1":
            execv(path, words)
        gc.freeze()  # what is closed here is not closed again later, when its number may be another file's
        for number in map(int, os.listdir("/proc/self/fd")):
            with suppress(OSError):  # that of the list itself
                if not os.get_inheritable(number):
                    os.close(number)
        for one in signal.valid_signals():
            if callable(signal.getsignal(one)) and signal.getsignal(one) is not signal.default_int_handler:
                signal.signal(one, signal.SIG_DFL)
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        environment = dict(os.environ)
        _show_environment(environment)
        atexit.register(_keep_imported)  # again: a rank has forgotten the handlers of whom it was forked of
        code = 1
        try:
            _run({"words": list(words), "flags": words[1:3], "rest": words[3:], "environment": environment})
            code = 0
        except SystemExit as error:
            if isinstance(error.code, int | None):
                code = error.code or 0
            else:
                print(error.code, file=sys.stderr)
        except BaseException as error:  # as Python itself does at the end of `__main__`
            sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
            sys.excepthook(type(error), error, error.__traceback__)
            if isinstance(error, KeyboardInterrupt):
                code = 128 + signal.SIGINT
        sys.end = _End(code)  # type: ignore[attr-defined]
        ctypes.pythonapi.Py_Exit(code)
        raise AssertionError("unreachable")

    return go_on
