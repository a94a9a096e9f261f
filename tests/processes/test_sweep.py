"""Sweeps at a real coordinator: they fill what is free, outlast their command, and halve."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from elche_client import Client
from support.real_processes import Command, Mark, agent, coordinator, eventually

JobFile = Callable[..., Path]

LINES = """
import argparse
from dataclasses import replace
import torch
parser = argparse.ArgumentParser()
parser.add_argument("--rate", type=float)
rate = parser.parse_args().rate
if rate > 100:
    raise ValueError("the rate is too high")
job = replace(
    job,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=rate),
    evaluate=lambda model: {"distance": abs(rate - 0.1)},
)
"""


@pytest.fixture
def train(job_file: JobFile) -> Path:
    return job_file("linear.py", LINES)


@pytest.mark.gate
def test_a_sweep_that_is_stopped_and_run_again_goes_on(
    mark: Mark, tmp_path: Path, train: Path, elche: Callable[..., Command]
) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(
        f"job: {train.name}\nmetric: distance\nsettings: {{epochs: 20}}\n"
        "arguments: {--rate: [0.25, 0.2, 0.125, 1e3]}\n"
    )
    with (
        coordinator(mark, tmp_path) as one,
        agent(mark, tmp_path, one.address, devices="cpu,cpu"),
        Client(one.address, token="") as client,
    ):
        command = [sys.executable, "-m", "elche_client", "sweep", str(path), "--coordinator", one.address]
        first = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=mark.environment(None))
        eventually(lambda: len(client.jobs()) == 4 or first.poll(), "all trials are submitted")
        assert first.poll() is None, first.communicate()
        os.kill(first.pid, signal.SIGINT)
        assert "run the command again" in first.communicate(timeout=400)[1]
        assert first.returncode == 130
        done = elche("sweep", str(path), "--coordinator", one.address, "--json")
        assert done.code == 0, done.err
        rows = json.loads(done.out)
        assert [row["values"]["--rate"] for row in rows] == [0.125, 0.2, 0.25, "1e3"]
        assert [row["state"] for row in rows] == ["succeeded"] * 3 + ["failed"]
        assert rows[0]["distance"] == pytest.approx(0.025)
        assert "the best is trial 2; its model: elche fetch " in done.err
        assert "has failed" in done.err
        assert len(client.jobs()) == 4
        assert all(view.name.startswith("linear-") for view in client.jobs())


def test_a_sweep_outlasts_a_restart_of_the_coordinator(mark: Mark, tmp_path: Path, train: Path) -> None:
    (tmp_path / "again").mkdir()
    (tmp_path / "sweep.yaml").write_text(
        f"job: {train.name}\nmetric: distance\nsettings: {{epochs: 1}}\narguments: {{--rate: [0.25, 0.125]}}\n"
    )
    with coordinator(mark, tmp_path) as one, Client(one.address, token="") as client:
        command = [sys.executable, "-m", "elche_client", "sweep", "sweep.yaml", "--coordinator", one.address]
        sweep = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=mark.environment(None), cwd=tmp_path
        )
        eventually(lambda: len(client.jobs()) == 2 or sweep.poll(), "its trials wait for a worker")
        one.process.kill()
    assert sweep.stderr is not None
    assert "no coordinator answers" in (said := sweep.stderr.readline()), said
    assert "retrying for 60 s" in said
    with (
        coordinator(mark, tmp_path / "again", data=one.data, listen=one.address) as two,
        agent(mark, tmp_path, two.address),
        Client(two.address, token="") as client,
    ):
        _, rest = sweep.communicate(timeout=400)
        assert sweep.returncode == 0, rest
        assert len(client.jobs()) == 2, "no trial is submitted again"


@pytest.mark.long(reason="client/test_sweep.py chooses them")
def test_the_best_of_a_halving_go_on_from_their_checkpoints(
    mark: Mark, tmp_path: Path, train: Path, elche: Callable[..., Command]
) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(
        f"job: {train.name}\nmetric: distance\nmethod: halving\ntrials: 4\nhalving: {{epochs: 1, factor: 2}}\n"
        "arguments: {--rate: {min: 0.01, max: 0.3, log: true}}\n"
    )
    with (
        coordinator(mark, tmp_path) as one,
        agent(mark, tmp_path, one.address, devices="cpu,cpu"),
        Client(one.address, token="") as client,
    ):
        done = elche("sweep", str(path), "--coordinator", one.address, "--json", limit_s=400)
        assert done.code == 0, done.err
        rows = json.loads(done.out)
        assert sorted(row["epochs"] for row in rows) == [1, 1, 2, 4]
        assert rows[0]["epochs"] == 4
        assert rows[0]["distance"] == min(row["distance"] for row in rows)
        result = client.job(rows[0]["job_id"]).result()
        assert len(result.committed_samples) == 4
        assert len(client.jobs()) == 7
        stopped = elche("sweep", str(path), "--coordinator", one.address, "--cancel")
        assert stopped.out == "0 of 7 trials are cancelled\n"
