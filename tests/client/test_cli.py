"""The command `elche` against a coordinator that plays a script: what it prints, and its exit codes."""

import errno
import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path
from queue import SimpleQueue

import click
import grpc
import pytest

from elche.v1 import job_pb2 as pb
from elche_client.cli.main import cli, main
from elche_client.local.notifications import Interrupted, NotificationQueue, SignalReceived, forward_signals
from elche_client.options import has_own_loop
from support.scripted import (
    CANCELLED,
    EPOCH,
    EVALUATION,
    FAILURE,
    RESULT,
    SOURCE,
    UNTIL_CANCELLED,
    VIEW,
    ScriptedJobs,
    closed_address,
    serving,
)

ELCHE = [sys.executable, "-m", "elche_client"]


@pytest.fixture(autouse=True)
def _no_worker_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """`elche submit` leaves the check of the file to the ranks, as where no worker is installed."""
    monkeypatch.setattr("elche_client.commands.remote.missing_of", list)


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "digits.py"
    path.write_text(SOURCE, encoding="utf-8")
    return path


HELP = """
import sys
from elche_client.cli.main import main

assert main(["--help"]) == 0
print(*sys.modules, file=sys.stderr)
"""


INTERRUPTED_AT = """
import sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "{}":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Finder())
from elche_client.__main__ import main

sys.exit(main())
"""


def test_control_c_while_the_command_imports_is_no_traceback() -> None:
    program = INTERRUPTED_AT.format("click")
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_help_comes_at_once() -> None:
    """Within 0.3 s, of which nearly all is imports: so what is slow to import is not."""
    done = subprocess.run([sys.executable, "-c", HELP], check=True, capture_output=True, text=True)
    imported = set(done.stderr.split())
    assert not imported & {"asyncio", "google.protobuf", "grpc", "numpy", "rich", "torch"}
    assert len(imported) < 250


COMMANDS = [
    [],
    *([name] for name in cli.commands),
    *([name, inner] for name, one in cli.commands.items() if isinstance(one, click.Group) for inner in one.commands),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_help_has_an_example(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The help of `elche token`, `context` and `certs` was a traceback."""
    assert main([*command, "--help"]) == 0
    text = capsys.readouterr().out
    assert re.search(rf"^  +elche {' '.join(command)}", text, re.MULTILINE)
    assert max(len(line) for line in text.splitlines()) <= 100


@pytest.mark.parametrize("group", ["context", "token", "certs"])
def test_a_group_has_help_of_its_own(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It was a traceback: its commands were looked for in the whole program's sections."""
    assert main([group, "--help"]) == 0
    text = capsys.readouterr().out
    for name, command in cli.commands[group].commands.items():  # type: ignore[attr-defined]
        assert re.search(rf"^  {name} +{re.escape(command.get_short_help_str(1000)[:20])}", text, re.MULTILINE), text


@pytest.mark.parametrize("group", ["context", "token", "certs"])
def test_a_group_alone_shows_its_help(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It was printed as an error of one line."""
    assert main([group]) == 0
    alone = capsys.readouterr()
    assert main([group, "--help"]) == 0
    assert (alone.out, alone.err) == (capsys.readouterr().out, "")
    assert re.search(r"^Commands:\n  \w+ +[A-Z]", alone.out, re.MULTILINE)


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    text = capsys.readouterr().out
    titles = [line for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles == ["Options:", "Train:", "Jobs:", "Cluster:", "Debug:", "Access:"]
    shown = re.findall(r"^  (\w+) +[A-Z]", text[text.index("Train:") :], re.MULTILINE)
    assert sorted(shown) == sorted(cli.commands)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["run"], "Missing argument 'FILE'; see `elche run --help`"),
        (["run", "FILE", "--ranks", "0"], "'0' is neither a number of ranks, at least 1"),
        (["run", "FILE", "--ranks", "two"], "two"),
        (["run", "FILE", "--slow", "1"], "RANK=FACTOR"),
        (["run", "FILE", "--slow", "x=2"], "RANK=FACTOR"),
        (["run", "FILE", "--ranks", "2", "--slow", "2=2"], "ranks 0 to 1"),
        (["run", "FILE", "--ranks", "2", "--slow", "1=0.5"], "at least 1"),
        (["run", "FILE", "--ranks", "2", "--slow", "1=nan"], "at least 1"),
        (["run", "FILE", "--ranks", "2", "--slow", "-1=2"], "slow rank"),
        (["run", "FILE", "--epochs", "0"], "epochs"),
        (["run", "FILE", "--seed", "-1"], "seed"),
        (["run", "FILE", "--policy", "fast"], "cadence, async, sync"),
        (["run", "missing.py"], "there is no file missing.py"),
        (["run", "."], "not a file"),
        (["submit", "missing.py"], "there is no file missing.py"),
        (["watch"], "JOB"),
        (["jobs", "--coordinator", "nowhere"], "HOST:PORT"),
        (["fly"], "fly"),
        (["run", "FILE", "--fly"], "--fly"),
    ],
)
def test_bad_input_gets_one_line_and_exit_code_2(
    arguments: list[str], reason: str, job_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(job_file) if part == "FILE" else part for part in arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith("elche: ")
    assert reason in line


@pytest.mark.parametrize("command", [["submit", "FILE"], ["jobs"], ["watch", "j-1"], ["cancel", "j-1"]])
def test_a_coordinator_that_cannot_be_reached(
    command: list[str], job_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    address = closed_address()
    monkeypatch.setenv("ELCHE_COORDINATOR", address)
    assert main([str(job_file) if part == "FILE" else part for part in command]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith(f"elche: no coordinator answers at {address}")


def test_a_working_folder_that_was_deleted_is_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The process that loads a job's file ended in the words of a mathematical library."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["jobs"]) == 2
    assert capsys.readouterr().err == "elche: the working folder was deleted: change to one that exists\n"


def test_a_wrong_token_is_said_so(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(ScriptedJobs(refusal=(grpc.StatusCode.UNAUTHENTICATED, "the token is wrong"))) as address:
        assert main(["jobs", "--coordinator", address]) == 2
    assert capsys.readouterr().err == "elche: the token is wrong\n"


def test_submit_prints_the_jobs_id(job_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = ScriptedJobs()
    options = ["--ranks", "2", "--slow", "1=2.3", "--epochs", "3", "--seed", "7", "--policy", "sync", "--verify"]
    with serving(jobs) as address:
        assert main(["submit", str(job_file), "--coordinator", address, *options]) == 0
        printed = capsys.readouterr()
        assert printed.out == "j-1\n", "for scripts: the id alone"
        assert [re.sub(r"\w  .*", lambda found: found[0][0], line) for line in printed.err.splitlines()[-4:]] == [
            "elche: next commands:",
            f"elche:   elche watch j-1 --coordinator {address}",
            f"elche:   elche logs j-1 -f --coordinator {address}",
            f"elche:   elche cancel j-1 --coordinator {address}",
        ]
        assert main(["submit", str(job_file), "--coordinator", address, "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {"job_id": "j-1"}
    first, second = jobs.specs
    assert (first.num_ranks, dict(first.slow_factors), first.verify_rounds) == (2, {1: 2.3}, True)
    assert first.settings == {"epochs": "3", "seed": "7", "policy": '"sync"'}
    assert (second.num_ranks, dict(second.settings), second.verify_rounds) == (0, {}, False)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["submit", "--no-check"], 2, "job j-1 is submitted, but standard output cannot be written"),
        (["jobs"], 1, "standard output cannot be written"),
    ],
)
def test_a_full_disk_behind_stdout_is_one_line(job_file: Path, words: list[str], code: int, said: str) -> None:
    """The job was submitted, and no line named it. Lines of an ignored exception followed, and exit code 120, since
    Python prints what is left once more at its end.
    """
    jobs = ScriptedJobs()
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with serving(jobs) as address, Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "elche_client", *words, "--coordinator", address]
        command += [str(job_file)] if "submit" in words else []
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=environment)
    assert len(jobs.specs) == ("submit" in words)
    assert (done.returncode, done.stderr) == (code, f"elche: {said}: No space left on device\n")


def test_a_script_with_its_own_loop_is_submitted_as_such_and_does_not_run_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "loop.py"
    script.write_text("from pathlib import Path\nfrom elche_worker import Trainer\nPath('ran').touch()\n")
    jobs = ScriptedJobs()
    with serving(jobs) as address:
        assert main(["submit", str(script), "--ranks", "2", "--coordinator", address]) == 0
        assert capsys.readouterr().out == "j-1\n"
        for refused, said in (
            (["--epochs", "3"], "takes no --epochs: set them in the script"),
            (["--ranks", "1..2"], "trains with all of its ranks: --ranks N"),
            (["--verify"], "has no rounds: leave out --verify"),
        ):
            assert main(["submit", str(script), *refused, "--coordinator", address]) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert line.endswith(said)
    assert main(["run", str(script), "--verify"]) == 2
    assert capsys.readouterr().err.endswith("has no rounds: leave out --verify\n")
    (spec,) = jobs.specs
    assert (spec.is_loop, spec.num_ranks) == (True, 2)
    assert not (tmp_path / "ran").exists()
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    "text",
    [
        "job = 1",
        "job: object = 1",
        "if True:\n    job = 1",
        "with open('a') as job: ...",
        "other, (job, *_) = 1, (2, 3)",
        "def job(): ...",
        "from jobs import job",
        "from jobs import digits as job",
        "def make():\n    global job\n    job = 1",
    ],
)
def test_a_file_that_defines_a_job_in_any_way_is_no_script_with_its_own_loop(tmp_path: Path, text: str) -> None:
    """One with `job: TrainingJob = ...` was submitted as a script, and succeeded without having trained."""
    file = tmp_path / "file.py"
    file.write_text(f"from elche_worker import shard\n{text}\n")
    assert not has_own_loop(file)


@pytest.mark.parametrize("text", ["", "def run(job):\n    job = 1", "import joblib", "x.job = 1", "print(job)"])
def test_a_script_with_its_own_loop_may_use_the_name_job_inside(tmp_path: Path, text: str) -> None:
    file = tmp_path / "file.py"
    file.write_text(f"from elche_worker import Trainer\n{text}\n")
    assert has_own_loop(file)


@pytest.mark.parametrize(
    "text",
    [
        "import elche_worker\nelche_worker.Trainer.setup(m, o)",
        "import elche_worker as ew\new.Trainer.setup(m, o)",
        "import elche_worker.trainer\nelche_worker.trainer.Trainer.setup(m, o)",
        "from elche_worker import trainer as loops\nloops.Trainer.setup(m, o)",
        "from elche_worker import *",
        "import mine",
        "from mine import fit",
        "from mine import *",
        "import package.part",
        "from package import part",
        "from package.indirect import fit",
    ],
)
def test_a_script_whose_trainer_comes_in_another_way_has_its_own_loop(tmp_path: Path, text: str) -> None:
    """It was run as a file with a job: trained once, on one device, and then refused for having none."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "part.py").write_text("from elche_worker import Trainer")
    (tmp_path / "package" / "indirect.py").write_text("from . import part\nfrom .part import Trainer")
    (tmp_path / "mine.py").write_text("from package.indirect import fit\nimport train")
    file = tmp_path / "train.py"
    file.write_text(text)
    assert has_own_loop(file)
    file.write_text(f"{text}\njob = 1")
    assert not has_own_loop(file)


@pytest.mark.parametrize("text", ["from mine import *", "import elche_worker as ew\new.TrainingJob", "import other"])
def test_a_file_whose_job_comes_from_elsewhere_has_no_own_loop(tmp_path: Path, text: str) -> None:
    (tmp_path / "mine.py").write_text("from elche_worker import shard, TrainingJob\njob = TrainingJob()")
    file = tmp_path / "train.py"
    file.write_text(text)
    assert not has_own_loop(file)


def test_submit_and_watch(job_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(ScriptedJobs(VIEW, EPOCH, EVALUATION, RESULT)) as address:
        assert main(["submit", str(job_file), "--coordinator", address, "--watch"]) == 0
    printed = capsys.readouterr()
    assert printed.err == "elche: submitted job j-1\n"
    lines = printed.out.splitlines()
    assert lines[:3] == [
        "digits: training",
        "epoch 3/10  loss 0.5  lr 0.1  500 samples/s  2.0 s",
        "epoch 3/10  evaluated  accuracy 0.98",
    ]
    assert "succeeded" in lines[3]


def test_watch_with_json_ends_stdout_with_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(ScriptedJobs(VIEW, EPOCH, EVALUATION, RESULT)) as address:
        assert main(["watch", "j-1", "--coordinator", address, "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["committed_samples"] == [1000, 1000, 1000]
    assert len(printed.out.splitlines()) == 1
    assert "accuracy 0.98" in printed.err


@pytest.mark.parametrize(
    ("result", "code", "error"),
    [
        (FAILURE, 1, "rank 1 failed at batch 3"),
        (CANCELLED, 1, "job j-1 was cancelled"),
        (pb.JobResult(state=pb.JOB_STATE_FAILED, error="no `job`", invalid=True), 2, "no `job`"),
    ],
)
def test_a_job_that_did_not_succeed(
    result: pb.JobResult, code: int, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    view = pb.JobView(job_id="j-1", ranks=[pb.RankView(rank=0, log_path="/logs/0"), pb.RankView(rank=1)])
    with serving(ScriptedJobs(view, result)) as address:
        assert main(["watch", "j-1", "--coordinator", address, "--json"]) == code
    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    assert lines[-2:] == [f"elche: {error}", "elche: log: /logs/0"]
    assert ("ValueError: no" in lines) == (result is FAILURE)
    assert json.loads(printed.out)["state"] == ("cancelled" if result is CANCELLED else "failed")
    assert json.loads(printed.out).get("error", "") == result.error


def test_a_watch_that_breaks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elche_client.client.RECONNECT_S", 0.0)
    with serving(ScriptedJobs(VIEW, grpc.StatusCode.UNAVAILABLE)) as address:
        assert main(["watch", "j-1", "--coordinator", address]) == 2
    assert capsys.readouterr().err.startswith(f"elche: no coordinator answers at {address}")


def test_a_connection_that_breaks_in_the_middle_of_a_call(capsys: pytest.CaptureFixture[str]) -> None:
    broken = (grpc.StatusCode.UNAVAILABLE, "Stream removed (Socket closed)")
    with serving(ScriptedJobs(refusal=broken)) as address:
        assert main(["jobs", "--coordinator", address]) == 2
    broke = f"elche: the connection to the coordinator at {address} broke: is it still there? (Stream removed (Socket"
    assert capsys.readouterr().err.startswith(broke)


def test_the_list_of_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(ScriptedJobs(VIEW)) as address:
        assert main(["jobs", "--coordinator", address]) == 0
        assert re.search(r"^j-1 +training   3/10 ", capsys.readouterr().out, re.MULTILINE)
        assert main(["jobs", "--coordinator", address, "--json"]) == 0
        (job,) = json.loads(capsys.readouterr().out)
    assert (job["job_id"], job["state"], job["ranks"][0]["device"]) == ("j-1", "training", "cpu")
    with serving(ScriptedJobs()) as address:
        assert main(["jobs", "--coordinator", address]) == 0
    assert capsys.readouterr().out == "no jobs\n"


def test_cancel(capsys: pytest.CaptureFixture[str]) -> None:
    jobs = ScriptedJobs()
    with serving(jobs) as address:
        assert main(["cancel", "j-1", "--coordinator", address]) == 0
        assert jobs.cancelled.is_set()
        assert main(["cancel", "j-2", "--coordinator", address]) == 2
    assert capsys.readouterr().err == "elche: no job has the id 'j-2'; `elche jobs` lists them\n"


def test_ctrl_c_stops_watching_but_not_the_job() -> None:
    jobs = ScriptedJobs(VIEW, UNTIL_CANCELLED, CANCELLED)
    with serving(jobs) as address:
        command = [*ELCHE, "watch", "j-1", "--coordinator", address]
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        ) as process:
            assert process.stdout.readline() == "digits: training\n"
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=400)
    assert process.returncode == 130
    assert errors == "elche: the job goes on; `elche cancel j-1` cancels it\n"


def test_a_terminal_that_is_closed_is_no_job_that_has_failed() -> None:
    """Writing to it fails before the signal is read from the queue; `elche watch` exited with 1."""

    def write() -> None:
        with forward_signals(SimpleQueue()):
            os.kill(os.getpid(), signal.SIGHUP)
            raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(Interrupted, match="SIGHUP") as raised:
        write()
    assert raised.value.exit_code == 129


@pytest.mark.parametrize(
    "told", [[signal.SIGTERM, signal.SIGHUP], [signal.SIGHUP, signal.SIGTERM], [signal.SIGHUP] * 2]
)
def test_a_session_that_is_ended_does_not_hurry(told: list[signal.Signals], monkeypatch: pytest.MonkeyPatch) -> None:
    """It sends SIGTERM and SIGHUP, and a terminal that is closed may send SIGHUP twice: `elche run` left at once,
    without a checkpoint.
    """
    notifications, codes = NotificationQueue(), list[int]()
    monkeypatch.setattr(os, "_exit", codes.append)
    with forward_signals(notifications):
        for number in told:
            os.kill(os.getpid(), number)
    assert notifications.get_nowait() == SignalReceived(number=told[0])
    assert notifications.empty(), "a second one would end the wait for the checkpoint"
    assert not codes


def test_a_terminal_gets_the_live_picture_and_its_cursor_back() -> None:
    with serving(ScriptedJobs(VIEW, EPOCH, VIEW, RESULT)) as address:
        ours, theirs = pty.openpty()
        environment = os.environ | {"TERM": "xterm", "COLUMNS": "80", "LINES": "40"}
        command = [*ELCHE, "watch", "j-1", "--coordinator", address]
        with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment) as process:
            os.close(theirs)
            text = _everything_from(ours)
        os.close(ours)
    assert process.returncode == 0
    for part in ("12/23", "50.0 %", "epoch 3/10", "loss 0.5", "/out/model.safetensors"):
        assert part in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def _everything_from(terminal: int) -> str:
    parts = []
    try:
        while part := os.read(terminal, 65536):
            parts.append(part)
    except OSError:  # the other end is closed
        pass
    return b"".join(parts).decode()


def in_state(state: int) -> ScriptedJobs:
    return ScriptedJobs(pb.JobView(job_id="j-1", name="digits", state=state))


@pytest.mark.parametrize(
    ("command", "state", "told"),
    [
        (["cancel", "j-1"], pb.JOB_STATE_TRAINING, "job j-1 is being stopped"),
        (["cancel", "j-1"], pb.JOB_STATE_STOPPING, "job j-1 is being stopped already"),
        (["cancel", "j-1"], pb.JOB_STATE_FAILED, "job j-1 has ended already (failed): nothing was changed"),
        (["pause", "j-1"], pb.JOB_STATE_TRAINING, "job j-1 pauses after its open round"),
        (["pause", "j-1"], pb.JOB_STATE_PAUSED, "job j-1 is paused already"),
        (["pause", "j-1"], pb.JOB_STATE_SUCCEEDED, "job j-1 is succeeded: nothing was changed"),
        (["pause", "j-1", "--off"], pb.JOB_STATE_PAUSED, "job j-1 goes on"),
        (["pause", "j-1", "--off"], pb.JOB_STATE_TRAINING, "job j-1 is training: nothing was changed"),
    ],
)
def test_what_changes_nothing_says_so(
    command: list[str], state: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(in_state(state)) as address:
        assert main([*command, "--coordinator", address]) == 0
    assert capsys.readouterr().out == f"{told}\n"


def test_pausing_a_job_with_a_stalled_rank_says_what_it_waits_for(capsys: pytest.CaptureFixture[str]) -> None:
    ranks = [pb.RankView(rank=0), pb.RankView(rank=1, stalled_s=12.0)]
    view = pb.JobView(job_id="j-1", name="digits", state=pb.JOB_STATE_TRAINING, ranks=ranks)
    with serving(ScriptedJobs(view)) as address:
        assert main(["pause", "j-1", "--coordinator", address]) == 0
    expected = "job j-1 pauses once rank 1, which is stalled, makes batches again, and its open round has ended\n"
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize("option", ["--watch", "--follow"])
def test_a_submitted_job_can_be_watched_at_once(
    option: str, job_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(ScriptedJobs(VIEW, RESULT)) as address:
        assert main(["submit", str(job_file), option, "--no-check", "--coordinator", address]) == 0
    assert "digits: training" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["resume", "checkpoints", "timeline"])
def test_what_is_neither_a_folder_nor_a_job_is_said_to_be_neither(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(ScriptedJobs(VIEW)) as address:
        output = ["-o", "trace.json"] if command == "timeline" else []
        assert main([command, "runs/nope", "--coordinator", address, *output]) == 2
    expected = f"elche: runs/nope is neither a folder here nor a job of the coordinator at {address}\n"
    assert capsys.readouterr().err == expected


def test_a_job_that_waits_says_for_what(capsys: pytest.CaptureFixture[str]) -> None:
    reason = "waits for 4 free slots; there are 2 on 1 host, and 1 of them is free"
    queued = pb.JobView(job_id="j-1", name="digits", state=pb.JOB_STATE_QUEUED, reason=reason)
    with serving(ScriptedJobs(queued, RESULT)) as address:
        assert main(["jobs", "--coordinator", address]) == 0
        assert f"j-1: {reason}" in capsys.readouterr().out.splitlines()
        assert main(["watch", "j-1", "--coordinator", address]) == 0
    assert f"digits: queued, {reason}" in capsys.readouterr().out.splitlines()


def test_a_job_says_why_its_final_model_is_not_written(capsys: pytest.CaptureFixture[str]) -> None:
    """Of ten minutes on a full disk `elche jobs` said only that it is finishing."""
    reason = "rank 0: tried again for 10 minutes: the final model cannot be written to /m: No space left on device"
    finishing = pb.JobView(job_id="j-1", name="digits", state=pb.JOB_STATE_FINISHING, reason=reason)
    with serving(ScriptedJobs(finishing)) as address:
        assert main(["jobs", "--coordinator", address]) == 0
    assert f"j-1: {reason}" in capsys.readouterr().out.splitlines()


def test_arguments_and_environment_are_sent_and_the_values_shown_to_nobody(
    job_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = ScriptedJobs(VIEW, RESULT)
    monkeypatch.setenv("FROM_HERE", "taken")
    with serving(jobs) as address:
        options = ["--env", "DATA=/data=1", "--env", "FROM_HERE", "--env", "EMPTY=", "--watch"]
        command = ["submit", str(job_file), "--coordinator", address, *options, "--", "--lr", "0.1", "--", "a b"]
        assert main(command) == 0
    (spec,) = jobs.specs
    assert list(spec.arguments) == ["--lr", "0.1", "--", "a b"]
    assert dict(spec.environment) == {"DATA": "/data=1", "FROM_HERE": "taken", "EMPTY": ""}
    printed = capsys.readouterr()
    assert "/data=1" not in printed.out + printed.err


def test_a_jobs_project_is_what_the_command_says_or_the_environment(
    job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = ScriptedJobs(VIEW, RESULT)
    with serving(jobs) as address:
        command = ["submit", str(job_file), "--coordinator", address]
        assert main(command) == 0
        monkeypatch.setenv("ELCHE_PROJECT", "vision")
        assert main(command) == 0
        assert main([*command, "--project", "speech-2"]) == 0
    assert [spec.project for spec in jobs.specs] == ["", "vision", "speech-2"]


@pytest.mark.parametrize("name", ["a b", "-x", "x" * 65, "*", "a=1"])
def test_a_name_that_is_no_projects(name: str, job_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", str(job_file), "--project", name]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "is not a name of a project: use up to 64 letters, digits, '.', '_' and '-'" in line


@pytest.mark.parametrize(
    ("variable", "why"),
    [
        ("1A=x", "not a name of an environment variable"),
        ("A-B=x", "not a name of an environment variable"),
        ("ELCHE_RANK=1", "elche sets it for each rank"),
        ("CUDA_VISIBLE_DEVICES=1", "elche sets it for each rank"),
        ("WORLD_SIZE=1", "elche sets it for each rank"),
        ("LD_PRELOAD=x.so", "set it where elche-worker is started"),
        ("PYTHONPATH=/x", "set it where elche-worker is started"),
        ("OMP_NUM_THREADS=1", "set it where elche-worker is started"),
        ("NOT_SET_HERE", "NOT_SET_HERE has no value"),
        ("BIG=" + "x" * 40_000, "bytes; 32768 are allowed"),
    ],
)
def test_variables_that_would_break_or_do_nothing_are_refused(
    variable: str, why: str, job_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", str(job_file), "--env", variable]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert why in line
    assert "xxx" not in line


def test_too_many_variables(job_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    variables = [part for number in range(65) for part in ("--env", f"A{number}=")]
    assert main(["submit", str(job_file), *variables]) == 2
    assert "64 variables" in capsys.readouterr().err


def test_logs_of_all_ranks_and_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    parts = [
        pb.StreamLogsResponse(rank=0, data=b"one\ntw"),
        pb.StreamLogsResponse(rank=1, data=b"other\n"),
        pb.StreamLogsResponse(rank=0, data=b"o\n"),
    ]
    jobs = ScriptedJobs(VIEW, logs=parts)
    with serving(jobs) as address:
        assert main(["logs", "j-1", "--coordinator", address]) == 0
        assert capsys.readouterr().out == "rank 0 | one\nrank 1 | other\nrank 0 | two\n"
        assert main(["logs", "j-1", "--rank", "0", "-f", "--coordinator", address]) == 0
    all_of_them, one = jobs.log_requests
    assert (all_of_them.HasField("rank"), all_of_them.follow) == (False, False)
    assert (one.HasField("rank"), one.rank, one.follow) == (True, 0, True)


def test_logs_that_nobody_has_are_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    gone = pb.StreamLogsResponse(rank=0, error="the host of rank 0 is not here any more; its log is h:/logs/0")
    with serving(ScriptedJobs(VIEW, logs=[gone])) as address:
        assert main(["logs", "j-1", "--coordinator", address]) == 2
    assert capsys.readouterr().err.endswith("its log is h:/logs/0\n")


def test_a_job_that_has_failed_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = [pb.RankView(rank=0, log_path="/logs/0")]
    view = pb.JobView(job_id="j-1", state=pb.JOB_STATE_TRAINING, ranks=ranks)
    failure = pb.JobResult(state=pb.JOB_STATE_FAILED, error="rank 0 is gone", checkpoints=[pb.Checkpoint(path="/c/1")])
    with serving(ScriptedJobs(view, failure)) as address:
        assert main(["watch", "j-1", "--coordinator", address]) == 1
        assert capsys.readouterr().err.splitlines()[-1] == f"elche: to go on: elche resume j-1 --coordinator {address}"
        monkeypatch.setenv("ELCHE_COORDINATOR", address)
        assert main(["watch", "j-1"]) == 1
        assert capsys.readouterr().err.splitlines()[-1] == "elche: to go on: elche resume j-1"
    with serving(ScriptedJobs(view, FAILURE)) as address:
        assert main(["watch", "j-1", "--coordinator", address]) == 1
    assert "resume" not in capsys.readouterr().err


@pytest.mark.parametrize("columns", ["80", "120"])
def test_summaries_of_commands_are_whole(columns: str) -> None:
    environment = os.environ | {"COLUMNS": columns}
    done = subprocess.run([*ELCHE, "--help"], capture_output=True, text=True, check=True, env=environment)
    commands = done.stdout.partition("Train:")[2]
    assert "..." not in commands
    words = " ".join(commands.split())
    assert "fetch Copy the final model of JOB to FILE: by default model.safetensors, with --best best" in words
    assert max(len(line) for line in done.stdout.splitlines()) <= int(columns)


@pytest.mark.parametrize("kind", ["job", "loop", "huggingface", "lightning"])
def test_a_file_to_begin_with(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "mine.py", "--kind", kind]) == 0
    text = (tmp_path / "mine.py").read_text(encoding="utf-8")
    compile(text, "mine.py", "exec")
    assert "TODO" in text
    assert "elche run mine.py" in text
    assert "train.py" not in text
    assert capsys.readouterr().out == "wrote mine.py; it runs as it is: elche run mine.py\n"


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.py"
    path.write_text("mine")
    assert main(["init", str(path)]) == 2
    assert path.read_text() == "mine"
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{path} is there already: give another name" in line
    assert main(["init", str(tmp_path / "none" / "train.py")]) == 2
    assert "cannot be written: No such file or directory" in capsys.readouterr().err
