"""Several ranks over real NCCL on one GPU: each claims a host of its own (`own_hosts`). `make test-gpu`.

ELCHE_TEST_DEVICE=cpu runs the same tests over gloo, to see that the tests themselves are whole.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support.real_processes import Mark

DEVICE = os.environ.get("ELCHE_TEST_DEVICE", "cuda:0")
IS_CPU = DEVICE == "cpu"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not IS_CPU and not torch.cuda.is_available(), reason="there is no CUDA device"),
]
HERE = Path(__file__).parent
NUM_SAMPLES, EPOCHS = 4096, 3  # of jobs/shapes.py
LIMIT_S = 200.0
BACKEND = "gloo" if IS_CPU else "nccl"
ONCE = """
import os, signal
from pathlib import Path
from elche_worker.collectives.nccl import Communicator
from elche_worker.collectives.process_group import ProcessGroupCollectives

once, calls = Path(__file__).with_name("once"), []


def ends_once(number):
    calls.append(1)
    if os.environ.get("ELCHE_RANK") == "1" and len(calls) == number and not once.exists():
        once.touch()
        os.kill(os.getpid(), SIGNAL)


"""
IN_A_COLLECTIVE = """
run = ProcessGroupCollectives._run
ProcessGroupCollectives._run = lambda self, *given: ends_once(9) or run(self, *given)
"""
IN_THE_MAKING = """
made = Communicator.__init__
Communicator.__init__ = lambda self, *given: ends_once(1) or made(self, *given)
"""

Run = Callable[..., tuple[dict[str, Any], Path, str]]


@pytest.fixture
def run(mark: Mark, tmp_path: Path) -> Run:
    """Runs the job of shapes.py on some ranks, with lines of its own before it."""

    def run(*options: str, ranks: int = 2, lines: str = "", name: str = "out") -> tuple[dict[str, Any], Path, str]:
        path = tmp_path / "shapes.py"
        path.write_text((HERE / "jobs" / "shapes.py").read_text() + lines)
        given = ["--device", DEVICE, "--ranks", str(ranks), "--backend", BACKEND, "--json", "--out", name, *options]
        own = {"PYTHONPATH": f"{HERE / 'own_hosts'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        done = subprocess.run(
            [sys.executable, "-m", "elche_client", "run", str(path), *given],
            env=mark.environment({"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TEST_EXECUTES": "1", **own}),
            cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-6000:]
        result = json.loads(done.stdout.splitlines()[-1])
        assert result["state"] == "succeeded", result
        assert result["committed_samples"] == [NUM_SAMPLES] * EPOCHS
        assert result["metrics"]["accuracy"] > 0.9, result["metrics"]
        return result, tmp_path / name, done.stderr

    return run


@pytest.mark.parametrize(
    ("policy", "averaging"),
    [
        ("cadence", "overlapped"),
        ("cadence", "blocking"),
        ("async", "overlapped"),
        ("sync", "blocking"),
    ],
)
def test_two_unequal_ranks(run: Run, policy: str, averaging: str) -> None:
    """Every round's result is compared bit for bit."""
    more = ["--anchor", "none"] if policy == "sync" else []
    run("--policy", policy, "--averaging", averaging, "--slow", "1=2.3", "--verify", *more)


def test_four_ranks(run: Run) -> None:
    run("--slow", "1=1.5", "--slow", "2=2", "--slow", "3=3", "--verify", ranks=4)


@pytest.mark.parametrize(
    "options",
    [
        ["--compress", "int8"],
        ["--compress", "bf16"],
        ["--outer-optimizer", "nesterov"],
        ["--memory", "host"],
        ["--memory", "device"],
        ["--merge", "mean", "--optimizer-state", "average", "--buffers", "from_source"],
    ],
    ids=" ".join,
)
def test_settings_of_rounds(run: Run, options: list[str]) -> None:
    run(*options, "--slow", "1=2", "--verify")


@pytest.mark.parametrize("averaging", ["blocking", "overlapped"])
@pytest.mark.parametrize(
    ("where", "number"),
    [
        pytest.param(IN_A_COLLECTIVE, 9, id="killed in a collective"),
        pytest.param(IN_A_COLLECTIVE, 19, id="stopped in a collective"),
        pytest.param(IN_THE_MAKING, 9, id="killed in the making", marks=pytest.mark.skipif(IS_CPU, reason="NCCL's")),
    ],
)
def test_a_rank_that_dies_or_stops_is_replaced(run: Run, where: str, number: int, averaging: str) -> None:
    lines = ONCE.replace("SIGNAL", str(number)) + where
    _, out, _ = run("--averaging", averaging, "--verify", lines=lines)
    assert (out.parent / "once").exists()


@pytest.mark.skipif(IS_CPU, reason="NCCL's")
def test_a_loop_of_ones_own_shares_batches(mark: Mark, tmp_path: Path) -> None:
    given = ["--device", DEVICE, "--ranks", "2", "--slow", "1=1.5", "--out", "loop", "--json"]
    own = {
        "PYTHONPATH": f"{HERE / 'own_hosts'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "LOOP_BACKEND": "cpu:gloo,cuda:nccl",
        "ELCHE_TEST_DEVICE": DEVICE,
    }
    done = subprocess.run(
        [sys.executable, "-m", "elche_client", "run", str(HERE / "jobs" / "loop.py"), *given],
        env=mark.environment({"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TEST_EXECUTES": "1", **own}),
        cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    logs = [(tmp_path / "loop" / f"rank-{rank}.log").read_text() for rank in range(2)]
    said = [json.loads(line) for log in logs for line in log.splitlines() if line.startswith("{")]
    assert len({one["digest"] for one in said}) == 1, "ranks end alike"
    assert said[0]["accuracy"] > 0.9
