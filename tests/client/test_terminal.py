"""Whatever comes from elsewhere is printed as text: no name, error or log line can steer a terminal."""

import os
import pty
import subprocess
import sys
from io import StringIO

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from elche.v1 import job_pb2 as pb
from elche_client.cli.main import main
from elche_client.display.notices import print_notice
from elche_client.display.progress import LiveProgress
from elche_client.events import JobState, JobView
from support.scripted import ScriptedJobs, serving

EVIL = "\x1b]0;owned\x07\x1b[2J\u202e\x9b31m"
"""Sets the title, clears the screen, turns the direction of writing, and a control sequence in one character."""
CHECKPOINT = pb.Checkpoint(version=1, path=f"/c/{EVIL}", metrics={EVIL: 1.0}, is_best=True)
RANK = pb.RankView(rank=0, device=EVIL, state=EVIL, host=EVIL, log_path=f"/logs/{EVIL}", callback_errors=1)
OTHER = pb.RankView(rank=1, device="cpu", state="training", host="other", log_path="/logs/1")
VIEW = pb.JobView(
    job_id="j-1",
    name=EVIL,
    state=pb.JOB_STATE_TRAINING,
    reason=EVIL,
    num_epochs=3,
    dataset_size=10,
    pacing=EVIL,
    backend=EVIL,
    ranks=[RANK, OTHER],
    checkpoints=[CHECKPOINT],
)
QUEUED = pb.JobView(job_id=f"j-2{EVIL}", name=EVIL, state=pb.JOB_STATE_QUEUED, reason=EVIL)
EPOCH = pb.EpochReport(epoch=0, loss=1.0, scalars={EVIL: 1.0})
EVALUATION = pb.EvaluationReport(epoch=0, metrics={EVIL: 1.0})
SUCCESS = pb.JobResult(
    state=pb.JOB_STATE_SUCCEEDED,
    metrics={EVIL: 1.0},
    ranks=[pb.RankResult(device=EVIL)],
    model=EVIL,
    ended_early=EVIL,
    checkpoints=[CHECKPOINT],
)
FAILURE = pb.JobResult(state=pb.JOB_STATE_FAILED, error=EVIL, traceback=f"Traceback\n{EVIL}", checkpoints=[CHECKPOINT])
LOGS = [pb.StreamLogsResponse(rank=0, data=EVIL.encode() + b"\n"), pb.StreamLogsResponse(rank=1, error=EVIL)]


def assert_plain(text: str) -> None:
    assert text
    assert not [part for part in ("\x1b]", "\x1b[2J", "\x07", "\u202e", "\x9b") if part in text], repr(text)


@pytest.mark.parametrize("result", [SUCCESS, FAILURE], ids=["success", "failure"])
@pytest.mark.parametrize(
    "command", [["watch", "j-1"], ["watch", "j-1", "--json"], ["jobs"], ["jobs", "--json"], ["checkpoints", "j-1"]]
)
def test_a_pipe_gets_text(command: list[str], result: pb.JobResult, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(ScriptedJobs(VIEW, QUEUED, EPOCH, EVALUATION, VIEW, result)) as address:
        main([*command, "--coordinator", address])
    printed = capsys.readouterr()
    assert_plain(printed.out)
    assert "\x1b" not in printed.out + printed.err
    assert_plain(printed.err or "nothing")


def test_logs_are_text(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(ScriptedJobs(VIEW, logs=LOGS)) as address:
        assert main(["logs", "j-1", "--coordinator", address]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("rank 0 |  ]0;owned")
    assert printed.err.startswith("elche: rank 1:  ]0;owned")
    assert_plain(printed.out)
    assert_plain(printed.err)


def test_notices_appear_above_the_live_picture_and_leave_it_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Written beside it they were drawn over, and moved it, so that its border stayed behind."""
    file, errors = StringIO(), StringIO()
    monkeypatch.setattr(sys, "stderr", errors)
    monkeypatch.setattr(errors, "isatty", lambda: True)
    view = JobView(job_id="j-1", name="digits", state=JobState.TRAINING)
    with LiveProgress(Console(file=file, force_terminal=True, width=60, height=20)) as progress:
        progress.show(view)
        print_notice("writing a checkpoint; Ctrl-C again to leave at once")
        progress.show(view)
    assert "elche: writing a checkpoint; Ctrl-C again to leave at once\n" in file.getvalue()
    assert errors.getvalue() == ""
    borders = [line for line in file.getvalue().splitlines() if "╰" in line]
    assert max(cell_len(Text.from_ansi(line).plain) for line in borders) == 60 - len("^C^C")
    print_notice("after it")
    assert errors.getvalue() == "elche: after it\n"


@pytest.mark.parametrize("result", [SUCCESS, FAILURE], ids=["success", "failure"])
def test_the_live_picture_on_a_terminal_is_text(result: pb.JobResult) -> None:
    with serving(ScriptedJobs(VIEW, EPOCH, EVALUATION, QUEUED, VIEW, result)) as address:
        ours, theirs = pty.openpty()
        environment = os.environ | {"TERM": "xterm", "COLUMNS": "120", "LINES": "50"}
        command = [sys.executable, "-m", "elche_client", "watch", "j-1", "--coordinator", address]
        with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment) as process:
            os.close(theirs)
            parts = []
            try:
                while part := os.read(ours, 65536):
                    parts.append(part)
            except OSError:
                pass  # the other end is closed
        os.close(ours)
    assert process.returncode in (0, 1)
    text = b"".join(parts).decode("utf-8", "replace")
    assert "31m" in text
    assert_plain(text)
