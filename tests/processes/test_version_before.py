"""Coordinator, workers and clients of this commit and of the one before work together, whichever is upgraded first."""

import json
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from uv import find_uv_bin

from elche_client import Client
from elche_client.events import JobState
from support.real_processes import Agent, Coordinator, Mark, agent, command, coordinator, eventually

NUM_SAMPLES, EPOCHS = 500, 40
ROOT = Path(__file__).parents[2]
PACKAGED = ("pyproject.toml", "README.md", "LICENSE", "proto", "coordinator", "worker", "client")
WHERE = "import elche, elche_client, elche_coordinator, elche_worker; print(elche.__file__)"


def run(*words: str, cwd: Path = ROOT) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run(words, cwd=cwd, capture_output=True, check=False)


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """The environment in which Python finds the programs of the commit before, as its wheel has them."""
    folder = tmp_path_factory.mktemp("before")
    try:
        found = run("git", "rev-parse", "--verify", "--quiet", "HEAD^")
    except FileNotFoundError:
        pytest.skip("there is no git here")
    if found.returncode:
        pytest.skip("the commit before is not here: this is no clone, a shallow one, or the first commit")
    archive = run("git", "archive", "--format=tar", f"--output={folder}/source.tar", "HEAD^", *PACKAGED)
    assert archive.returncode == 0, archive.stderr
    (folder / "source").mkdir()
    run("tar", "--extract", "--file", "../source.tar", cwd=folder / "source")
    build = (find_uv_bin(), "build", "--wheel", "--offline", "--no-build-isolation", "--python", sys.executable)
    built = run(*build, "--out-dir", str(folder), str(folder / "source"))
    assert built.returncode == 0, built.stderr.decode()
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "wheel")
    env = {"PYTHONPATH": str(folder / "wheel")}
    used = subprocess.run([sys.executable, "-c", WHERE], env=env, capture_output=True, text=True, check=True)
    assert used.stdout.startswith(env["PYTHONPATH"])
    return env


ORDERS = ("coordinator", "one", "two"), ("one", "two", "coordinator")


@pytest.mark.gate
@pytest.mark.parametrize("order", ORDERS, ids=["coordinator first", "coordinator last"])
def test_each_is_upgraded_while_a_job_trains(
    mark: Mark, tmp_path: Path, before: Mapping[str, str], held_back: Callable[[Path], Path], order: Sequence[str]
) -> None:
    """No sample is lost; clients of both versions list the job and fetch its model."""
    path, running = held_back(tmp_path / "until"), ExitStack()
    ran: dict[str, tuple[ExitStack, Coordinator | Agent]] = {}

    def start(what: str, env: Mapping[str, str], address: str = "") -> Coordinator | Agent:
        stack, folder = running.enter_context(ExitStack()), tmp_path / what
        folder.mkdir(exist_ok=True)
        if what == "coordinator":
            ran[what] = stack, stack.enter_context(coordinator(mark, folder, env=env, listen=address))
        else:
            ran[what] = stack, stack.enter_context(agent(mark, folder, address, devices="cpu", env=env))
        return ran[what][1]

    def upgrade(what: str, address: str) -> None:
        """As systemd and docker do."""
        stack, program = ran[what]
        program.process.terminate()
        assert program.process.wait(400) == 0
        stack.close()
        start(what, {}, address)

    with running:
        one = start("coordinator", before)
        assert isinstance(one, Coordinator)
        for name in ("one", "two"):
            start(name, before, one.address)
        client = running.enter_context(Client(one.address, reconnect_s=200))

        def elche(*words: str) -> str:
            """The command of the commit before."""
            done = command(mark, "elche_client", *words, "--coordinator", one.address, cwd=tmp_path, env=before)
            assert (done.code, "Traceback" in done.err) == (0, False), done.err
            return done.out

        def trains() -> bool:
            rounds, view = num_rounds, client.get(job)
            assert not view.state.has_ended, view.reason
            return view.state is JobState.TRAINING and len(view.ranks) == 2 and view.num_rounds > rounds

        settings = ("--epochs", str(EPOCHS), "--audit", "true", "--ranks", "1..2")
        job, num_rounds = elche("submit", str(path), *settings).split()[-1], 1
        eventually(trains, "it trains")
        for what in order:
            upgrade(what, one.address)
            num_rounds = client.get(job).num_rounds
            eventually(trains, f"it trains on with another {what}")
            assert [view["job_id"] for view in json.loads(elche("jobs", "--json"))] == [job]
        (tmp_path / "until").touch()
        ended = client.result(job)
        assert (ended.state, ended.committed_samples) == (JobState.SUCCEEDED, (NUM_SAMPLES,) * EPOCHS)
        elche("fetch", job, "old")
        assert client.download(job, tmp_path / "new").read_bytes() == (tmp_path / "old").read_bytes()
        works = [str(tmp_path / name / "work" / job) for name in ("one", "two")]
        told = command(mark, "elche_client", "audit", *works, cwd=tmp_path)
        assert told.code == 0, told.out + told.err
        assert "goes back to its start" not in one.log.read_text()
