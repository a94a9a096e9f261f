"""Ranks in containers: they train as others do, and find nothing of the agent's user."""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from elche.errors import InvalidJob, JobFailed
from elche_client import Client
from elche_client.events import JobState
from elche_worker.agent.confinement import PROGRAM, CannotConfine, Confinement
from support.fleets import SLOWLY
from support.real_processes import Mark, agent, coordinator, eventually

pytestmark = pytest.mark.system
JOB = Path(__file__).parents[1] / "processes" / "jobs" / "linear.py"
OWN = "correct horse battery"
CAN = (
    shutil.which(PROGRAM) is not None
    and not subprocess.run(
        [PROGRAM, "--unshare-user", "--ro-bind", "/", "/", "true"], capture_output=True, check=False
    ).returncode
)
needs_containers = pytest.mark.skipif(not CAN, reason="containers cannot be made here")
SPY = """
import json
import socket
from pathlib import Path

def can_write(path):
    try:
        Path(path).touch()
    except OSError:
        return False
    return True

def can_read(path):
    try:
        return bool(Path(path).read_bytes())
    except OSError:
        return False

def spy():
    token, secret, home, tmp, out = TARGETS
    found = {
        "token": can_read(token),
        "secret": can_read(secret),
        "home": can_read(home),
        "tmp": can_read(tmp),
        "writes": [path for path in ("/etc/elche-was-here", out) if can_write(path)],
        "kept nowhere": can_write(home + "2"),
        "processes": [Path("/proc", one, "cmdline").read_text() for one in os.listdir("/proc") if one.isdigit()],
    }
    Path(out).with_name("found").write_text(json.dumps(found))

if os.environ.get("ELCHE_RANK") == "0":
    spy()
"""


def job_that_writes_to(folder: Path, more: str = "") -> Path:
    """A job that notes there what it trains."""
    path = folder.with_name("job") / "linear.py"
    path.parent.mkdir()
    path.write_text(JOB.read_text().replace("Path(__file__)", f"Path({str(folder / 'notes')!r})") + more)
    return path


@needs_containers
def test_a_rank_finds_nothing_of_the_agents_user(tmp_path: Path, mark: Mark) -> None:
    """Its token, secrets, home and processes; it writes where it is allowed, and trains as it would elsewhere."""
    token, secrets, home, out = (tmp_path / name for name in ("token", "secrets", "home", "out"))
    for folder in (secrets, home, out):
        folder.mkdir()
    (secrets / "KEY").write_text("a secret")
    (home / "diary").write_text("private")
    token.touch(mode=0o600)
    token.write_text(OWN)
    tmp = Path("/tmp") / f"elche-confinement-{os.getpid()}"
    tmp.write_text("of others")
    targets = [str(one) for one in (token, secrets / "KEY", home / "diary", tmp, out / "model")]
    path = job_that_writes_to(out, f"TARGETS = {targets!r}{SPY}")
    env = {"ELCHE_TOKEN_FILE": str(token), "HOME": str(home)}
    own = ("--confine", "--secrets", str(secrets), "--writable", str(out))
    try:
        with (
            coordinator(mark, tmp_path, env=env) as one,
            agent(mark, tmp_path, one.address, *own, env=env),
            Client(one.address, token=OWN) as client,
        ):
            result = client.submit(path, num_ranks=2, verify_rounds=True).result()
            assert result.state is JobState.SUCCEEDED, result.error
            assert result.committed_samples == (500, 500, 500)
    finally:
        tmp.unlink()
    found = json.loads((out / "found").read_text())
    assert not any(found[name] for name in ("token", "secret", "home", "tmp")), found
    assert found["writes"] == [targets[-1]]
    assert not (home / "diary2").exists()
    assert all("elche_worker.agent" not in line and "elche_coordinator" not in line for line in found["processes"])
    mark.assert_none_left()


@needs_containers
def test_a_rank_in_a_container_is_killed_stopped_and_watched(tmp_path: Path, mark: Mark) -> None:
    """As others are: its death is told, its stacks can be asked for, and nothing of it is left."""
    out = tmp_path / "out"
    out.mkdir()
    with (
        coordinator(mark, tmp_path) as one,
        agent(mark, tmp_path, one.address, "--confine", "--writable", str(out)) as host,
        Client(one.address) as client,
    ):
        job = client.submit(job_that_writes_to(out, SLOWLY), num_ranks=2, epochs=100_000)
        eventually(lambda: client.get(job.id).epoch > 2, "it trains")
        ranks = mark.living("elche rank")
        assert len(ranks) == 2
        os.kill(min(ranks), signal.SIGKILL)
        eventually(lambda: len(set(mark.living("elche rank")) - set(ranks)) == 1, "it is started again")
        epoch = client.get(job.id).epoch
        eventually(lambda: client.get(job.id).epoch > epoch + 2, "it trains on")
        job.cancel()
        eventually(lambda: not mark.living("elche rank") and not mark.living(PROGRAM), "its containers are gone")
        assert host.process.poll() is None
    mark.assert_none_left()


TRICKS = """
import json
from pathlib import Path

def links_to(token):
    for one in (*Path.cwd().glob("*.log"), *OUT.glob("rank-*")):
        one.unlink()
    (OUT / "rank-0.log").symlink_to(token)
    (OUT / "rank-0.log.times").symlink_to("/dev/zero")
    (OUT / "rank-0.log.stacks").symlink_to(token)
    (OUT / "model.safetensors").symlink_to(token)
    os.mkfifo(OUT / "rank-1.log")

if os.environ.get("ELCHE_RANK") == "0":
    while not (OUT / "other").exists():
        time.sleep(0.01)  # started later, rank 1 would have a new log
    links_to(TOKEN)
    os._exit(3)
(OUT / "other").touch()
time.sleep(1000)
"""


@needs_containers
def test_what_a_rank_puts_in_place_of_its_files_leads_the_agent_nowhere(tmp_path: Path, mark: Mark) -> None:
    """Links to the agent's token and to an endless file, and a pipe."""
    out, folder = tmp_path / "out", tmp_path / "private"
    out.mkdir()
    folder.mkdir()
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(OWN)
    job = tmp_path / "job" / "linear.py"
    job.parent.mkdir()
    job.write_text(f"{JOB.read_text()}OUT, TOKEN = Path({str(out)!r}), {str(token)!r}\n{TRICKS}")
    again = job.with_name("again.py")
    again.write_text(JOB.read_text().replace("Path(__file__)", f"Path({str(out / 'notes')!r})"))
    env = {"ELCHE_TOKEN_FILE": str(token)}
    more = ("--confine", "--writable", str(out))
    with (
        coordinator(mark, tmp_path, env=env) as one,
        agent(mark, tmp_path, one.address, *more, env=env) as host,
        Client(one.address, token=OWN) as client,
    ):
        told = client.submit(job, num_ranks=2, output_dir=str(out), on_rank_loss="fail")
        with pytest.raises(JobFailed, match="rank 0") as failed:
            told.result()
        assert OWN not in str(failed.value)
        for rank in (0, 1):
            with pytest.raises(InvalidJob, match="cannot be read"):
                list(told.logs(rank=rank))
        assert token.read_text() == OWN, "its stacks were not written there"
        shutil.rmtree(out)
        out.symlink_to(folder)  # as a rank of before might have left it
        for place in (out / "x", tmp_path / "elsewhere"):
            with pytest.raises(JobFailed) as failed:
                client.submit(again, num_ranks=1, output_dir=str(place)).result()
            assert "the rank cannot be started" in failed.value.traceback
        assert sorted(one.name for one in folder.iterdir()) == ["token"]
        assert not (tmp_path / "elsewhere").exists()
        assert host.process.poll() is None


@needs_containers
def test_a_token_is_hidden_wherever_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside certificates, which ranks may read, in a folder that they may change, and where the agent was started."""
    for name in ("certificates", "writable", "start"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "token").write_text(OWN)
    monkeypatch.chdir(tmp_path / "start")
    monkeypatch.syspath_prepend(str(tmp_path / "start"))
    tokens = [tmp_path / name / "token" for name in ("certificates", "writable")]
    confined = Confinement(writable=[tmp_path / "writable"], readable=[tmp_path / "certificates"], secrets=tokens)
    seen = [*tokens, tmp_path / "start" / "token"]
    script = "; ".join(f"cat {one}; echo x > {one}" for one in seen)
    done = subprocess.run([*confined.command(), "sh", "-c", script], capture_output=True, text=True, check=False)
    assert OWN not in done.stdout
    assert [one.read_text() for one in seen] == [OWN] * 3
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    done = subprocess.run(
        [*confined.command(), "sh", "-c", f"ls {tmp_path}"], capture_output=True, text=True, check=True, cwd="/"
    )
    assert done.stdout.split() == ["certificates", "writable"]


def test_where_containers_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CannotConfine, match="package bubblewrap"):
        Confinement(writable=()).check()
    (tmp_path / PROGRAM).write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    (tmp_path / PROGRAM).chmod(0o755)
    with pytest.raises(CannotConfine, match="user namespaces may be off: bwrap: No permissions"):
        Confinement(writable=()).check()
