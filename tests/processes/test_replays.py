"""A run with `--audit true` is repeated in one process, bit for bit, also where ranks are killed and others join."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from elche.errors import InvalidJob
from elche_audit.rank_file import read
from elche_worker import replay
from support.real_processes import Cluster, Command, Mark, command

pytestmark = pytest.mark.slow(reason="ranks are killed and started again")

Elche = Callable[..., Command]
JobFile = Callable[..., Path]

LONG = pytest.mark.long(reason="it goes the same way as the overlapped one, but for the sums")


def recorded(elche: Elche, job_file: JobFile, tmp_path: Path, *arguments: str, lines: tuple[str, ...] = ()) -> None:
    """A run of jobs/replayed.py in the folder `out`; after it nobody dies or waits in a replay."""
    (tmp_path / "notes").mkdir()
    path = job_file("replayed.py", *lines)
    done = elche("run", str(path), "--audit", "true", "--verify", *arguments, "--out", "out", limit_s=200)
    assert done.code == 0, done.err
    shutil.rmtree(tmp_path / "notes")


@pytest.mark.gate
@pytest.mark.parametrize(
    ("averaging", "more"),
    [
        pytest.param("blocking", ("--merge", "mean"), id="blocking", marks=LONG),
        pytest.param("overlapped", ("--compress", "auto"), id="overlapped"),
        pytest.param("overlapped", ("--backend", "cpu", "--compress", "int8"), id="relayed", marks=LONG),
    ],
)
def test_a_run_in_which_a_rank_is_killed_and_another_process_joins(
    elche: Elche, job_file: JobFile, tmp_path: Path, averaging: str, more: tuple[str, ...]
) -> None:
    recorded(elche, job_file, tmp_path, "--ranks", "3", "--averaging", averaging, *more)
    place = next(tmp_path.glob("out/audit/*"))
    files = [read(path) for path in sorted(place.glob("rank-*.bin"))]
    dead, joined = (file for file in files if file.start.rank == 1)
    assert dead.results
    assert joined.results
    whole = elche("replay", "out", "--one-process", "--out", "again", "--json", limit_s=400)
    assert whole.code == 0, whole.out + whole.err
    told = json.loads(whole.out)
    assert (told["difference"], told["num_processes"]) == ("", 4)
    assert told["num_compared"] == len({one.round for file in files for one in file.results.values()})
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (tmp_path / "out/model.safetensors").read_bytes()
    first = joined.rounds[0].round
    early = replay(tmp_path / "out", until_round=first)
    assert (early.round, early.difference) == (first, "")
    assert early.samples == joined.results[joined.rounds[0].generation, first].samples


@pytest.mark.long(reason="all ranks are killed and started again")
def test_each_attempt_of_a_run_that_went_back_to_a_checkpoint(elche: Elche, job_file: JobFile, tmp_path: Path) -> None:
    lines = ("DIES_AT = {0: 70, 1: 72}",)
    settings = ("--checkpoint-every-epochs", "1", "--keep-checkpoints", "20")
    recorded(elche, job_file, tmp_path, "--ranks", "2", *settings, lines=lines)
    first = replay(tmp_path / "out", attempt=1)
    assert (first.difference, first.attempt) == ("", 1)
    assert first.num_compared > 1
    second = replay(tmp_path / "out", out=tmp_path / "again")
    assert (second.difference, second.attempt) == ("", 2)
    assert second.num_compared > 1
    assert (tmp_path / "again/model.safetensors").read_bytes() == (tmp_path / "out/model.safetensors").read_bytes()
    shutil.rmtree(tmp_path / "out/checkpoints")
    with pytest.raises(InvalidJob, match="from which it went on, is missing"):
        replay(tmp_path / "out")


SENT = """
import helper
from pathlib import Path

inner = train_step

def train_step(model, batch):
    factor = helper.factor() + float(Path("offset.txt").read_text())
    values = inner(model, batch)
    return {**values, "loss": values["loss"] * factor}

import dataclasses
job = dataclasses.replace(job, train_step=train_step, audit=True)
"""
HELPER = """
calls = 0

def factor():
    global calls
    calls += 1
    return 1 + 0.1 * (calls % 3)
"""


def test_a_job_that_was_sent_with_its_folder_is_repeated_in_its_copy(
    cluster: Cluster, job_file: JobFile, tmp_path: Path
) -> None:
    """Such a run, which is what `elche submit` makes by default, had no replay."""
    path = job_file("linear.py", SENT)
    (path.parent / "helper.py").write_text(HELPER)
    (path.parent / "offset.txt").write_text("0.25")
    handle = cluster.client.submit(path, folder=path.parent, num_ranks=2, epochs=3, verify_rounds=True)
    run = Path(handle.result().model).parent
    (path.parent / "helper.py").write_text("")
    here = Path.cwd()
    again = replay(run, out=tmp_path / "again")
    assert (again.difference, Path.cwd(), "helper" in sys.modules) == ("", here, False)
    assert again.num_compared > 1
    assert (tmp_path / "again/model.safetensors").read_bytes() == (run / "model.safetensors").read_bytes()
    next(run.glob("code-*")).rename(tmp_path / "elsewhere")
    with pytest.raises(InvalidJob, match=r"code-[0-9a-f]{12}, the folder of the job, is missing"):
        replay(run)


READ = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--scale", type=float, required=True)
scale = parser.parse_args().scale
scaled = train_step
job = dataclasses.replace(job, train_step=lambda model, batch: scaled(model, batch) | {"scale": scale})
"""


def test_a_run_is_repeated_and_resumed_as_it_was_from_another_folder_after_its_file_was_edited(
    mark: Mark, elche: Elche, job_file: JobFile, tmp_path: Path
) -> None:
    """It has its arguments, its working directory and what is beside the file."""
    path = job_file("linear.py", SENT, READ)
    (path.parent / "helper.py").write_text(HELPER)
    (path.parent / "offset.txt").write_text("0.25")
    scale = ("--", "--scale", "2")
    options = ("--verify", "--epochs", "2", "--checkpoint-every-epochs", "1", "--out", "out")
    done = elche("run", str(path), *options, *scale, limit_s=200)
    assert done.code == 0, done.err
    (tmp_path / "elsewhere").mkdir()
    resumed = command(
        mark, "elche_client", "resume", "../out", "--epochs", "3", cwd=tmp_path / "elsewhere", limit_s=200
    )
    assert resumed.code == 0, resumed.err
    path.write_text(path.read_text() + "\njob = dataclasses.replace(job, seed=7)\n")
    assert replay(tmp_path / "out", out=tmp_path / "again").difference == ""
    assert (tmp_path / "again/model.safetensors").read_bytes() == (tmp_path / "out/model.safetensors").read_bytes()
