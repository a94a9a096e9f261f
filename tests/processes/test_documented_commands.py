"""Every command that the documentation shows runs as it is written, only JOB, HOST, addresses and paths replaced."""

import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from elche.token import Role
from elche_client import Client
from elche_client.commands.tokens import Tokens
from elche_client.events import JobState
from support.documented import blocks, commands
from support.real_processes import (
    ATTENDED,
    LISTENING,
    Command,
    Coordinator,
    Mark,
    agent,
    command,
    coordinator,
    eventually,
)

JOBS = Path(__file__).parent / "jobs"
OWN = "correct horse battery"
MODULES = {"elche": "elche_client", "elche-coordinator": "elche_coordinator", "elche-worker": "elche_worker.agent"}
FILES = {
    "train.py": (JOBS / "linear.py")
    .read_text(encoding="utf-8")
    .replace("job = TrainingJob(", "make_job = dict(monitor='mse', mode='min', "),
    "loop.py": next(text for _, text in blocks("python") if text.startswith("# loop.py\n")),
    "sweep.yaml": next(text for _, text in blocks("yaml")).replace("accuracy", "mse").replace("max\n", "min\n"),
    "requirements.txt": "",
    "hosts.txt": "gpu1",
}
JOB = """
import argparse, sys
parser = argparse.ArgumentParser()
for name in ("--lr", "--learning-rate", "--width"):
    parser.add_argument(name, type=float)
parser.parse_known_args()
job = TrainingJob(**make_job)
"""
SHORT, LONG = "train.py", "steady.py"
ABOUT_JOBS = ("watch", "logs", "fetch", "checkpoint", "pause", "scale", "journal", "cancel", "resume")
LOCAL = ("run", "replay", "checkpoints", "timeline", "init", "certs", "plan")  # and `resume` and `journal` of a folder
RUN = "runs/train-20260101-120000"


OF_ENGINES = ("up", "agents", "down")


def is_local(words: str) -> bool:
    return RUN in words or words.split()[1] in LOCAL


OF_BACKUPS = list(dict.fromkeys(words for _, words in commands() if " /backup/" in words))
OF_DAEMONS = list(
    dict.fromkeys(words for _, words in commands() if not words.startswith("elche ") and words not in OF_BACKUPS)
)
LOCALLY = list(dict.fromkeys(words for _, words in commands() if words.startswith("elche ") and is_local(words)))
BY_AN_ENGINE = list(dict.fromkeys(words for _, words in commands() if words.split()[1] in OF_ENGINES))
AT_A_COORDINATOR = [
    words
    for words in dict.fromkeys(words for _, words in commands())
    if words not in (*OF_BACKUPS, *OF_DAEMONS, *LOCALLY, *BY_AN_ENGINE)
]


def of(*verbs: str) -> list[str]:
    """The documented commands with these verbs, in the verbs' order."""
    return [words for verb in verbs for words in AT_A_COORDINATOR if words.split()[1] == verb]


@dataclass(slots=True)
class Lab:
    """A coordinator that asks for tokens, an agent with three slots, and a folder with jobs."""

    coordinator: Coordinator
    client: Client
    folder: Path
    mark: Mark

    @property
    def environment(self) -> dict[str, str]:
        return {
            "ELCHE_COORDINATOR": self.coordinator.address,
            "ELCHE_TOKEN": OWN,
            "HOME": str(self.folder),
            "WANDB_API_KEY": "a secret",
            "ELCHE_CONFIG": str(self.folder / "config.toml"),
        }

    def arguments(self, words: str, **names: str) -> list[str]:
        """What follows the program, with a real address, real paths and these names."""
        names |= {"--until-round 17": "--until-round 2"}  # the runs here are shorter
        names |= dict.fromkeys(("head:7717", "gpu1:7717", "127.0.0.1:7717"), self.coordinator.address)
        for name, text in {**names, "~/": f"{self.folder}/", "/run/secrets": str(self.folder / "secrets")}.items():
            words = words.replace(name, text)
        return shlex.split(words)[1:]

    def run(self, words: str, cwd: Path | None = None, **names: str) -> Command:
        """Runs a documented command of `elche` to its end, which must be a good one."""
        arguments = self.arguments(words, **names)
        done = command(self.mark, "elche_client", *arguments, cwd=cwd or self.folder, env=self.environment)
        assert done.code == 0, f"{words}: {done.out}{done.err}"
        return done

    def started(self, words: str, cwd: Path | None = None, **names: str) -> "subprocess.Popen[str]":
        program = shlex.split(words)[0]
        return subprocess.Popen(
            [sys.executable, "-m", MODULES[program], *self.arguments(words, **names)],
            cwd=cwd or self.folder,
            env=self.mark.environment(self.environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def state(self, job: str) -> JobState:
        return self.client.get(job).state


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    mark, folder = Mark(), tmp_path_factory.mktemp("lab")
    write_files(folder)
    (folder / "secrets").mkdir()
    (folder / "secrets" / "WANDB_API_KEY").write_text("a secret")
    (folder / "lab.token").write_text(OWN)
    (folder / "lab.token").chmod(0o600)
    with ExitStack() as stack:
        one = stack.enter_context(coordinator(mark, folder, env={"ELCHE_TOKEN": OWN, "ELCHE_ALLOW_CHAOS": "1"}))
        stack.enter_context(agent(mark, folder, one.address, devices="cpu,cpu,cpu", env={"ELCHE_TOKEN": OWN}))
        lab = Lab(one, stack.enter_context(Client(one.address, token=OWN)), folder, mark)
        for words in LOCALLY:
            if words.startswith("elche certs "):
                lab.run(words)
        yield lab
    mark.assert_none_left()


def write_files(folder: Path) -> None:
    for name, text in FILES.items():
        (folder / name).write_text(text + JOB if name == "train.py" else text, encoding="utf-8")
    (folder / "sharded.py").write_text((JOBS / "sharded.py").read_text())
    frozen = "nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 1))"
    (folder / "lora.py").write_text(
        (folder / "train.py").read_text().replace("return nn.Linear(8, 1)", f"return {frozen}")
    )
    shutil.copytree(JOBS.parents[2] / "examples" / "ports", folder / "examples" / "ports")
    (folder / "train").mkdir()
    (folder / "train" / "digits.py").write_text((folder / "train.py").read_text())
    (folder / LONG).write_text((folder / "train.py").read_text() + "\nfrom dataclasses import replace\n")
    with (folder / LONG).open("a") as steady:
        steady.write("job = replace(job, epochs=100000)\n")


@pytest.fixture
def steady(lab: Lab) -> Iterator[str]:
    """A job that trains on one slot until it is cancelled."""
    job = lab.client.submit(lab.folder / LONG, num_ranks=1).id
    eventually(lambda: lab.client.get(job).epoch_processed > 0, "the job trains")
    yield job
    if not lab.state(job).has_ended:
        lab.client.cancel(job)
    eventually(lambda: lab.state(job).has_ended, "the job ends")


def test_a_command_is_run_here_or_at_a_coordinator() -> None:
    verbs = {words.split()[1] for words in AT_A_COORDINATOR}
    assert verbs == {
        *ABOUT_JOBS,
        "submit",
        "sweep",
        "jobs",
        "top",
        "hosts",
        "doctor",
        "drain",
        "prune",
        "token",
        "context",
        "chaos",
    }
    every = {words for _, words in commands()}
    assert len(OF_BACKUPS) + len(OF_DAEMONS) + len(AT_A_COORDINATOR) + len(LOCALLY) + len(BY_AN_ENGINE) == len(every)


def test_what_is_said_of_a_job_that_trains(lab: Lab, steady: str) -> None:
    for words in of("jobs", "journal", "checkpoint", "top"):
        done = lab.run(words, JOB=steady)
        assert done.out or "checkpoint" in words
    for words in of("scale"):
        lab.run(words, JOB=steady)
    for words in of("pause"):  # with `--off` it goes on
        lab.run(words, JOB=steady)
        wanted = JobState.TRAINING if words.endswith("--off") else JobState.PAUSED
        eventually(lambda wanted=wanted: lab.state(steady) == wanted, words)
    for words in of("cancel"):
        lab.run(words, JOB=steady)
        eventually(lambda: lab.state(steady) == JobState.CANCELLED, words)
    for words in of("resume"):
        following = lab.started(words, JOB=steady)
        (resumed,) = eventually(lambda: [view for view in lab.client.jobs() if not view.state.has_ended], words)
        lab.client.cancel(resumed.job_id)
        assert "cancelled" in following.communicate(timeout=400)[0]


def test_a_job_is_followed_to_its_end(lab: Lab) -> None:
    before = lab.client.submit(lab.folder / LONG, num_ranks=3)
    job = lab.client.submit(lab.folder / SHORT, num_ranks=1, monitor="mse", mode="min").id  # waits in the queue
    following = [lab.started(words, JOB=job) for words in of("watch", "logs", "chaos")]
    begun = following[-1].stdout
    assert begun is not None
    assert "a fault each" in (line := begun.readline()), line  # else the job may have ended before
    before.cancel()
    for one in following:
        said, _ = one.communicate(timeout=400)
        assert one.returncode == 0, said
    for words in of("fetch"):
        lab.run(words, JOB=job)


@pytest.mark.parametrize(
    "words",
    [
        words if "--ranks" in words else pytest.param(words, marks=pytest.mark.long(reason="each loads the file first"))
        for words in of("submit")
    ],
)
def test_a_job_is_submitted(lab: Lab, words: str) -> None:
    before = {view.job_id for view in lab.client.jobs()}
    lab.run(words, **({"train.py": "sharded.py"} if "--group-size" in words else {}))
    (job,) = {view.job_id for view in lab.client.jobs()} - before
    lab.client.cancel(job)


def test_a_sweep_is_run_and_cancelled(lab: Lab) -> None:
    first, second = of("sweep")
    before = len(lab.client.jobs())
    running = lab.started(first)
    eventually(lambda: len(lab.client.jobs()) > before or running.poll() is not None, "trials are submitted")
    lab.run(second)
    said, _ = running.communicate(timeout=400)
    assert "cancelled" in said, said
    eventually(lambda: all(view.state.has_ended for view in lab.client.jobs()), "its jobs end")


def test_hosts_tokens_and_contexts(lab: Lab) -> None:
    (host,) = {device.host for device in lab.client.hosts()}
    for words in of("prune"):
        lab.run(words, **dict.fromkeys(("/srv/elche-artifacts", "/srv/elche"), str(lab.folder / "work")))
    for words in of("hosts", "doctor", "drain"):
        lab.run(words, HOST=host, **{"gpu-1": host, "gpu-3": host})
    lab.client.drain(host, is_drained=False)
    for words in of("context"):
        lab.run(words)
    with Tokens(lab.coordinator.address, token=OWN) as tokens:
        made = tokens.make("anybody", Role.VIEWER, expires=None)[0].id
    for words in of("token"):
        lab.run(words, **{"3f9a1c20": made})


@pytest.mark.parametrize("words", OF_DAEMONS)
def test_a_daemon_starts(lab: Lab, words: str, tmp_path: Path) -> None:
    is_worker = words.startswith("elche-worker")
    if not is_worker:
        words = re.sub(r"--\w+ [\d.]+:\d+", "", words) + " --listen 127.0.0.1:0 --http 127.0.0.1:0"
        words = re.sub(r"(/var/lib|~)/elche", str(tmp_path / "data"), words)
        words += "" if "--data" in words else f" --data {tmp_path / 'data'}"
    process = lab.started(words)
    assert process.stdout is not None
    deadline_s = time.monotonic() + 100
    said = ""
    while not (ATTENDED if is_worker else LISTENING).search(said):
        said += process.stdout.readline()
        assert process.poll() is None, said
        assert time.monotonic() < deadline_s, said
    process.send_signal(signal.SIGTERM)
    said += process.communicate(timeout=400)[0]
    assert process.returncode == 0, said


def test_a_folder_is_backed_up_and_restored(lab: Lab, tmp_path: Path) -> None:
    assert [words.split()[1] for words in OF_BACKUPS] == ["backup", "restore"]
    for words, data in zip(OF_BACKUPS, (lab.coordinator.data, tmp_path / "data"), strict=True):
        words = words.replace("/var/lib/elche", str(data)).replace("/backup", str(tmp_path))
        done = command(lab.mark, "elche_coordinator", *shlex.split(words)[1:], cwd=lab.folder)
        assert done.code == 0, f"{words}: {done.out}{done.err}"


@pytest.mark.parametrize("words", BY_AN_ENGINE)
def test_an_engine_that_is_not_here_is_named(lab: Lab, words: str) -> None:
    """What they do with an engine is tested in system/test_launchers.py."""
    (lab.folder / "pool.token").write_text(OWN)
    environment = lab.environment | {"PATH": "", "RAY_ADDRESS": "127.0.0.1:1"}
    del environment["ELCHE_TOKEN"]
    words = words.replace("ray://head:10001", "127.0.0.1:1")
    done = command(lab.mark, "elche_client", *lab.arguments(words), cwd=lab.folder, env=environment, limit_s=400)
    assert done.code == 2, done.out + done.err
    assert re.search(r"(ssh|squeue|scancel) is not found|no Ray cluster is reached", done.err), done.err
    assert "Traceback" not in done.err


@pytest.mark.long(reason="each of them is a run, and what `elche run` does is tested in other files")
@pytest.mark.parametrize("words", [words for words in LOCALLY if words.split()[1] in ("run", "init", "plan")])
def test_it_is_run_here(lab: Lab, words: str, tmp_path: Path) -> None:
    write_files(tmp_path)
    if words == "elche init train.py":
        (tmp_path / "train.py").unlink()
    lab.run(words, cwd=tmp_path)


@pytest.mark.long(reason="each of them is a run, and `elche resume` is tested in test_checkpoints")
@pytest.mark.parametrize("name", ["train.py", "sharded.py"])
def test_a_run_that_was_stopped_is_gone_on_with(lab: Lab, name: str, tmp_path: Path) -> None:
    write_files(tmp_path)
    settings = ["--epochs", "30", "--timeline", "true", "--audit", "true", "--checkpoint-every-epochs", "1"]
    first = lab.started(shlex.join(["elche", "run", name, "--device", "cpu", "--ranks", "1", *settings]), cwd=tmp_path)
    eventually(lambda: list(tmp_path.glob("runs/*/**/manifest.json")), "it has a checkpoint")
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=400)
    (run,) = tmp_path.glob("runs/*-*")
    of_a_run = [words for words in LOCALLY if RUN in words and ("--group-size" in words) == (name == "sharded.py")]
    assert of_a_run
    for words in of_a_run:
        lab.run(words, cwd=tmp_path, **{RUN: str(run)})
