"""Engines start agents, lose them and start them again; jobs train on them, and count each sample once."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from elche_client import Client, JobHandle
from elche_client.events import JobState
from support.networks import lan, may_make_networks
from support.real_processes import Command, Coordinator, Mark, command, coordinator, eventually

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

LINEAR = Path(__file__).parents[1] / "processes" / "jobs" / "linear.py"
SLOWLY = """
import dataclasses, time

def slowly(model, batch, step=train_step):
    time.sleep(0.02)
    return step(model, batch)

job = dataclasses.replace(job, train_step=slowly)
"""
NUM_SAMPLES = 500
EPOCHS = 150
TOKEN = "engines and their token"
WORKER = f"{sys.executable} -m elche_worker.agent --devices cpu"


@dataclass(slots=True)
class Lab:
    """A coordinator, and the commands that start agents for it."""

    coordinator: Coordinator
    address: str
    """Where agents find it."""
    client: Client
    folder: Path
    mark: Mark
    env: dict[str, str]

    def elche(self, *arguments: str) -> Command:
        return command(self.mark, "elche_client", *arguments, cwd=self.folder, env=self.env, limit_s=60)

    def up(self, *arguments: str) -> None:
        done = self.elche("up", "--coordinator", self.address, "--worker", WORKER, *arguments)
        assert done.code == 0, done.err

    def states(self, *arguments: str) -> list[str]:
        done = self.elche("agents", "--json", *arguments)
        assert done.code == 0, done.err
        return [one["state"] for one in json.loads(done.out)]

    def until_attended(self, num_hosts: int) -> None:
        eventually(lambda: len(self.client.hosts()) == num_hosts, f"{num_hosts} hosts attend", 60)

    def train(self, num_ranks: int) -> JobHandle:
        """A job that trains."""
        path = self.folder / "linear.py"
        path.write_text(LINEAR.read_text() + SLOWLY)
        job = self.client.submit(path, num_ranks=num_ranks, min_ranks=1, epochs=EPOCHS)
        self.until_epoch(job, 2)
        return job

    def until_epoch(self, job: JobHandle, epoch: int) -> None:
        eventually(lambda: self.client.get(job.id).epoch >= epoch, f"it trains epoch {epoch}", 60)

    def until_ranks(self, job: JobHandle, number: int) -> None:
        def is_so() -> bool:
            held = [slot for host in self.client.hosts() for slot in host.slots if slot.job_id == job.id]
            return len(held) == number

        eventually(is_so, f"{number} ranks", 60)

    def said(self, text: str) -> int:
        """How often the coordinator has said this."""
        return self.coordinator.log.read_text().count(text)

    def ends_exactly(self, job: JobHandle) -> None:
        result = job.result()
        assert result.state is JobState.SUCCEEDED, result.error
        assert result.committed_samples == (NUM_SAMPLES,) * EPOCHS


@contextmanager
def lab(mark: Mark, folder: Path, env: dict[str, str], host: str = "127.0.0.1") -> Iterator[Lab]:
    token = folder / "pool.token"
    token.touch(mode=0o600)
    token.write_text(TOKEN)
    env = {"ELCHE_TOKEN_FILE": str(token), **env}
    with ExitStack() as stack:
        one = stack.enter_context(coordinator(mark, folder, listen=f"{host}:0", env=env))
        client = stack.enter_context(Client(one.address, token=TOKEN))
        yield Lab(one, one.address, client, folder, mark, env)


# Slurm


@pytest.fixture
def slurm(tmp_path: Path, mark: Mark) -> Iterator[dict[str, str]]:
    """A cluster of four nodes, each with room for one agent; what its commands need in their environment."""
    if shutil.which("slurmctld") is None:
        pytest.skip("Slurm is not installed")
    folder = Path(tmp_path, "slurm")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    up = Path(__file__).parents[1] / "support" / "slurm.sh"
    env = {"SLURM_CONF": str(folder / "slurm.conf")}
    subprocess.run(["bash", str(up), "up", str(folder), "4", str(port)], check=True, env=mark.environment())
    try:
        yield env
    finally:
        subprocess.run(["bash", str(up), "down", str(folder)], check=False, env=mark.environment(env))
        mark.assert_none_left(limit_s=40)


def told(env: dict[str, str], *words: str) -> str:
    """What a command of Slurm says."""
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | env, check=True)
    return done.stdout


def running(env: dict[str, str]) -> list[list[str]]:
    """Id, node and time of start of each job that runs."""
    return [line.split() for line in told(env, "squeue", "-h", "-r", "-t", "R", "-o", "%i %N %S").splitlines()]


def lose_node(name: str) -> None:
    """Kills all that runs on a node, as a loss of power would: first slurmd and its helpers, who would tell."""
    for of_node in (is_slurmd, is_helper, is_of_job):
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, IndexError):
                if of_node(folder, name):
                    os.kill(int(folder.name), signal.SIGKILL)


def is_slurmd(folder: Path, node: str) -> bool:
    program, *arguments = (folder / "cmdline").read_text().split("\0")
    return program.endswith("slurmd") and node in arguments


def is_helper(folder: Path, node: str) -> bool:
    """Whether it is the slurmstepd of a process that `is_of_job`."""
    children = (folder / "task" / folder.name / "children").read_text().split()
    is_parent = any(is_of_job(folder.parent / child, node) for child in children)
    return is_parent and "slurmstepd" in (folder / "cmdline").read_text()


def is_of_job(folder: Path, node: str) -> bool:
    return f"SLURMD_NODENAME={node}" in (folder / "environ").read_text(errors="replace").split("\0")


def test_slurm(slurm: dict[str, str], tmp_path: Path, mark: Mark) -> None:
    """More and fewer agents; one is cancelled while a job trains, one put back into the queue, a node is lost."""
    with lab(mark, tmp_path, slurm) as one:
        one.up("--on", "slurm", "--agents", "2")
        one.until_attended(2)
        job = one.train(3)
        one.up("--on", "slurm", "--agents", "3")
        one.until_ranks(job, 3)

        cancelled, *_ = running(slurm)
        told(slurm, "scancel", cancelled[0])
        one.until_ranks(job, 2)
        one.up("--on", "slurm", "--agents", "3")
        one.until_ranks(job, 3)

        noticed, *_ = running(slurm)
        told(slurm, "scancel", "--batch", "--signal=USR1", noticed[0])
        one.until_ranks(job, 2)
        eventually(lambda: noticed not in running(slurm), "it has left")
        one.until_ranks(job, 3)
        assert noticed[0] in [id for id, *_ in running(slurm)], "it has come back under its number"

        lost, *_ = running(slurm)
        lose_node(lost[1])
        one.until_ranks(job, 2)
        one.until_ranks(job, 3)
        assert (one.said("has left"), one.said("is lost")) == (2, 1)
        one.ends_exactly(job)

        one.up("--on", "slurm", "--agents", "1")
        one.until_attended(1)
        assert one.states("--on", "slurm").count("running") == 1
        assert one.elche("down", "--on", "slurm").code == 0
        one.until_attended(0)
        eventually(lambda: not one.states("--on", "slurm"), "the jobs have ended")


# ssh


SSHD = """
AuthorizedKeysFile {folder}/key.pub
HostKey {folder}/host
ListenAddress 10.77.9.{number}
Port 2222
PidFile none
StrictModes no
UsePAM no
SetEnv HOME={folder}/home-{number} {mark}
"""
CLIENT = """
IdentityFile {folder}/key
Port 2222
StrictHostKeyChecking no
UserKnownHostsFile /dev/null
LogLevel ERROR
"""


@pytest.fixture
def hosts(tmp_path: Path, mark: Mark) -> Iterator[list[str]]:
    """Three hosts with names and homes of their own, which ssh reaches with {tmp_path}/ssh_config."""
    if not may_make_networks() or shutil.which("sshd") is None:
        pytest.skip("namespaces cannot be made here, or sshd is not installed")
    for name in ("key", "host"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)], check=True)
    (tmp_path / "ssh_config").write_text(CLIENT.format(folder=tmp_path))
    Path("/run/sshd").mkdir(exist_ok=True)
    with ExitStack() as stack:
        for number, namespace in enumerate(stack.enter_context(lan(3)), start=1):
            (tmp_path / f"home-{number}").mkdir()
            marked = f"ELCHE_TEST_MARK={mark.value}"
            config = tmp_path / f"sshd-{number}"
            config.write_text(SSHD.format(folder=tmp_path, number=number, mark=marked))
            start = f"hostname gpu{number}; exec $(command -v sshd) -D -e -f {config}"
            sshd = subprocess.Popen(
                ["ip", "netns", "exec", namespace, "unshare", "--uts", "sh", "-c", start],
                stderr=(tmp_path / f"sshd-{number}.log").open("w"),
                env=mark.environment(),
            )
            stack.callback(sshd.wait)
            stack.callback(sshd.kill)
            eventually(lambda log=tmp_path / f"sshd-{number}.log": "listening" in log.read_text(), "sshd listens")
        yield [f"10.77.9.{number}" for number in (1, 2, 3)]
        for pid in mark.living("elche"):
            os.kill(pid, signal.SIGKILL)


def test_ssh(hosts: list[str], tmp_path: Path, mark: Mark) -> None:
    """An agent is killed while a job trains, and starts again; a host is added; one is not there."""
    (tmp_path / "hosts.txt").write_text(f"{hosts[0]}\n# the second\n{hosts[1]} --label zone=eu\n")
    engine = ("--on", "ssh", "hosts.txt")
    own = ("--", "-F", str(tmp_path / "ssh_config"))
    with lab(mark, tmp_path, {}, host="10.77.9.254") as one:
        one.up(*engine, *own)
        one.until_attended(2)
        assert {host.host for host in one.client.hosts()} == {"gpu1", "gpu2"}
        assert [host.labels for host in one.client.hosts() if host.host == "gpu2"] == [{"zone": "eu"}]
        job = one.train(3)
        with (tmp_path / "hosts.txt").open("a") as file:
            file.write(hosts[2])
        one.up(*engine, *own)
        one.until_ranks(job, 3)
        assert one.states(*engine, *own) == ["running"] * 3

        killed = min(mark.living("elche_worker.agent --devices"))
        os.kill(killed, signal.SIGKILL)
        one.until_ranks(job, 2)
        one.until_ranks(job, 3)
        one.ends_exactly(job)

        with (tmp_path / "hosts.txt").open("a") as file:
            file.write("\n10.77.9.77")
        done = one.elche("down", *engine, *own, "-o", "ConnectTimeout=1")
        assert (done.code, "10.77.9.77: " in done.complaint) == (2, True)
        one.until_attended(0)
        assert (tmp_path / "home-1" / ".elche" / "elche" / "gpu1" / "token").stat().st_mode & 0o777 == 0o600
