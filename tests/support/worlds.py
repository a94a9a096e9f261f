"""Worlds of real processes with gloo between them, kept from test to test: starting PyTorch takes seconds, they do not.

`world(n)(function, *arguments)` calls a function of the test's module in n processes of one default process group, and
returns what each returned. Functions travel as (file, name), arguments and results by pickle over a pipe of our own.
"""

import atexit
import faulthandler
import gc
import importlib.util
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIMIT_S = float(os.environ.get("WORLD_LIMIT_S", "400"))
START_LIMIT_S = 300.0
"""For a process to import PyTorch: of a busy machine's time that takes more than what a test may need then."""
STARTED = "started"
"""A process's first answer."""
MANY_THREADS = 40
"""Those of process groups that tests have left wake a hundred times a second: the process ends, and another follows."""

UNDO: list[Callable[[], Any]] = []
"""What a rank calls after the test's function: processes of a later world have not all gone through the same tests."""


class RankFailed(AssertionError):
    """A rank raised what the test did not expect."""


@dataclass(frozen=True, slots=True)
class Raised:
    """What a rank raised, in words."""

    kind: str
    message: str
    traceback: str = ""


class Process:
    """One process that runs functions of tests, one after the other."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        environment = {name: text for name, text in os.environ.items() if not name.startswith("ELCHE_")}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "world_process.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**environment, "OMP_NUM_THREADS": "1"},
        )
        self._answers: queue.Queue[Any] = queue.Queue()
        self._has_started = False
        threading.Thread(target=self._read, args=(self._process, self._answers), daemon=True).start()

    @staticmethod
    def _read(process: "subprocess.Popen[bytes]", answers: "queue.Queue[Any]") -> None:
        assert process.stdout is not None
        try:
            while True:
                answers.put(pickle.load(process.stdout))
        except (EOFError, pickle.UnpicklingError):
            answers.put(Raised("Ended", f"the process ended with {process.wait()}"))

    def wait_until_started(self) -> None:
        if not self._has_started:
            assert self.answer(START_LIMIT_S) == STARTED
            self._has_started = True

    def ask(self, request: Any) -> None:
        assert self._process.stdin is not None
        pickle.dump(request, self._process.stdin)
        self._process.stdin.flush()

    def answer(self, limit_s: float) -> Any:
        try:
            return self._answers.get(timeout=limit_s)
        except queue.Empty:
            return Raised("Hung", f"no answer in {limit_s} s")

    @property
    def num_threads(self) -> int:
        return len(os.listdir(f"/proc/{self._process.pid}/task"))

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()


class Worlds:
    """Processes for all tests of a session; a world takes the first n of them, so that each has one rank all its life:
    torch keeps what it found of a mesh, with the process's own place in it, and takes it for that of any equal mesh.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[Process | None] = []
        """By rank; None where one was left out."""
        self._num_worlds = 0

    def run(
        self,
        size: int,
        function: Callable[..., Any],
        *arguments: Any,
        environment: dict[str, str] | None = None,
        may_raise: bool = False,
        limit_s: float = LIMIT_S,
    ) -> list[Any]:
        """What each rank returned; with `may_raise` also a `Raised` of those that raised. Fails if one hangs."""
        self._processes += [None] * (size - len(self._processes))
        self._num_worlds += 1
        store = self._folder / f"store{self._num_worlds}"
        source = Path(function.__code__.co_filename)
        chosen = [one or Process() for one in self._processes[:size]]
        self._processes[:size] = chosen
        for process in chosen:
            process.wait_until_started()
        for rank, process in enumerate(chosen):
            process.ask((source, function.__name__, arguments, environment or {}, rank, size, store))
        answers = [process.answer(limit_s) for process in chosen]
        raised = {rank: answer for rank, answer in enumerate(answers) if isinstance(answer, Raised)}
        lost = [rank for rank, answer in raised.items() if answer.kind in ("Hung", "Ended")]
        if lost or 0 < len(raised) < size:  # collectives may be left half done: the next world begins anew
            self._leave_out(chosen)
        else:
            self._leave_out([process for process in chosen if process.num_threads > MANY_THREADS])
        if raised and (not may_raise or any(answer.kind == "Hung" for answer in raised.values())):
            text = "\n".join(f"rank {rank}: {one.kind}: {one.message}\n{one.traceback}" for rank, one in raised.items())
            raise RankFailed(text)
        return answers

    def _leave_out(self, processes: Sequence[Process]) -> None:
        for process in processes:
            process.kill()
        self._processes = [None if one in processes else one for one in self._processes]

    def close(self) -> None:
        self._leave_out([one for one in self._processes if one is not None])


def serve() -> None:
    """Runs what is asked on standard input, and answers on what was standard output."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    left_open = _open_until_exit()
    pickle.dump(STARTED, answers)
    answers.flush()
    while True:
        try:
            source, name, arguments, environment, rank, size, store = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        faulthandler.dump_traceback_later(LIMIT_S * 0.8)  # says where it hangs
        kept = dict(os.environ)
        os.environ.update(environment)
        try:
            if size > 1:
                dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
                dist.barrier()  # who leaves while another still connects is missed by that one
            torch.manual_seed(0)
            answer = getattr(_module(source), name)(*arguments)
        except BaseException as error:
            answer = Raised(type(error).__name__, str(error), traceback.format_exc())
        while left_open:
            with suppress(Exception):
                left_open.pop().close(RuntimeError("the test is over"))
        if dist.is_initialized():
            dist.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()
        while UNDO:
            UNDO.pop()()
        gc.collect()  # else a forked worker of a data loader may collect a process group, and dies of it
        os.environ.clear()
        os.environ.update(kept)
        pickle.dump(answer, answers)
        answers.flush()


def _open_until_exit() -> list[Any]:
    """A list of objects whose methods are to be called at the process's end, such as loops that a test has not closed.
    Their process groups' threads look a hundred times a second for what comes: two hundred of them filled a processor.
    """
    left_open: list[Any] = []
    register = atexit.register

    def noting(call: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
        if hasattr(getattr(call, "__self__", None), "close"):
            left_open.append(call.__self__)  # type: ignore[attr-defined]
        return register(call, *arguments, **more)

    atexit.register = noting  # type: ignore[assignment]
    return left_open


def _module(source: Path) -> Any:
    name = f"elche_test_{source.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, source)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]
