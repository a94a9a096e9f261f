"""The examples of a loop of one's own, in small: each alone, and the same script on two processes under torchrun."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from real_processes import Mark

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ALONE = (sys.executable,)
ON_TWO = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
LIMIT_S = 60.0

Results = list[dict[str, Any]]
BITS_OF_SINGLE_BYTES = 4.8
"""Per held-out byte, when only how frequent each byte is is known. An untrained model takes 8 and more."""


@pytest.fixture
def results(mark: Mark, tmp_path: Path) -> Callable[..., Results]:
    """Runs an example to its end; what each of its processes printed last, in order of rank."""

    def run(start: tuple[str, ...], name: str, *arguments: str) -> Results:
        done = subprocess.run(
            [*start, str(EXAMPLES / name), *arguments],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            cwd=tmp_path,
            env=mark.environment(ENVIRONMENT),
            stdin=subprocess.DEVNULL,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
        told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        size = 1 if start == ALONE else 2
        assert sorted((one["rank"], one["ranks"]) for one in told) == [(rank, size) for rank in range(size)]
        assert len({one["digest"] for one in told}) == 1
        return sorted(told, key=lambda one: one["rank"])

    return run


@pytest.mark.parametrize("start", [ALONE, ON_TWO], ids=["alone", "on two"])
def test_own_loop_reads_digits(results: Callable[..., Results], start: tuple[str, ...]) -> None:
    for one in results(start, "own_loop.py", "--epochs", "3"):
        assert one["accuracy"] > 0.9
        assert one["steps"] == 3 * 45


def test_own_loop_reads_digits_by_el_che(results: Callable[..., Results]) -> None:
    for one in results(ON_TWO, "own_loop.py", "--epochs", "3", "--batch-size", "8", "--el-che", "2"):
        assert one["accuracy"] > 0.9
        assert one["steps"] < 3 * 180 / 2


@pytest.mark.parametrize(("start", "mode"), [(ALONE, ["--raw"]), (ON_TWO, [])], ids=["alone", "on two"])
def test_hf_loop_learns_bytes(results: Callable[..., Results], start: tuple[str, ...], mode: list[str]) -> None:
    for one in results(start, "hf_loop.py", "--blocks", "1200", "--epochs", "1", *mode):
        assert one["bits_per_byte"] < BITS_OF_SINGLE_BYTES
        assert one["steps"] == 75


def test_lightning_on_two_processes_trains_as_one_does_with_batches_twice_as_large(
    results: Callable[..., Results], tmp_path: Path
) -> None:
    (alone,) = results(ALONE, "lightning_callback.py", "--epochs", "2", "--batch-size", "64", "--save", "one.pt")
    on_two = results(ON_TWO, "lightning_callback.py", "--epochs", "2", "--batch-size", "32", "--save", "two.pt")
    for one in (alone, *on_two):
        assert one["lightning_ranks"] == 1
        assert one["steps"] == 2 * 22
        assert one["accuracy"] == pytest.approx(alone["accuracy"])
    expected = torch.load(tmp_path / "one.pt")
    for name, values in torch.load(tmp_path / "two.pt").items():
        assert torch.allclose(values, expected[name], rtol=0, atol=1e-5), name
