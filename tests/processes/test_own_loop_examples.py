"""The examples of a loop of one's own, in small: each alone, and the same script on two processes under torchrun."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support.real_processes import Mark

pytestmark = pytest.mark.slow(reason="every example starts PyTorch and a framework in three processes")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ALONE = (sys.executable,)
ON_TWO = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
LIMIT_S = 400.0
BITS_OF_SINGLE_BYTES = 4.7
"""Per held-out byte, when only how frequent each byte is is known. An untrained model takes 8 and more."""

Results = list[dict[str, Any]]
Begin = Callable[..., Callable[[], Results]]


@pytest.fixture
def begin(mark: Mark, tmp_path: Path) -> Begin:
    """Begins an example. What it returns waits for the end, and gives what each process printed last, by rank."""

    def start(how: tuple[str, ...], name: str, *arguments: str) -> Callable[[], Results]:
        size = 1 if how == ALONE else 2
        out, err = tmp_path / f"out-{size}", tmp_path / f"err-{size}"
        with out.open("w") as out_file, err.open("w") as err_file:
            process = subprocess.Popen(
                [*how, str(EXAMPLES / name), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out_file,
                stderr=err_file,
                cwd=tmp_path,
                env=mark.environment(ENVIRONMENT),
            )

        def finish() -> Results:
            assert process.wait(LIMIT_S) == 0, err.read_text()
            assert "Traceback" not in err.read_text()
            told = [json.loads(one) for one in re.findall(r"\{[^{}]*\}", out.read_text())]  # their lines may be mixed
            assert sorted((one["rank"], one["ranks"]) for one in told) == [(rank, size) for rank in range(size)]
            assert len({one["digest"] for one in told}) == 1
            return sorted(told, key=lambda one: one["rank"])

        return finish

    return start


@pytest.mark.long(reason="the documentation has such a loop, and the gate trains it")
def test_own_loop_reads_digits(begin: Begin) -> None:
    alone = begin(ALONE, "own_loop.py", "--epochs", "3")
    on_two = begin(ON_TWO, "own_loop.py", "--epochs", "3")
    for one in (*alone(), *on_two()):
        assert one["accuracy"] > 0.9
        assert one["steps"] == 3 * 45


@pytest.mark.long(reason="the loop on digits goes the same way")
def test_hf_loop_learns_bytes(begin: Begin) -> None:
    alone = begin(ALONE, "hf_loop.py", "--blocks", "1200", "--epochs", "1", "--raw")
    on_two = begin(ON_TWO, "hf_loop.py", "--blocks", "1200", "--epochs", "1")
    for one in (*alone(), *on_two()):
        assert one["bits_per_byte"] < BITS_OF_SINGLE_BYTES
        assert one["steps"] == 75


def test_hf_trainer_on_two_processes_trains_as_one_does_with_batches_twice_as_large(
    begin: Begin, tmp_path: Path
) -> None:
    pytest.importorskip("accelerate")
    sgd = ("--blocks", "320", "--learning-rate", "0.3", "--optimizer", "sgd")
    alone = begin(ALONE, "hf_trainer.py", "--batch-size", "16", "--save", "one.pt", *sgd)
    on_two = begin(ON_TWO, "hf_trainer.py", "--batch-size", "8", "--save", "two.pt", *sgd)
    for one in (*alone(), *on_two()):
        assert one["steps"] == 20
    of_one = torch.load(tmp_path / "one.pt")
    for name, values in torch.load(tmp_path / "two.pt").items():
        assert torch.allclose(values, of_one[name], rtol=0, atol=1e-5), name


def test_frameworks_are_imported_only_by_their_own_callbacks() -> None:
    names = "{'lightning', 'pytorch_lightning', 'transformers'}"
    script = f"import sys, elche_worker.trainer; sys.exit(bool({names} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.long(reason="elche init writes such a loop, and the gate trains it")
def test_lightning_on_two_processes_trains_as_one_does_with_batches_twice_as_large(
    begin: Begin, tmp_path: Path
) -> None:
    alone = begin(ALONE, "lightning_callback.py", "--epochs", "2", "--batch-size", "64", "--save", "one.pt")
    on_two = begin(ON_TWO, "lightning_callback.py", "--epochs", "2", "--batch-size", "32", "--save", "two.pt")
    (expected, *others) = (*alone(), *on_two())
    for one in (expected, *others):
        assert one["lightning_ranks"] == 1
        assert one["steps"] == 2 * 22
        assert one["accuracy"] == pytest.approx(expected["accuracy"])
    of_one = torch.load(tmp_path / "one.pt")
    for name, values in torch.load(tmp_path / "two.pt").items():
        assert torch.allclose(values, of_one[name], rtol=0, atol=1e-5), name
