"""What the programs log, as lines of text or as JSON objects."""

import json
import logging
from typing import Any

import pytest

from elche.logs import JsonLines, TextLines, fields, is_of_interest, print_reason
from elche_coordinator.core.messages.ids import JobId
from elche_coordinator.core.messages.reports import UserEvent
from elche_coordinator.loop_health import LoopHealth
from elche_coordinator.streams.watchers import Watchers


def record(text: str, *arguments: Any, level: int = logging.INFO, **more: Any) -> logging.LogRecord:
    made = logging.LogRecord("elche_coordinator.streams.watchers", level, "x.py", 1, text, arguments, None)
    made.created = 1_700_000_000.25
    made.__dict__ |= more
    return made


def as_json(*arguments: Any, **more: Any) -> dict[str, Any]:
    line = JsonLines().format(record(*arguments, **more))
    assert line.isascii()
    assert line.isprintable()
    found: dict[str, Any] = json.loads(line)
    return found


def test_a_line_of_json_has_level_utc_time_and_what_the_message_names() -> None:
    template = "job=%s rank=%d 100%% of %s, exited code=%d after %.1f s"
    assert as_json(template, "digits-1", 3, "it", -9, 2.25, level=logging.WARNING) == {
        "time": "2023-11-14T22:13:20.250Z",
        "level": "warning",
        "logger": "elche_coordinator.streams.watchers",
        "job": "digits-1",
        "rank": 3,
        "code": -9,
        "message": "job=digits-1 rank=3 100% of it, exited code=-9 after 2.2 s",
    }


def test_of_which_round_and_rank_a_message_is_may_be_said_beside_it() -> None:
    found = as_json("job=%s checkpoint=%s", "j", "/c", **fields(round=7, rank=1))
    assert (found["round"], found["rank"], found["job"], found["checkpoint"]) == (7, 1, "j", "/c")


def test_text_from_outside_is_no_field_and_no_line_of_its_own() -> None:
    hostile = 'x\n{"level": "error"} job=%s \x1b[2J\u202e\udc80 rank=1'
    found = as_json("job=%s %s", "j", hostile)
    assert found["message"] == f"job=j {hostile}"
    assert set(found) == {"time", "level", "logger", "job", "message"}
    assert TextLines().format(record("job=%s %s", "j", hostile)).isprintable()
    assert as_json("rank=%s, with no value")["message"] == "rank=%s, with no value"
    assert as_json("%(job)s", {"job": "j"})["message"] == "j"


def test_an_exception_is_in_the_same_line() -> None:
    try:
        raise ValueError("a\nb")
    except ValueError as error:
        found = as_json("job=%s", "j", exc_info=(ValueError, error, error.__traceback__))
    assert found["traceback"].endswith("ValueError: a\nb")


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_why_a_program_exits_is_said_in_the_same_form(log_format: str, capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("elche-worker")
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    logger.addHandler(handler)
    try:
        print_reason("elche-worker", "no device", log_format)
    finally:
        logger.removeHandler(handler)
    said = capsys.readouterr().err
    if log_format == "text":
        assert said == "elche-worker: no device\n"
    else:
        assert json.loads(said)["level"] == "critical"
        assert json.loads(said)["message"] == "no device"


def test_a_caller_who_goes_in_the_middle_of_an_answer_is_no_error() -> None:
    """gRPC logs it with a traceback, for each download that breaks."""
    broken = record("ExecuteBatchError raised in core by servicer method [%s]", "/elche.v1.JobService/FetchModel")
    bug = record("Unexpected [%s] raised by servicer method [%s]", "KeyError", "/elche.v1.JobService/FetchModel")
    broken.name = bug.name = "grpc._cython.cygrpc"
    assert [is_of_interest(one) for one in (broken, bug)] == [False, True]


def test_what_the_coordinator_notes_of_a_rank_is_logged_and_what_user_code_says_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """That checkpoints cannot be written was on the page and in watches, where nobody may have looked."""
    watchers, text = Watchers(LoopHealth()), "/c/1 cannot be written: no space, on h: training goes on"
    watchers.publish(JobId("j"), UserEvent(rank=1, text=text))
    watchers.publish(JobId("j"), UserEvent(rank=1, text="a picture", is_of_user=True))
    assert [(one.levelname, one.getMessage()) for one in caplog.records] == [("WARNING", f"job=j rank 1: {text}")]
