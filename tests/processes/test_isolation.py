"""What user code must not get at, and what it must not leave behind."""

import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from elche.errors import JobFailed
from elche_client import Client
from support.real_processes import Cluster, Mark, agent, coordinator, eventually

JobFile = Callable[..., Path]
TOKEN = "the-token-of-the-whole-cluster"

SNOOPING = """
import gc

def dump(rank, epoch):
    folder = Path(__file__).parent
    seen = str(dict(os.environ)).encode()
    for pid in ("self", str(os.getppid())):
        seen += Path(f"/proc/{pid}/environ").read_bytes()
    (folder / f"environment-{rank.rank}").write_bytes(seen)
    own = [one.secret for one in gc.get_objects() if type(one).__name__ == "Launch"]
    (folder / f"secret-{rank.rank}").write_text(" ".join(own))
    while not (folder / "seen").exists():
        time.sleep(0.01)

import dataclasses
job = dataclasses.replace(job, epoch_fn=dump, epochs=1)
"""


PIECE_BYTES = 1 << 24


def in_memory(pid: int, *texts: bytes) -> set[bytes]:
    """Those of the texts that a process has in memory of its own, which is read in pieces: it may be gigabytes."""
    found, longest = set(), max(map(len, texts))
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            bounds, rights, _, _, inode, *name = line.split()
            start, end = (int(bound, 16) for bound in bounds.split("-"))
            if rights.startswith("rw") and inode == "0" and name not in (["[vvar]"], ["[vsyscall]"]):
                for at in range(start, end, PIECE_BYTES):
                    with suppress(OSError):
                        memory.seek(at)
                        piece = memory.read(min(PIECE_BYTES + longest, end - at))
                        found.update(text for text in texts if text in piece)
    return found


def test_a_rank_knows_its_own_secret_and_neither_the_token_nor_anothers(
    mark: Mark, tmp_path: Path, job_file: JobFile
) -> None:
    with (
        coordinator(mark, tmp_path, env={"ELCHE_TOKEN": TOKEN}) as one,
        agent(mark, tmp_path, one.address, env={"ELCHE_TOKEN": TOKEN}),
        Client(one.address, token=TOKEN) as client,
    ):
        handle = client.submit(job_file("linear.py", SNOOPING), num_ranks=2)
        files = [tmp_path / f"secret-{rank}" for rank in (0, 1)]
        secrets = [eventually(lambda path=path: path.exists() and path.read_text(), path.name) for path in files]
        pids = {title.split()[2]: pid for pid, title in mark.living("elche rank").items()}
        kept = [secret.encode() for secret in secrets]
        held = [in_memory(pids[rank], TOKEN.encode(), *kept) for rank in ("0", "1")]
        (spawner,) = mark.living("elche spawner")
        assert in_memory(spawner, *kept) == set()
        (tmp_path / "seen").touch()
        handle.result()
    assert all(len(secret) > 30 and " " not in secret for secret in secrets)
    for rank in (0, 1):
        assert held[rank] == {kept[rank]}, "its own, else nothing is looked at"
        environment = (tmp_path / f"environment-{rank}").read_bytes()
        assert b"PATH" in environment
        assert TOKEN.encode() not in environment
        assert b"ELCHE_TOKEN" not in environment


DETACHING = """
import subprocess

def leave(rank, epoch):
    if epoch == 0 and rank.rank == 0:
        subprocess.Popen(["setsid", "sleep", "6001"])
        if os.fork() == 0:  # a daemon, as the book says
            os.setsid()
            if os.fork() == 0:
                os.execvp("sleep", ["sleep", "6002"])
            os._exit(0)
        (Path(__file__).parent / "left").touch()

import dataclasses
job = dataclasses.replace(job, epoch_fn=leave, epochs=EPOCHS)
"""


CANCELLED = pytest.param("is cancelled", marks=pytest.mark.long(reason="it ends another job of the same worker first"))


@pytest.mark.parametrize("how", ["succeeds", CANCELLED, "its agent is killed"])
def test_what_user_code_detaches_ends_with_its_job(how: str, mark: Mark, tmp_path: Path, job_file: JobFile) -> None:
    epochs = 2 if how == "succeeds" else 100_000
    path = job_file("linear.py", f"EPOCHS = {epochs}", DETACHING)
    with (
        coordinator(mark, tmp_path) as one,
        agent(mark, tmp_path, one.address, devices="cpu,cpu,cpu") as other,
        Client(one.address, token="") as client,
    ):
        handle = client.submit(path, num_ranks=2)
        if how == "succeeds":
            handle.result()
        else:
            eventually((tmp_path / "left").exists, "user code has left something")
            eventually(lambda: len(mark.living("sleep 600")) == 2, "it runs")
            if how == "is cancelled":
                client.submit(job_file(), num_ranks=1, epochs=1).result()
                assert len(mark.living("sleep 600")) == 2, "it ends with its own job alone"
                client.cancel(handle.id)
            else:
                other.process.kill()
                other.process.wait()
        mark.assert_none_left("sleep 600", limit_s=400)


def test_logs_and_folders_are_the_owners_alone(cluster: Cluster, job_file: JobFile) -> None:
    handle = cluster.client.submit(job_file(), num_ranks=1, epochs=1, checkpoint_every_epochs=1)
    result = handle.result()
    log = Path(cluster.client.jobs()[-1].ranks[0].log_path)
    modes = {path: stat.S_IMODE(os.stat(path).st_mode) for path in (log, log.parent, result.checkpoints[0].path)}
    assert list(modes.values()) == [0o600, 0o700, 0o700]


MANY = "job = TrainingJob(**{**vars(job), 'evaluate': lambda model: {f'metric {n}': 1.0 for n in range(200_000)}})"
LONG = "job = TrainingJob(**{**vars(job), 'evaluate': lambda model: {'m' * 1_000_000: 1.0}})"
SPEECHLESS = """
class Speechless(Exception):
    def __str__(self):
        raise KeyError("no words")

def fail(model, batch):
    raise Speechless()

job = TrainingJob(**{**vars(job), 'train_step': fail})
"""
SCALARS = """
def chatter(model, batch):
    for number in range(900):
        record_scalar(f"{time.time_ns()} {number} {'x' * 160}", 1.0)
    return train_step(model, batch)

job = TrainingJob(**{**vars(job), 'train_step': chatter, 'anchor': 60})
"""


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (MANY, r"evaluate\(\) returned 200000 metrics; at most 1000 are possible"),
        (LONG, r"evaluate\(\) returned a metric whose name has 1000000 characters"),
        (SPEECHLESS, r"Speechless: \[its message cannot be shown: __str__ raised KeyError\] \(.*linear.py, line \d+\)"),
        (SCALARS, r"more than 1000 names were recorded in one epoch"),
    ],
    ids=["many metrics", "a long name", "no words", "too many scalars"],
)
def test_what_is_too_much_to_be_told_is_named(lines: str, message: str, cluster: Cluster, job_file: JobFile) -> None:
    with pytest.raises(JobFailed, match=message):
        cluster.client.submit(job_file("linear.py", lines), num_ranks=1, epochs=2).result()
