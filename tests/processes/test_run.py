"""`elche run` from start to end, and what is left when one of its processes dies: nothing."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elche_client.local.processes import MAX_RESTARTS
from support.real_processes import Command, Mark, eventually

pytestmark = pytest.mark.slow(reason="every test runs a whole command")

JobFile = Callable[..., Path]
NUM_SAMPLES = 500  # of jobs/linear.py
LONG = "import dataclasses\njob = dataclasses.replace(job, epochs=10_000)"


OF_OTHERS = {
    "ELCHE_TLS": "/nowhere",
    "ELCHE_CLIENT_CERTIFICATES": "1",
    "ELCHE_STORE": "postgresql://nobody@127.0.0.1:1/none",
    "ELCHE_INTERFACE": "nowhere0",
    "ELCHE_ARTIFACTS": "no-store",
    "ELCHE_COORDINATOR": "127.0.0.1:1",
}
"""What a shell has set for another coordinator."""


def test_one_command_trains(elche: Callable[..., Command], job_file: JobFile, tmp_path: Path) -> None:
    options = ["--ranks", "2", "--out", "here", "--json", "--verify", "--checkpoint-every-epochs", "1"]
    done = elche("run", str(job_file()), *options, env=OF_OTHERS)
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert done.out.count("\n") == 1
    wanted = {"state", "epochs", "metrics", "samples_per_s", "bound_samples_per_s", "bound_fraction", "dataset_size"}
    assert wanted | {"committed_samples", "dropped", "rounds", "ranks", "model"} <= set(result)
    assert (result["state"], result["epochs"], result["dataset_size"]) == ("succeeded", 3, NUM_SAMPLES)
    assert [sum(pair) for pair in zip(result["committed_samples"], result["dropped"], strict=True)] == [NUM_SAMPLES] * 3
    assert len(result["ranks"]) == 2
    assert all({"device", "batches", "ms_per_batch", "waited_s"} <= set(rank) for rank in result["ranks"])
    assert Path(result["model"]) == tmp_path / "here" / "model.safetensors"
    assert Path(result["model"]).stat().st_size > 0
    record = json.loads((tmp_path / "here" / "record.json").read_text())
    assert {name: record[name] for name in result} == result
    assert [report["committed"] for report in record["epoch_reports"]] == [NUM_SAMPLES] * 3
    assert record["evaluations"][-1]["metrics"] == result["metrics"]
    assert sum(report["samples"] for report in record["round_reports"]) == 3 * NUM_SAMPLES
    assert result["bound_samples_per_s"] > 0
    assert result["samples_per_s"] > 0

    refused = elche("resume", "here")
    assert refused.code == 2
    assert "the training in here is complete, with 3 epochs" in refused.complaint
    assert "--epochs" in refused.complaint
    (newest,) = (one.parent for one in tmp_path.glob("here/checkpoints/*/epoch-0003-*/manifest.json"))
    by_checkpoint = elche("resume", str(newest))
    assert by_checkpoint.code == 2
    assert "has 3 of 3 epochs; give more with --epochs" in by_checkpoint.err
    assert not (tmp_path / "runs").exists()  # no rank was started for that


class Run:
    """An `elche run` that trains, and its processes."""

    def __init__(self, process: subprocess.Popen[str], mark: Mark, folder: Path) -> None:
        self.process = process
        self.mark = mark
        self.folder = folder

    def pid(self, containing: str) -> int:
        return min(self.mark.living(containing))

    def end(self, limit_s: float = 400.0) -> tuple[int, str]:
        """Exit code and stderr."""
        _, errors = self.process.communicate(timeout=limit_s)
        return self.process.returncode, errors


@contextmanager
def running(mark: Mark, path: Path, *arguments: str, until: Callable[[Path], bool] | None = None) -> Iterator[Run]:
    """`elche run` in training, with one rank unless the arguments say otherwise."""
    folder = path.parent / "here"
    process = subprocess.Popen(
        [sys.executable, "-m", "elche_client", "run", str(path), "--out", str(folder), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=mark.environment(),
        start_new_session=True,
    )
    try:
        is_there = until or (lambda path: path.with_suffix(".rank-0").exists())
        eventually(lambda: is_there(path) or process.poll() is not None, "it trains")
        assert process.poll() is None, process.communicate()
        yield Run(process, mark, folder)
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def run_of_two(mark: Mark, job_file: JobFile) -> Iterator[Run]:
    with running(mark, job_file("linear.py", LONG), "--ranks", "2") as run:
        yield run


@pytest.fixture
def run(mark: Mark, job_file: JobFile) -> Iterator[Run]:
    with running(mark, job_file("linear.py", LONG)) as run:
        yield run


def complaint(errors: str) -> str:
    """The line of stderr that says what happened; lines beside it name logs only."""
    assert "Traceback" not in errors
    lines = [line for line in errors.splitlines() if line.startswith("elche: ")]
    lines = [line for line in lines if "elche: log: " not in line and "shows this run while it lasts" not in line]
    assert len(lines) == 1, errors
    return lines[0]


def test_the_agent_is_killed(run: Run) -> None:
    os.kill(run.pid("elche_worker.agent"), signal.SIGKILL)
    code, errors = run.end()
    assert code == 1
    assert re.search("agent was killed by SIGKILL|its host .* is gone", complaint(errors))
    run.mark.assert_none_left(limit_s=400)


def test_the_coordinator_is_killed(run_of_two: Run) -> None:
    """It is started again at its address, and the ranks have trained on. Nobody reads what the command prints."""
    run, ranks = run_of_two, run_of_two.mark.living("elche rank")
    assert run.process.stdout is not None
    run.process.stdout.close()
    run.process.stdout = None
    rounds, first = run.folder / "cadence.binpb", run.pid("elche_coordinator")
    os.kill(first, signal.SIGKILL)
    eventually(lambda: set(run.mark.living("elche_coordinator")) - {first}, "it is started again")
    size = rounds.stat().st_size
    eventually(lambda: rounds.stat().st_size > size, "rounds are committed again")
    assert run.mark.living("elche rank") == ranks
    run.process.send_signal(signal.SIGINT)
    code, errors = run.end()
    assert code == 130
    assert "the coordinator was killed by SIGKILL; it is started again" in errors
    run.mark.assert_none_left(limit_s=400)


@pytest.mark.long(reason="it takes long")
def test_a_coordinator_that_is_killed_again_and_again_ends_the_run(run: Run) -> None:
    killed: set[int] = set()
    for _ in range(MAX_RESTARTS + 1):
        living = eventually(lambda known=killed: set(run.mark.living("elche_coordinator")) - known, "it is back")
        killed |= living
        os.kill(min(living), signal.SIGKILL)
    code, errors = run.end()
    assert code == 1
    assert re.search(r"the coordinator was killed by SIGKILL.*\(log: ", errors)
    run.mark.assert_none_left(limit_s=400)


ENDLESS = "Path(__file__).with_suffix('.looping').touch()\nwhile 'check' in __import__('sys').argv[0]:\n    pass"


def is_looping(path: Path) -> bool:
    return path.with_suffix(".looping").exists()


def test_the_command_is_killed_while_the_file_is_checked(mark: Mark, job_file: JobFile) -> None:
    with running(mark, job_file("linear.py", ENDLESS), until=is_looping) as run:
        run.process.kill()
        mark.assert_none_left(limit_s=400)


PRINTS = """
print("loads", __import__("sys").argv[1:], os.environ.get("FLAVOUR"))
plain_step = train_step

def train_step(model, batch):
    print("a batch of rank", os.environ["ELCHE_RANK"], "\\x1b]0;owned\\x07")
    return plain_step(model, batch)

import dataclasses
job = dataclasses.replace(job, train_step=train_step)
"""


def test_what_ranks_print_is_shown(elche: Callable[..., Command], job_file: JobFile) -> None:
    path = job_file("linear.py", PRINTS)
    options = ["--ranks", "2", "--epochs", "1", "--env", "FLAVOUR=vanilla"]
    done = elche("run", str(path), *options, "--", "--lr", "0.1")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    for rank in range(2):
        assert f"rank {rank} | loads ['--lr', '0.1'] vanilla" in lines
        assert any(line.startswith(f"rank {rank} | a batch of rank {rank}") for line in lines)
    assert "this rank leaves" not in done.out
    assert "\x1b" not in done.out + done.err.replace("\x1b]0;owned\x07", "")  # the check's own words are the file's


def test_ctrl_c_writes_a_checkpoint_first_and_says_how_to_go_on(
    run_of_two: Run, elche: Callable[..., Command], job_file: JobFile
) -> None:
    run_of_two.process.send_signal(signal.SIGINT)
    code, errors = run_of_two.end()
    assert code == 130
    assert "cancel" in errors
    assert "Traceback" not in errors
    run_of_two.mark.assert_none_left(limit_s=400)
    assert json.loads((run_of_two.folder / "record.json").read_text())["state"] == "cancelled"
    lines = errors.splitlines()
    assert "elche: writing a checkpoint; Ctrl-C again to leave at once" in lines
    assert lines[-1] == f"elche: to go on: elche resume {run_of_two.folder}"
    (checkpoint,) = run_of_two.folder.glob("checkpoints/*/*/manifest.json")
    assert re.fullmatch(r"epoch-\d{4}-step-\d{8}", checkpoint.parent.name)
    job_file("linear.py", LONG, "# edited")
    epoch = json.loads(checkpoint.read_text())["training"]["ledger"]["epoch"]
    done = elche(*lines[-1].removeprefix("elche: to go on: elche ").split(), "--epochs", str(epoch + 1))
    assert done.code == 0, done.err
    assert "linear.py has changed since the checkpoint; its copy in the checkpoint is used" in done.err
    assert done.out.splitlines()[-1].startswith("╰")
    assert "linear: starting" in done.out.splitlines()  # not: job
    (folder,) = (run_of_two.folder.parent / "runs").iterdir()
    assert folder.name.startswith("linear-")


def test_a_rank_that_is_killed_leaves_a_way_to_go_on(mark: Mark, job_file: JobFile) -> None:
    arguments = ["--ranks", "2", "--checkpoint-every-epochs", "1", "--on-rank-loss", "fail"]
    with running(mark, job_file("linear.py", LONG), *arguments) as run:
        eventually(lambda: list(run.folder.glob("checkpoints/*/epoch-*/manifest.json")), "a checkpoint is there")
        os.kill(max(run.mark.living("elche rank")), signal.SIGKILL)
        code, errors = run.end()
        mark.assert_none_left(limit_s=400)
    assert code == 1
    line = complaint("\n".join(errors.splitlines()[:-1]))
    assert re.search(r"rank [01] on \S+ \(cpu\) was killed by signal 9 \(often: out of memory\) at batch \d+", line)
    assert errors.splitlines()[-1] == f"elche: to go on: elche resume {run.folder}"
    record = json.loads((run.folder / "record.json").read_text())
    assert record["state"] == "failed"
    assert "signal 9" in record["error"]


@pytest.mark.long(reason="a job does so in test_ctrl_c_writes_a_checkpoint_first_and_says_how_to_go_on")
def test_a_loop_writes_a_checkpoint_on_ctrl_c_too_and_goes_on_with_its_environment(
    mark: Mark, elche: Callable[..., Command], tmp_path: Path
) -> None:
    path = tmp_path / "own_loop.py"
    path.write_text((Path(__file__).parent / "jobs" / "own_loop.py").read_text())
    notes = tmp_path / "rank-0"
    variables = ["--env", f"LOOP_NOTES={tmp_path}", "--env", "LOOP_EPOCHS=10000"]
    with running(mark, path, "--device", "cpu", *variables, until=lambda _: notes.exists()) as run:
        eventually(lambda: len(notes.read_text().splitlines()) > 400, "it trains, and has been seen for a while")
        run.process.send_signal(signal.SIGINT)
        code, errors = run.end()
    assert code == 130
    assert errors.splitlines()[-1] == f"elche: to go on: elche resume {run.folder}"
    (checkpoint,) = run.folder.glob("checkpoints/step-*/manifest.json")
    epoch = json.loads(checkpoint.read_text())["training"]["loop"]["epoch"]
    done = elche("resume", str(run.folder), "--env", f"LOOP_EPOCHS={epoch + 1}", "--no-logs")
    assert done.code == 0, done.err
    assert notes.read_text().splitlines()[-1].startswith(f"{epoch} ")


def test_a_run_is_closed_to_other_users_of_the_machine_and_ends_when_its_command_is_killed(run: Run) -> None:
    """Loopback without a token was code execution as the coordinator's user, for every local user."""
    text = (run.folder / "coordinator.log").read_text()
    page = re.findall(r"page and metrics on (http://\S+)", text)[0]
    secret = run.folder / "token"
    assert secret.stat().st_mode & 0o777 == 0o600
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{page}/metrics", timeout=400)
    headers = {"authorization": f"Bearer {secret.read_text().strip()}"}
    answer = urllib.request.urlopen(urllib.request.Request(f"{page}/metrics", headers=headers), timeout=400)
    assert b"elche_jobs" in answer.read()
    assert secret.read_text().strip() not in text
    run.process.kill()
    run.mark.assert_none_left(limit_s=400)
