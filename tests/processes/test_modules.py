"""Jobs of modules, secrets that only hosts have, and clients that are killed."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from elche.errors import JobFailed
from elche_client import Client, JobState
from support.real_processes import Command, Mark, agent, coordinator, eventually

JobFile = Callable[..., Path]
JOBS = Path(__file__).parent / "jobs"
SECRET = "a value that nobody sees"
SHOW = """
import os
from .words import GREETING

print(GREETING, len(os.environ.get("TOKEN_OF_LAB", "")), flush=True)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A package with a job that imports what is beside it."""
    package = tmp_path / "project" / "train"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "words.py").write_text("GREETING = 'hello from a package'\n")
    text = (JOBS / "linear.py").read_text(encoding="utf-8")
    (package / "points.py").write_text(SHOW + text.replace("job = TrainingJob", "of_points = TrainingJob"))
    return package.parent


def test_a_job_of_a_module_with_a_secret_of_its_hosts(
    mark: Mark, tmp_path: Path, project: Path, elche: Callable[..., Command]
) -> None:
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    (secrets / "TOKEN_OF_LAB").write_text(SECRET + "\n")
    with (
        coordinator(mark, tmp_path) as one,
        agent(mark, tmp_path, one.address, "--secrets", str(secrets), devices="cpu,cpu"),
        Client(one.address, token="") as client,
    ):
        asks = ("submit", "--module", "train.points:of_points", "--folder", str(project), "--coordinator", one.address)
        done = elche(*asks, "--secret", "TOKEN_OF_LAB", "--epochs", "1", "--ranks", "2")
        assert done.code == 0, done.err
        job = client.job(done.out.strip())
        assert job.result().state is JobState.SUCCEEDED
        lines = [line.text for line in client.logs(job.id)]
        assert lines.count(f"hello from a package {len(SECRET)}") == 2
        again = client.submit(module="train.points:of_points", folder=project, secrets=["OTHER"], num_ranks=1)
        with pytest.raises(JobFailed, match="the host has no secret OTHER: put its value into a file"):
            again.result()
        wrong = elche(*(word.replace("points:", "pints:") for word in asks))
        assert "has no module train.pints: there is no file" in wrong.err
        assert elche("submit", "--coordinator", one.address).err.startswith("elche: name the file of the job, or")
        kept = one.log.read_text() + client.journal(job.id)
        with sqlite3.connect(one.data / "elche.sqlite") as database:
            kept += repr(database.execute("SELECT record, spec FROM jobs").fetchall())
            kept += repr(database.execute("SELECT entries FROM tape").fetchall())
        assert "TOKEN_OF_LAB" in kept
        assert SECRET not in kept + "".join(path.read_text() for path in (tmp_path / "work").rglob("*.log"))


def test_a_client_that_is_killed_while_it_watches_leaves_its_job_alone_and_every_command_answers_with_json(
    mark: Mark, tmp_path: Path, job_file: JobFile, elche: Callable[..., Command]
) -> None:
    with (
        coordinator(mark, tmp_path) as one,
        agent(mark, tmp_path, one.address, devices="cpu"),
        Client(one.address, token="") as client,
    ):
        command = [sys.executable, "-m", "elche_client", "submit", str(job_file("linear.py")), "--follow"]
        watcher = subprocess.Popen(
            [*command, "--ranks", "1", "--epochs", "1000", "--coordinator", one.address],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=mark.environment(None),
        )
        eventually(lambda: client.jobs() and client.jobs()[0].epoch >= 1, "it trains")
        os.kill(watcher.pid, signal.SIGKILL)
        watcher.wait()
        job = client.job(client.jobs()[0].job_id)
        epoch = client.get(job.id).epoch
        eventually(lambda: client.get(job.id).epoch > epoch + 1, "it trains on")

        def said(*words: str) -> dict[str, object]:
            done = elche(*words, "--json", "--coordinator", one.address)
            assert done.code == 0, done.err
            answer: dict[str, object] = json.loads(done.out)
            return answer

        host = client.hosts()[0].host
        assert said("scale", job.id, "--ranks", "1") == {"job_id": job.id, "num_ranks": 1, "num_ranks_before": 1}
        assert said("checkpoint", job.id) == {"job_id": job.id}
        assert said("pause", job.id)["is_made"] is True
        assert said("pause", job.id, "--off")["job_id"] == job.id
        assert said("drain", host, "--off") == {"host": host, "is_drained": False, "num_ranks": 1}
        assert said("top").keys() == {"jobs", "hosts"}
        assert said("cancel", job.id)["before"] in ("training", "paused")
