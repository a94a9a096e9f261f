"""The ports of public scripts (examples/ports): one of them in the gate, and all of them in `make test-long`."""

import ast
import json
import math
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from support import two_ranks
from support.interrupted import start, text_of
from support.real_processes import Cluster, Command, Mark, eventually

pytestmark = pytest.mark.slow(reason="whole ports are trained")

ROOT = Path(__file__).resolve().parents[2]
PORTS = ROOT / "examples" / "ports"
NAMES = sorted(path.stem for path in PORTS.glob("*.py"))
TABLE = ROOT / "docs" / "tutorials" / "ports.md"
ROW = re.compile(r"^\| .+ \| `examples/(?:ports/)?(\w+)\.py` \| .+ \|$", re.MULTILINE)
LIMIT_S = 280.0
OF_ROUNDS = ("diffusion", "image_classification")
"""Whose moving average depends on when ranks average: with `policy="sync"` after every batch."""


IN_GATE = {"lstm": ("--", "--steps", "120")}
"""The port that the gate interrupts and resumes, and what makes it short: it has hidden state, which it has registered.
Random numbers, a moving average and figures of epochs are in `test_own_state.py`.
"""
LONG = pytest.mark.long(reason="one of them goes the same way in the gate")


def begun(mark: Mark, folder: Path, name: str, *more: str) -> subprocess.Popen[str]:
    """`elche run` of a port that trains: it has reported something."""
    folder.mkdir()
    process = start(mark, folder, "run", str(PORTS / f"{name}.py"), "--device", "cpu", "--out", "run", *more)
    said = re.compile(r"^epoch 1/|^epoch 1  evaluated|^rank 0 \| \w+ \d+:", re.MULTILINE)
    eventually(lambda: said.search(text_of(folder)) or process.poll() is not None, "it trains")
    return process


def trained(folder: Path, run: str = "run") -> dict[str, torch.Tensor]:
    """The final model: that of a job, or what a loop has saved."""
    path = folder / run / "model.safetensors"
    if path.exists():
        return load_file(path)
    (own,) = folder.glob("*.pt")
    return torch.load(own)


def figures(folder: Path, run: str = "run") -> dict[str, float]:
    """What it has reported at last, such as a counter of its own."""
    return dict(json.loads((folder / run / "record.json").read_text())["metrics"])


def test_each_port_is_in_the_table_and_says_what_it_is_like() -> None:
    listed = ROW.findall(TABLE.read_text(encoding="utf-8"))
    assert sorted(listed) == sorted([*NAMES, "hf_trainer", "lightning_callback"])
    for name in NAMES:
        text = (PORTS / f"{name}.py").read_text(encoding="utf-8")
        docstring = ast.get_docstring(ast.parse(text)) or ""
        assert docstring.startswith("Like "), name
        assert len(text.splitlines()) <= 120, name
        compile(text, name, "exec")


def test_a_job_and_a_loop_train_at_a_coordinator_and_their_models_are_plain(cluster: Cluster, tmp_path: Path) -> None:
    client = cluster.client
    job = client.submit(PORTS / "segmentation.py", num_ranks=2, folder="none", epochs=1, max_steps=4)
    subprocess.run(
        [sys.executable, two_ranks.__file__, str(PORTS / "pinn.py"), "--steps", "12"],
        check=True, cwd=tmp_path, timeout=LIMIT_S, env=cluster.mark.environment({"ELCHE_COORDINATOR": cluster.address}),
    )  # fmt: skip
    (loop,) = (one for one in client.jobs() if one.name == "pinn")
    assert math.isfinite(client.job(loop.job_id).result().metrics["error"])
    assert 0 < job.result().metrics["mean_iou"] < 1
    path = client.download(job.id, tmp_path / "model.safetensors")
    models = (("segmentation", "Net", load_file(path)), ("pinn", "PINN", torch.load(tmp_path / "pinn.pt")))
    for name, kind, state in models:
        runpy.run_path(str(PORTS / f"{name}.py"))[kind]().load_state_dict(state)


@pytest.mark.long(reason="one of them goes the same way in the gate")
@pytest.mark.parametrize("name", [one for one in NAMES if one != "k_fold"])
def test_a_port_trains_on_two_ranks(name: str, elche: Callable[..., Command]) -> None:
    arguments = ["--ranks", "2", "--slow", "1=2.3", "--device", "cpu", "--json"]
    done = elche("run", str(PORTS / f"{name}.py"), *arguments, env={"OMP_NUM_THREADS": "1"}, limit_s=LIMIT_S)
    assert done.code == 0, done.err
    metrics: dict[str, Any] = json.loads(done.out.splitlines()[-1])["metrics"]
    assert metrics
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.long(reason="it starts daemons for each fold")
def test_folds_are_trained_one_after_the_other(mark: Mark, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(PORTS / "k_fold.py"), "--folds", "2", "--ranks", "2"],
        capture_output=True, text=True, cwd=tmp_path, env=mark.environment(), timeout=LIMIT_S, check=True,
    )  # fmt: skip
    accuracies = [float(one) for one in re.findall(r"accuracy (0\.\d+)", done.stdout)]
    assert len(accuracies) == 2
    assert min(accuracies) > 0.85
    assert accuracies[0] != accuracies[1]


@pytest.mark.gate
@pytest.mark.parametrize("name", [pytest.param(one, marks=[] if one in IN_GATE else LONG) for one in NAMES])
def test_after_ctrl_c_a_port_goes_on_bit_for_bit(name: str, mark: Mark, tmp_path: Path) -> None:
    """All of its state is as it was where model and figures are: moments, rates, averages, counters, random numbers."""
    more = ("--ranks", "1", *(("--policy", "sync") if name in OF_ROUNDS else ()), *IN_GATE.get(name, ()))
    whole = begun(mark, tmp_path / "whole", name, *more)
    assert whole.wait(LIMIT_S) == 0, text_of(tmp_path / "whole")
    folder = tmp_path / "parts"
    first = begun(mark, folder, name, "--slow", "0=4", *more)  # Ctrl-C comes before the end on busy machines, too
    first.send_signal(signal.SIGINT)
    assert first.wait(LIMIT_S) == 130, text_of(folder)
    rest = start(mark, folder, "resume", "run", "--out", "rest", "--device", "cpu")
    assert rest.wait(LIMIT_S) == 0, text_of(folder)
    wanted, found = trained(tmp_path / "whole"), trained(folder, "rest")
    assert wanted.keys() == found.keys()
    assert [key for key in wanted if not torch.equal(wanted[key], found[key])] == []
    assert figures(folder, "rest") == figures(tmp_path / "whole")
