"""A timeline from its lines: one clock for all ranks, waits and gaps explained, a trace that a viewer can read."""

import json
import re
from typing import Any

import pytest

from elche.errors import InvalidJob
from elche.timeline import AVERAGE, BATCH, FETCH, IDLE, KINDS, WAIT_DATA, WAIT_LIMIT, WAIT_ROUND
from elche_client.display.timeline import GAP, Timeline, read, to_page, to_trace

START_S = 1_700_000_000.0


def spans(rank: int, *rows: tuple[int, float, float, int], ahead_s: float = 0.0) -> str:
    """Rows of (kind, start in ms, length in ms, detail), on a rank's clock that is ahead."""
    row = {
        "spans": rank,
        "base_us": round((START_S + ahead_s) * 1e6),
        "kinds": [kind for kind, _, _, _ in rows],
        "starts_us": [round(start * 1000) for _, start, _, _ in rows],
        "durations_us": [round(length * 1000) for _, _, length, _ in rows],
        "details": [detail for _, _, _, detail in rows],
        "dropped": 0,
    }
    return json.dumps(row)


def clock(rank: int, ahead_s: float, round_trip_s: float) -> str:
    return json.dumps({"clock": rank, "ahead_s": ahead_s, "round_trip_s": round_trip_s})


def told(rank: int, name: str, at_ms: float, **facts: Any) -> str:
    return json.dumps({"told": rank, "at": START_S + at_ms / 1000, "name": name, **facts})


def texts(timeline: Timeline, name: str) -> list[str]:
    return [span.text for span in timeline.spans if span.name == name]


def test_kinds_have_numbers_of_their_own() -> None:
    assert [kind.name for kind in KINDS][BATCH] == "batch"
    assert [KINDS[number].name for number in (WAIT_ROUND, AVERAGE, FETCH)] == ["wait for a round", "average", "fetch"]
    assert len({kind.name for kind in KINDS}) == len(KINDS)


def test_ranks_with_wrong_clocks_are_brought_together_by_the_quickest_answer() -> None:
    lines = [
        clock(0, 0.0, 0.002),
        clock(1, 3.5, 0.200),
        clock(1, 3.0, 0.004),
        spans(0, (BATCH, 0, 10, 0)),
        spans(1, (BATCH, 0, 10, 0), ahead_s=3.0),
    ]
    timeline = read(lines, "here")
    starts = {span.rank: span.start_s for span in timeline.spans}
    assert starts[0] == pytest.approx(START_S, abs=1e-5)
    assert starts[1] == pytest.approx(START_S, abs=1e-5)
    assert timeline.clocks[1] == (3.0, 0.002)


def test_a_wait_names_the_rank_that_came_last() -> None:
    lines = [
        spans(0, (BATCH, 0, 10, 0), (WAIT_ROUND, 10, 42, 7), (AVERAGE, 10, 42, 7)),
        spans(1, (BATCH, 0, 50, 0), (WAIT_ROUND, 50, 2, 7), (AVERAGE, 50, 2, 7)),
    ]
    first, second = texts(read(lines, "here"), "wait for a round")
    assert first == "round 7: rank 1 entered 40.0 ms later"
    assert second == "round 7: the averaging itself; all ranks had entered"


def test_other_waits_say_what_would_help_or_what_ended_them() -> None:
    lines = [
        spans(0, (WAIT_DATA, 0, 5, 0), (WAIT_LIMIT, 5, 5, 99), (IDLE, 10, 20, 0)),
        told(0, "throttle", 4, limit_step=12),
        told(0, "lease", 30, size=100),
    ]
    timeline = read(lines, "here")
    assert "num_workers" in texts(timeline, "wait for data")[0]
    assert texts(timeline, "wait at the limit")[0].startswith("limited to 12 batches")
    assert texts(timeline, "idle") == ["it had no work until the coordinator sent: lease"]


def test_time_that_nothing_covers_is_a_gap() -> None:
    lines = [spans(0, (BATCH, 0, 10, 0), (BATCH, 11, 10, 0), (BATCH, 40, 10, 0), (FETCH, 21, 19, 64))]
    (gap,) = [span for span in read(lines, "here").spans if span.name == GAP]
    assert (gap.start_s - START_S, gap.end_s - START_S) == pytest.approx((0.021, 0.040), abs=1e-5)
    assert gap.text.startswith("between 'batch' and 'batch'")


def test_the_trace_is_in_the_viewers_format() -> None:
    round_row = {"event": "round", "at": START_S + 0.05, "text": "round 1", "anchor": 10, "batches": [10, 4]}
    lines = [
        spans(0, (BATCH, 0, 10, 3), (AVERAGE, 2, 20, 1)),
        told(0, "sync now", 1, round=1, why="near the anchor"),
        json.dumps(round_row),
    ]
    trace = json.loads(json.dumps(to_trace(read(lines, "here"))))
    by_phase: dict[str, list[dict[str, Any]]] = {}
    for event in trace["traceEvents"]:
        by_phase.setdefault(event["ph"], []).append(event)
        assert isinstance(event["pid"], int)
    assert set(by_phase) == {"M", "X", "i", "C"}
    batch = next(event for event in by_phase["X"] if event["name"] == "batch")
    assert (batch["ts"], batch["dur"], batch["args"]) == (0.0, 10_000.0, {"epoch": 3})
    assert all(event["ts"] >= 0 for phase in "XiC" for event in by_phase[phase])
    threads = {(event["pid"], event["tid"]) for event in by_phase["M"] if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in by_phase["X"]} <= threads
    assert by_phase["i"][0]["args"]["why"] == "near the anchor"
    assert by_phase["C"][0]["args"] == {"anchor": 10, "rank 0": 10, "rank 1": 4}


def test_the_page_needs_nothing_else_and_text_stays_text() -> None:
    lines = [spans(0, (BATCH, 0, 10, 0)), told(0, "leave", 12, reason="</script><b>")]
    page = to_page(read(lines, "here"), "<job>")
    assert not re.search(r"(src|href)=", page)
    assert "</script><b>" not in page
    assert "<job>" not in page
    assert page.count("</script>") == 1


def test_a_line_that_is_cut_off_is_left_out_and_anything_else_is_an_error() -> None:
    good = spans(0, (BATCH, 0, 10, 0))
    assert len(read([good, good[:20]], "here").spans) == 1
    for lines in (["nonsense"], [good, "nonsense", good], ["[1]"]):
        with pytest.raises(InvalidJob, match="here is not a timeline"):
            read(lines, "here")
    assert read([], "here").spans == []
