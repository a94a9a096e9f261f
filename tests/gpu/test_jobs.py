"""Whole jobs on one GPU, as real processes: `make test-gpu`.

ELCHE_TEST_DEVICE=cpu runs the same tests on the CPU, to see that the tests themselves are whole.
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
from torch.distributed.fsdp import FSDPModule

from elche_client import Client
from elche_client.events import JobState
from support.real_processes import Command, Mark, agent, command, coordinator, eventually

DEVICE = os.environ.get("ELCHE_TEST_DEVICE", "cuda:0")
IS_CPU = DEVICE == "cpu"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not IS_CPU and not torch.cuda.is_available(), reason="there is no CUDA device"),
]
JOBS = Path(__file__).parent / "jobs"
NUM_SAMPLES = 4096  # of jobs/shapes.py
LIMIT_S = 110.0
GOOD = 0.9
"""Accuracy that every way of training reaches; one in four is chance."""

Elche = Callable[..., Command]


@pytest.fixture
def elche(mark: Mark, tmp_path: Path) -> Elche:
    """The command `elche` in a folder of its own."""

    def run(*arguments: str, how: str = "", **env: str) -> Command:
        given = {"HOW": how, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **env, "ELCHE_TEST_DEVICE": DEVICE}
        return command(mark, "elche_client", *arguments, cwd=tmp_path, env=given, limit_s=LIMIT_S)

    return run


def trained(done: Command, *, epochs: int = 3) -> dict[str, Any]:
    """A job's result: it has succeeded, trained every sample of every epoch, and learnt something."""
    assert done.code == 0, done.err[-3000:]
    result: dict[str, Any] = json.loads(done.out.splitlines()[-1])
    assert result["state"] == "succeeded", result
    assert result["committed_samples"] == [NUM_SAMPLES] * epochs
    assert result["metrics"]["accuracy"] > GOOD, result["metrics"]
    return result


def run(elche: Elche, *options: str, ranks: int = 1, how: str = "") -> dict[str, Any]:
    place = ["run", str(JOBS / "shapes.py"), "--device", DEVICE, "--ranks", str(ranks), "--json"]
    return trained(elche(*place, *options, how=how))


def test_one_rank_averages_over_nccl(elche: Elche) -> None:
    run(elche, *([] if IS_CPU else ["--backend", "nccl"]))


def test_one_rank_averages_with_itself(elche: Elche) -> None:
    run(elche)


@pytest.mark.parametrize(
    ("policy", "averaging"),
    [
        ("cadence", "overlapped"),
        ("cadence", "blocking"),
        ("async", "overlapped"),
        ("async", "blocking"),
        ("sync", "blocking"),
    ],
)
def test_two_unequal_ranks_share_the_device(elche: Elche, policy: str, averaging: str) -> None:
    """Every round's result is compared bit for bit."""
    more = ["--policy", policy, "--averaging", averaging, "--slow", "1=2.3", "--verify"]
    run(elche, *more, *(["--anchor", "none"] if policy == "sync" else []), ranks=2)


@pytest.mark.parametrize("averaging", ["overlapped", "blocking"])
def test_four_ranks_share_the_device_at_unequal_shares(elche: Elche, averaging: str) -> None:
    run(elche, "--averaging", averaging, "--slow", "1=1.5", "--slow", "2=2", "--slow", "3=3", "--verify", ranks=4)


@pytest.mark.parametrize("averaging", ["overlapped", "blocking"])
def test_ranks_average_through_the_coordinator(elche: Elche, averaging: str) -> None:
    run(elche, "--backend", "cpu", "--averaging", averaging, "--slow", "1=2", "--verify", ranks=2)


@pytest.mark.parametrize(
    "options",
    [
        ["--precision", "bf16"],
        ["--precision", "fp16", "--max-grad-norm", "1.0"],
        ["--accumulate", "2", "--max-grad-norm", "1.0"],
        ["--num-workers", "2"],
        ["--batch-size", "auto"],
        ["--timeline", "true"],
        ["--optimizer-state", "average", "--buffers", "from_source"],
    ],
    ids=" ".join,
)
def test_settings_of_a_rank(elche: Elche, options: list[str]) -> None:
    run(elche, *options)


@pytest.mark.parametrize(
    "options",
    [["--compress", "int8"], ["--compress", "bf16"], ["--outer-optimizer", "nesterov"]],
    ids=" ".join,
)
def test_settings_of_rounds(elche: Elche, options: list[str]) -> None:
    run(elche, *options, "--verify", ranks=2)


def test_a_compiled_model_trains(elche: Elche) -> None:
    run(elche, "--compile", "true")


def test_a_step_as_one_cuda_graph_trains_while_rounds_change_what_it_reads(elche: Elche) -> None:
    run(elche, "--slow", "1=2", "--verify", ranks=2, how="graph")


def test_no_step_makes_the_host_wait(elche: Elche) -> None:
    run(elche, how="no waiting")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_job_goes_on_from_its_checkpoint(elche: Elche, tmp_path: Path, ranks: int) -> None:
    more = ["--out", "first", "--checkpoint-every-epochs", "1", "--outer-optimizer", "nesterov", "--verify"]
    assert run(elche, *more, ranks=ranks)["checkpoints"]
    place = ["resume", "first", "--epochs", "5", "--device", DEVICE, "--ranks", str(ranks), "--out", "second"]
    trained(elche(*place, "--verify", "--json"), epochs=5)


def run_script(mark: Mark, folder: Path, path: Path) -> Any:
    """What a script says last, in a process of its own."""
    env = {"ELCHE_TEST_DEVICE": DEVICE, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, str(path)], cwd=folder, env=mark.environment(env), capture_output=True, text=True,
        timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_job_trains_in_the_callers_own_process(mark: Mark, tmp_path: Path) -> None:
    assert run_script(mark, tmp_path, JOBS / "shapes.py")["accuracy"] > GOOD


@pytest.mark.skipif(not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="PyTorch is older than 2.13")
def test_a_model_is_divided(mark: Mark, tmp_path: Path) -> None:
    for first, last in run_script(mark, tmp_path, JOBS / "shard.py"):
        assert last < first / 2


@pytest.mark.parametrize("max_anchor", ["0", "4"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loop_of_ones_own_trains(elche: Elche, tmp_path: Path, ranks: int, max_anchor: str) -> None:
    place = ["run", str(JOBS / "loop.py"), "--device", DEVICE, "--ranks", str(ranks), "--slow", f"{ranks - 1}=1.5"]
    done = elche(*place, "--out", "loop", "--json", MAX_ANCHOR=max_anchor)
    assert done.code == 0, done.err[-3000:]
    logs = [(tmp_path / "loop" / f"rank-{rank}.log").read_text() for rank in range(ranks)]
    said = [json.loads(line) for log in logs for line in log.splitlines() if line.startswith("{")]
    assert len(said) == ranks
    assert len({one["digest"] for one in said}) == 1, "ranks end alike"
    assert said[0]["accuracy"] > GOOD


def test_a_handle_shows_a_job_and_gives_its_state(mark: Mark, tmp_path: Path) -> None:
    path = tmp_path / "started.py"
    text = (JOBS / "shapes.py").read_text().partition("if __name__")[0]
    path.write_text(
        text
        + f"""
if __name__ == "__main__":
    import json
    handle = job.start(ranks=2, device={DEVICE!r}, slow={{1: 2.0}}, out="started")
    devices, epochs = handle.devices, []
    while (metrics := handle.next_metrics()) is not None:
        epochs.append(metrics.metrics["accuracy"])
    print(json.dumps([devices, epochs, len(handle.join().params)]))
"""
    )
    devices, epochs, num_params = run_script(mark, tmp_path, path)
    assert [one.partition(" ")[0] for one in devices] == [DEVICE] * 2
    assert len(epochs) == 3
    assert epochs[-1] > GOOD
    assert num_params


SHARED = """

def evaluate_shared(model):
    fraction = torch.cuda.get_per_process_memory_fraction() if next(model.parameters()).is_cuda else 0.5
    return {**evaluate(model), "fraction": fraction}


from dataclasses import replace
job = replace(job, evaluate=evaluate_shared)
"""


def test_two_jobs_share_the_device_and_its_memory(mark: Mark, tmp_path: Path) -> None:
    path = tmp_path / "shapes.py"
    path.write_text((JOBS / "shapes.py").read_text().partition("if __name__")[0] + SHARED)
    env = {"OMP_NUM_THREADS": "1", "TEST_EXECUTES": "1"}
    with (
        coordinator(mark, tmp_path) as one,
        agent(mark, tmp_path, one.address, "--share", "2", devices=DEVICE, env=env),
        Client(one.address, token="") as client,
    ):
        jobs = [client.submit(path, num_ranks=1, epochs=40) for _ in range(2)]
        eventually(lambda: all(one.state is JobState.TRAINING for one in client.jobs()), "both train at once")
        results = [job.result() for job in jobs]
    for result in results:
        assert result.state is JobState.SUCCEEDED
        assert result.metrics["accuracy"] > GOOD
        assert result.metrics["fraction"] <= 0.5
