"""SIGTERM to a rank, and its agent's own signal: told twice by two of them, it still ends in its own time."""

import os
import signal
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest

from elche.v1 import rank_pb2
from elche_worker.agent.processes import Processes, RankStart
from elche_worker.process.leaving import ASK
from elche_worker.rank import main
from elche_worker.session.control import Control

RANK = """
import os, signal, sys, threading
from elche_worker.process.leaving import ASK, leave_on_sigterm

asked = threading.Event()
leave_on_sigterm(asked.set)
for number in map(int, sys.argv[1:]):
    os.kill(os.getpid(), number)
assert asked.wait(400)
print("asked", flush=True)
"""


def run(*signals: int) -> subprocess.CompletedProcess[str]:
    """A process that sends itself these signals."""
    command = [sys.executable, "-c", RANK, *(str(int(one)) for one in signals)]
    return subprocess.run(command, check=False, capture_output=True, text=True)


@pytest.mark.parametrize(
    "told", [[ASK], [signal.SIGTERM], [signal.SIGTERM, ASK], [ASK, ASK], [signal.SIGTERM, signal.SIGHUP]]
)
def test_a_rank_that_is_leaving_is_not_ended_by_its_agent(told: list[int]) -> None:
    """A host that shuts down sends SIGTERM to all processes, and the agent tells its ranks after that."""
    done = run(*told)
    assert (done.returncode, done.stdout) == (0, "asked\n"), done.stderr


def test_a_second_sigterm_ends_a_rank() -> None:
    assert run(signal.SIGTERM, signal.SIGTERM).returncode == -signal.SIGTERM


TAKEN = """
import os, signal, sys, threading
from elche_worker.process.leaving import leave_on_sigterm

asked = threading.Event()
take_back = leave_on_sigterm(asked.set)
assert not take_back()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))  # as scripts for Slurm have it
assert take_back()
os.kill(os.getpid(), signal.SIGTERM)
assert asked.wait(400)
assert not take_back()
print("asked", flush=True)
"""


def test_a_handler_of_user_code_does_not_end_a_rank() -> None:
    """Its exit would be an error of the job, where the host is only to be left."""
    done = subprocess.run([sys.executable, "-c", TAKEN], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "asked\n"), done.stderr


def test_scripts_with_a_loop_of_their_own_are_not_asked(tmp_path: Path) -> None:
    """They know nothing of the agent's signal, which would end them."""
    sent: list[tuple[int, int]] = []
    spawner = types.SimpleNamespace(
        num_slots=0,
        fork=lambda number, start, launch: os.fstat(launch),
        signal=lambda number, value: sent.append((number, value)),
        read_reports=lambda: iter(()),
        wait=lambda: threading.Event().wait(),
        pids={},
    )
    processes = Processes(lambda key, ended: None, 2, spawner=spawner)  # type: ignore[arg-type]
    processes.start(("loop", 0, 1), [RankStart(launch_line="", log_path=tmp_path / "0.log", is_loop=True)])
    processes.start(("job", 0, 2), [RankStart(launch_line="", log_path=tmp_path / "1.log")])
    processes.ask_all()
    assert sent == [(2, ASK)]


class Flickering:
    """A session that was away for these times, in seconds, when one looked."""

    def __init__(self, *away_s: float) -> None:
        self.left_s = list(away_s)
        self.is_connected = False
        self.said: list[str | None] = []

    @property
    def away_s(self) -> float:
        away_s = self.left_s.pop(0)
        self.is_connected = not away_s
        return away_s

    def send(self, message: rank_pb2.ConverseRequest) -> None:
        self.said.append(message.WhichOneof("message"))


def test_a_rank_that_is_to_leave_stops_alone_only_when_no_coordinator_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stream that broke for a moment cost the work of the others, which went on without it."""
    monkeypatch.setattr(main.time, "sleep", lambda seconds: None)
    control, session = Control(), Flickering(0.4, 0.9, 0.0, 0.0, 0.3, 0.0, 0.7, 1.6)
    stops_at: list[int] = []
    monkeypatch.setattr(Control, "stop", lambda self: stops_at.append(len(session.left_s)))
    main._ask_to_leave(control, session)  # type: ignore[arg-type]
    assert (session.said, stops_at) == (["leaving"], [0])
