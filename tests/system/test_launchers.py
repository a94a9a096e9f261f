"""Engines start agents, lose them and start them again; jobs train on them, and count each sample once."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from elche.torchrun import free_port
from support.fleets import is_exact_so_far, lab
from support.networks import lan, may_make_networks
from support.real_processes import Mark, eventually

pytestmark = [pytest.mark.system, pytest.mark.timeout(1800)]

# Slurm


@pytest.fixture
def slurm(tmp_path: Path, mark: Mark) -> Iterator[dict[str, str]]:
    """A cluster of four nodes, each with room for one agent; what its commands need in their environment."""
    if shutil.which("slurmctld") is None:
        pytest.skip("Slurm is not installed")
    folder = Path(tmp_path, "slurm")
    up = Path(__file__).parents[1] / "support" / "slurm.sh"
    env = {"SLURM_CONF": str(folder / "slurm.conf")}
    subprocess.run(["bash", str(up), "up", str(folder), "4", str(free_port())], check=True, env=mark.environment())
    try:
        yield env
    finally:
        subprocess.run(["bash", str(up), "down", str(folder)], check=False, env=mark.environment(env))
        mark.assert_none_left(limit_s=400)


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
        one.until_lost(1)
        one.until_ranks(job, 3)
        assert (one.said("has left"), one.said("is lost")) == (2, 1)
        is_exact_so_far(job)

        job = one.train(3)
        urgent = told(
            slurm, "sbatch", "--parsable", "--partition=urgent", "--output=/dev/null", "--wrap=sleep 600"
        ).strip()
        one.until_ranks(job, 2)
        eventually(lambda: [urgent] in [[id] for id, *_ in running(slurm)], "it has the node")
        told(slurm, "scancel", urgent)
        one.until_ranks(job, 3)
        assert (one.said("has left"), one.said("is lost")) == (3, 1), "one was preempted, and left"
        is_exact_so_far(job)

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
        one.until_lost(1)
        one.until_ranks(job, 3)
        is_exact_so_far(job)

        with (tmp_path / "hosts.txt").open("a") as file:
            file.write("\n10.77.9.77")
        done = one.elche("down", *engine, *own, "-o", "ConnectTimeout=1")
        assert (done.code, "10.77.9.77: " in done.complaint) == (2, True)
        one.until_attended(0)
        assert (tmp_path / "home-1" / ".elche" / "elche" / "gpu1" / "token").stat().st_mode & 0o777 == 0o600


# Ray


def test_ray(tmp_path: Path, mark: Mark) -> None:
    """Agents are added, an actor is killed while a job trains, a node is lost, an agent leaves; a script runs a job."""
    if not may_make_networks():
        pytest.skip("namespaces cannot be made here")
    story = shlex.join([sys.executable, str(Path(__file__).with_name("ray_story.py")), str(tmp_path), mark.value])
    told = subprocess.run(
        ["unshare", "--net", "sh", "-c", f"ip link set lo up; exec {story}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
        env=mark.environment({"PYTHONPATH": str(Path(__file__).parents[1])}),
    )
    for pid in mark.living():
        os.kill(pid, signal.SIGKILL)
    assert "all told" in told.stdout, told.stdout + told.stderr
