"""What is in the audit log, and that nobody can push others' lines out of it by calls that are refused."""

import json
from pathlib import Path
from typing import Any

from elche.token import Role
from elche_coordinator.access.audit import MAX_REFUSALS, UNCHANGED, Audit
from elche_coordinator.roles import Caller

EVE, MALLORY = Caller("eve", Role.VIEWER, "t1"), Caller("mallory", Role.USER, "t2")


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_refusals_of_one_caller_have_so_many_lines_an_hour(tmp_path: Path) -> None:
    """7,680 refused calls of a viewer pushed all other lines out of the five files, in 29 s."""
    now_s = 7200.0
    path = tmp_path / "audit.jsonl"
    audit = Audit(path, lambda: now_s)
    for number in range(1000):
        audit.note(EVE, "CancelJob", f"job {number}", "here", "refused: the role")
    audit.note(MALLORY, "CancelJob", "job of another", "there", "refused: of another")
    audit.note(EVE, "SubmitJob", "mine", "here", "done")
    lines = lines_of(path)
    assert [line["what"] for line in lines[:MAX_REFUSALS]] == [f"job {number}" for number in range(MAX_REFUSALS)]
    assert [line["what"] for line in lines[MAX_REFUSALS:]] == ["job of another", "mine"]
    now_s += 3600
    audit.note(EVE, "CancelJob", "job 1000", "here", "refused: the role")
    told, last = lines_of(path)[-2:]
    assert (told["who"], told["outcome"]) == (
        "eve (viewer)",
        "refused or without effect: 940 more calls in one hour, which have no lines",
    )
    assert last["what"] == "job 1000"


def test_calls_that_change_nothing_push_no_lines_out(tmp_path: Path) -> None:
    """A user could cancel a job that had ended, again and again, each time with a line of its own."""
    path = tmp_path / "audit.jsonl"
    audit = Audit(path, lambda: 7200.0)
    for _ in range(1000):
        audit.note(MALLORY, "CancelJob", "ended long ago", "there", UNCHANGED)
    audit.note(MALLORY, "CancelJob", "mine", "there", "done")
    lines = lines_of(path)
    assert len(lines) == MAX_REFUSALS + 1
    assert (lines[0]["outcome"], lines[-1]["outcome"]) == (UNCHANGED, "done")


def test_a_line_is_bounded_whatever_is_in_it(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    Audit(path).note(EVE, "\U0001f600" * 1000, "\0" * 1000, "here", "refused: " + "x" * 1000)
    (line,) = lines_of(path)
    assert path.stat().st_size < 2500
    assert line["call"] == "\U0001f600" * len(line["call"]) != ""
    assert line["outcome"] == "refused: " + "x" * 291
