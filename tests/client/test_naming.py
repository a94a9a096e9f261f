"""A job is meant by its id, by the beginning of one, or by its name."""

import json
from pathlib import Path

import pytest

from elche.errors import InvalidJob, UnknownJob
from elche_client.cli.main import main
from elche_client.commands.naming import find
from elche_client.events import JobState, JobView
from support.scripted import RESULT, VIEW, ScriptedJobs, serving


def job(job_id: str, name: str, state: JobState = JobState.SUCCEEDED) -> JobView:
    return JobView(job_id=job_id, name=name, state=state)


JOBS = [
    job("digits-1a2b", "digits"),
    job("digits-1c3d", "digits"),
    job("words-77aa", "words", JobState.TRAINING),
    job("words-78bb", "words"),
    job("many-1", "many", JobState.QUEUED),
    job("many-2", "many", JobState.TRAINING),
]


@pytest.mark.parametrize(
    ("meant", "job_id"),
    [
        ("digits-1a", "digits-1a2b"),
        ("digits", "digits-1c3d"),  # both have ended: the newest
        ("words", "words-77aa"),  # the one that goes on, and not the newest
        ("words-78", "words-78bb"),
        ("wor", None),
        ("many", None),
    ],
)
def test_what_is_meant(meant: str, job_id: str | None) -> None:
    if job_id is None:
        with pytest.raises(InvalidJob, match=f"'{meant}' may be one of 2 jobs, .*: give more of the id"):
            find(meant, JOBS)
    else:
        assert find(meant, JOBS) == job_id


def test_what_is_nothing_gets_what_is_near_it() -> None:
    with pytest.raises(UnknownJob, match="no job has the id 'digts-1a2b'; did you mean digits-1a2b"):
        find("digts-1a2b", JOBS)
    with pytest.raises(UnknownJob, match="no job has the id 'zebra'; `elche jobs` lists them"):
        find("zebra", JOBS)


@pytest.mark.parametrize("meant", ["j-1", "j", "digits"])
@pytest.mark.parametrize(
    "command",
    [
        ["cancel"],
        ["watch"],
        ["checkpoint"],
        ["pause"],
        ["scale", "--ranks", "2"],
        ["logs"],
        ["resume"],
        ["checkpoints"],
    ],
)
def test_every_command_knows_it(command: list[str], meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(ScriptedJobs(VIEW, RESULT)) as address:
        code = main([command[0], meant, *command[1:], "--coordinator", address])
    printed = capsys.readouterr()
    assert "no job" not in printed.err
    assert "neither" not in printed.err
    if command[0] == "cancel":
        assert (code, printed.out) == (0, "job j-1 is being stopped\n")


@pytest.mark.parametrize(
    "command", [["resume"], ["checkpoints"], ["journal"], ["timeline"], ["plan", "--model", "1MB", "--like"]]
)
def test_a_folder_with_the_name_of_a_job_does_not_hide_it(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder of `digits/digits.py` was said to be no run, and the job was not mentioned."""
    monkeypatch.chdir(tmp_path)
    Path("digits").mkdir()
    assert main([*command, "digits"]) == 2
    assert capsys.readouterr().err.endswith("For the job digits, not the folder here, give the job's id\n")
    assert main([*command, "./digits"]) == 2
    assert "the job's id" not in capsys.readouterr().err


def test_the_answer_names_the_job_that_was_found(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(ScriptedJobs(VIEW, RESULT)) as address:
        assert main(["cancel", "digits", "--json", "--coordinator", address]) == 0
    assert json.loads(capsys.readouterr().out)["job_id"] == "j-1"
