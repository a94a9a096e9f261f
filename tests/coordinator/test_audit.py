"""What is in the audit log, and that nobody can push others' lines out of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from elche.token import Role
from elche_coordinator.access import audit as module
from elche_coordinator.access.audit import MAX_REFUSALS, NUM_OLDER, UNCHANGED, Audit
from elche_coordinator.roles import Caller

EVE, MALLORY = Caller("eve", Role.VIEWER, "t1"), Caller("mallory", Role.USER, "t2")
OLGA = Caller("olga", Role.OPERATOR, "t4")


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


def test_many_real_changes_of_one_user_do_not_push_out_the_few_lines_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who submitted and cancelled jobs for some minutes had all five files alone."""
    monkeypatch.setattr(module, "MAX_BYTES", 10_000)
    path = tmp_path / "audit.jsonl"
    audit, quoted = Audit(path), Caller('"token": ', Role.USER, "t3")
    for number in range(3000):
        if number % 100 == 0 and number < 1000:
            audit.note(OLGA, "DrainHost", f"host {number}", "there", "done")
        if number % 500 == 0:
            audit.note(quoted, "SubmitJob", f"job {number}", "there", "done")
        audit.note(MALLORY, "CancelJob", f"job {number}", "there", "done")
    files = [path.with_name(f"audit.jsonl.{number}") for number in range(NUM_OLDER, 0, -1)] + [path]
    assert sorted(tmp_path.iterdir()) == sorted(files)
    assert all(one.stat().st_size < 10_000 for one in files)
    lines = [line for one in files for line in lines_of(one)]
    by_who = {who: [line["what"] for line in lines if line["who"] == str(who)] for who in (OLGA, quoted, MALLORY)}
    assert by_who[OLGA] == [f"host {number}" for number in range(0, 1000, 100)]
    assert by_who[quoted] == [f"job {number}" for number in range(0, 3000, 500)]
    assert by_who[MALLORY] == [f"job {number}" for number in range(3000 - len(by_who[MALLORY]), 3000)]
    assert sum(one.stat().st_size for one in files) > 40_000, "so much is kept"


def test_lines_of_other_hands_are_kept_as_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte that is no UTF-8 ended each later rollover, and the line of that moment was lost."""
    monkeypatch.setattr(module, "MAX_BYTES", 2_000)
    path = tmp_path / "audit.jsonl"
    odd = [b'{"who": "\xff\xfe", "token": "x"}\n', b"\xff" * 3_000 + b"\n", b"\0\n", b"[" * 1_000 + b"\n", b"no end"]
    path.write_bytes(b"".join(odd))
    audit = Audit(path, lambda: 7200.0)
    for number in range(100):
        audit.note(MALLORY, "CancelJob", f"job {number}", "there", "done")
    files = [path, *(Path(f"{path}.{number}") for number in range(1, NUM_OLDER + 1))]
    told = b"".join(one.read_bytes() for one in reversed(files)).splitlines()
    mine = [json.loads(line)["what"] for line in told if line.startswith(b'{"at"')]
    assert mine == [f"job {number}" for number in range(100 - len(mine), 100)]
    assert len(mine) > 30
    assert not Path(f"{path}.{NUM_OLDER + 1}").exists()
    assert all(one.stat().st_size <= 2_500 for one in files)


def test_a_line_is_bounded_whatever_is_in_it(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    Audit(path).note(EVE, "\U0001f600" * 1000, "\0" * 1000, "here", "refused: " + "x" * 1000)
    (line,) = lines_of(path)
    assert path.stat().st_size < 2500
    assert line["call"] == "\U0001f600" * len(line["call"]) != ""
    assert line["outcome"] == "refused: " + "x" * 291
