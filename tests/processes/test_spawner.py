"""Ranks are forked from one process of their agent's, which has imported torch."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from elche.errors import JobFailed
from elche.processors import threads_per_rank
from elche_client import Client
from support.gpus import VARIABLE
from support.real_processes import Cluster, Command, Mark, agent, coordinator, eventually

JobFile = Callable[..., Path]
ENDLESS = "job = dataclasses.replace(job, epochs=100_000)"


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_spawner_that_is_killed_takes_its_ranks_and_is_replaced(
    mark: Mark, tmp_path: Path, job_file: JobFile
) -> None:
    endless = job_file("linear.py", "import dataclasses", ENDLESS)
    with (
        coordinator(mark, tmp_path) as one,
        agent(mark, tmp_path, one.address) as other,
        Client(one.address, token="") as client,
    ):
        handle = client.submit(endless, num_ranks=2, on_rank_loss="fail")
        eventually(lambda: client.jobs()[0].num_rounds > 2, "it trains")
        (spawner,) = mark.living("elche spawner")
        ranks = mark.living("elche rank")
        assert sorted(title.strip() for title in ranks.values()) == [f"elche rank {n} of {handle.id}" for n in (0, 1)]
        assert {parent_of(pid) for pid in ranks} == {spawner}

        os.kill(spawner, signal.SIGKILL)
        with pytest.raises(JobFailed, match="was killed by signal 9"):
            handle.result()
        assert "the spawner, from which ranks are forked, has ended (signal 9), and 2 with it" in other.log.read_text()
        mark.assert_none_left("elche rank")

        assert client.submit(job_file(), num_ranks=2).result().committed_samples
        (new,) = mark.living("elche spawner")
        assert new != spawner
        assert " ERROR " not in other.log.read_text()


STOPPING = """
def stop(rank, epoch):
    os.kill(os.getppid(), signal.SIGSTOP)

import dataclasses, signal
job = dataclasses.replace(job, epoch_fn=stop, epochs=2)
"""


def test_a_spawner_that_a_job_stops_goes_on(mark: Mark, tmp_path: Path, job_file: JobFile) -> None:
    """Ranks of no job of the host began or ended any more."""
    with (
        coordinator(mark, tmp_path) as one,
        agent(mark, tmp_path, one.address) as other,
        Client(one.address, token="") as client,
    ):
        assert client.submit(job_file("linear.py", STOPPING), num_ranks=1).result().committed_samples
        assert "was stopped (SIGSTOP): it goes on" in other.log.read_text()


def test_a_spawner_ends_with_its_agent_while_it_imports_torch(tmp_path: Path) -> None:
    """`elche run` had ended after Ctrl-C, and this process imported for seconds."""
    (tmp_path / "torch.py").write_text("import time\nprint('imports', flush=True)\ntime.sleep(1000)\n")
    ours, other = socket.socketpair()
    with other:
        spawner = subprocess.Popen(
            [sys.executable, "-P", "-m", "elche_worker.rank", str(other.fileno())],
            stdout=subprocess.PIPE,
            pass_fds=[other.fileno()],
            env={**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
        )
    assert spawner.stdout is not None
    with spawner.stdout, ours:
        assert spawner.stdout.readline() == b"imports\n"
    try:
        assert spawner.wait(400) == 0
    finally:
        spawner.kill()


SAYS_WHERE = (
    "import os, sys, torch",
    "threads = os.environ['OMP_NUM_THREADS'], torch.get_num_threads()",
    "print('loaded in a fork of', os.getppid(), *threads, file=sys.stderr)",
    "import dataclasses",
    "job = dataclasses.replace(job, evaluate=None, epochs=1)",
)


def test_a_run_on_all_gpus_imports_torch_once_whatever_was_expected(
    elche: Callable[..., Command], job_file: JobFile, tmp_path: Path
) -> None:
    """The process of which the file's check was forked is that of the ranks, and of the trials of the devices: how many
    there are is known after them only.
    """
    env = {VARIABLE: "2", "TMPDIR": str(tmp_path)}
    done = elche("run", str(job_file("linear.py", *SAYS_WHERE)), "--out", "out", env=env)
    assert done.code == 0, done.err
    said = [line for line in done.err.splitlines() if line.startswith("loaded in")]
    logs = [(tmp_path / "out" / f"rank-{rank}.log").read_text() for rank in (0, 1)]
    ranks = [line for log in logs for line in log.splitlines() if line.startswith("loaded in")]
    assert len(ranks) == 2
    assert {line.split()[5] for line in said} == {line.split()[5] for line in ranks}, (said, ranks)
    assert {tuple(line.split()[6:]) for line in ranks} == {(str(threads_per_rank(2)),) * 2}


@pytest.mark.long(reason="it takes long to show what one line does")
def test_ranks_draw_numbers_of_their_own(mark: Mark, tmp_path: Path, job_file: JobFile) -> None:
    """Forked processes begin with the state of what they were forked from: each is seeded by its place in the job."""
    draw = """
import random, numpy
def drawn(rank, epoch):
    if epoch == 0:
        Path(f"{__file__}.{rank.rank}").write_text(str([random.random(), numpy.random.rand(), float(torch.rand(()))]))
import dataclasses
from pathlib import Path
job = dataclasses.replace(job, epoch_fn=drawn, epochs=1, anchor=1)
"""
    path = job_file("linear.py", draw)
    drawn = []
    with (
        coordinator(mark, tmp_path) as one,
        agent(mark, tmp_path, one.address),
        Client(one.address, token="") as client,
    ):
        for _ in range(2):
            client.submit(path, num_ranks=2).result()
            drawn.append([Path(f"{path}.{rank}").read_text() for rank in (0, 1)])
    assert drawn[0] == drawn[1]
    assert drawn[0][0] != drawn[0][1]
    for first, second in zip(*(text.strip("[]").split(", ") for text in drawn[0]), strict=True):
        assert first != second


def test_a_log_that_somebody_removes_costs_nothing_but_its_end(cluster: Cluster, job_file: JobFile) -> None:
    """Once it stopped the thread that hears of every process that ends."""
    path = job_file("linear.py", "import dataclasses", ENDLESS)
    handle = cluster.client.submit(path, num_ranks=2, on_rank_loss="fail")
    eventually(lambda: cluster.client.jobs()[-1].num_rounds > 2, "it trains")
    for pid in cluster.mark.living("elche rank"):
        Path(os.readlink(f"/proc/{pid}/fd/1")).unlink()
    victim = min(cluster.mark.living("elche rank"))
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(JobFailed, match="was killed by signal 9"):
        handle.result()
    assert cluster.client.submit(job_file(), num_ranks=2).result().committed_samples
