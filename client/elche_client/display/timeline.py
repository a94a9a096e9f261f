"""Reads a job's timeline, puts all ranks' spans on the coordinator's clock, and writes a trace or an HTML page."""

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elche.errors import InvalidJob
from elche.timeline import KINDS, LOOP

MIN_GAP_S = 0.002
"""Shorter pauses, in seconds, between two spans of a loop are not shown as gaps."""
GAP = "gap"


@dataclass(frozen=True, slots=True)
class Span:
    """An activity of a rank, with times in seconds since 1970 by the coordinator's clock."""

    rank: int
    lane: str
    name: str
    start_s: float
    end_s: float
    detail: int = 0
    text: str = ""
    """The reason, if known."""


@dataclass(frozen=True, slots=True)
class TimelineMark:
    """A point in time: a message of the coordinator to a rank, or an event of the job (`rank` is None)."""

    rank: int | None
    name: str
    at_s: float
    facts: dict[str, Any]


@dataclass(slots=True)
class Timeline:
    """All spans and marks of one job, in order of time."""

    spans: list[Span] = field(default_factory=list)
    marks: list[TimelineMark] = field(default_factory=list)
    clocks: dict[int, tuple[float, float]] = field(default_factory=dict)
    """(offset of its clock from the coordinator's, error of the offset) in seconds, by rank."""
    num_dropped: int = 0
    """Spans that were not recorded because there were too many."""

    @property
    def ranks(self) -> list[int]:
        """The ranks that have recorded spans."""
        return sorted({span.rank for span in self.spans})


def read(lines: Iterable[str], where: str) -> Timeline:
    """A timeline from its JSON lines; an incomplete last line is ignored. Raises `InvalidJob` for other content."""
    rows = list(_rows(lines, where))
    try:
        return _timeline(rows)
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise InvalidJob(f"{where} is not a timeline: a line lacks a field, or is damaged ({error})") from None


def _timeline(rows: list[dict[str, Any]]) -> Timeline:
    timeline = Timeline()
    for row in rows:
        if "clock" in row:
            known = timeline.clocks.get(row["clock"])
            # The quicker the exchange, the less the offset can be wrong. It is negative if a clock was set in between.
            if row["round_trip_s"] >= 0 and (known is None or row["round_trip_s"] / 2 < known[1]):
                timeline.clocks[row["clock"]] = (row["ahead_s"], row["round_trip_s"] / 2)
    for row in rows:
        if "spans" in row:
            timeline.spans.extend(_spans(row, timeline.clocks.get(row["spans"], (0.0, 0.0))[0]))
            timeline.num_dropped += row["dropped"]
        elif "told" in row:
            facts = {name: value for name, value in row.items() if name not in ("told", "at", "name")}
            timeline.marks.append(TimelineMark(row["told"], row["name"], row["at"], facts))
        elif "event" in row:
            facts = {name: value for name, value in row.items() if name not in ("event", "at")}
            timeline.marks.append(TimelineMark(None, row["event"], row["at"], facts))
    timeline.spans.sort(key=lambda span: span.start_s)
    timeline.marks.sort(key=lambda mark: mark.at_s)
    timeline.spans = sorted([*_explained(timeline), *_gaps(timeline)], key=lambda span: span.start_s)
    return timeline


def _rows(lines: Iterable[str], where: str) -> Iterator[dict[str, Any]]:
    broken = None
    for number, line in enumerate(lines, 1):
        if broken is not None:
            raise InvalidJob(f"{where} is not a timeline: line {broken} is not JSON")
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            broken = number
            continue
        if not isinstance(row, dict):
            raise InvalidJob(f"{where} is not a timeline: line {number} is not an object")
        yield row
    if broken == 1:
        raise InvalidJob(f"{where} is not a timeline: line 1 is not JSON")


def _spans(row: dict[str, Any], ahead_s: float) -> Iterator[Span]:
    base_s = row["base_us"] / 1e6 - ahead_s
    columns = zip(row["kinds"], row["starts_us"], row["durations_us"], row["details"], strict=True)
    for number, start_us, duration_us, detail in columns:
        kind = KINDS[number] if number < len(KINDS) else None
        start_s = base_s + start_us / 1e6
        name, lane = (kind.name, kind.lane) if kind else (f"kind {number}", "other")
        yield Span(row["spans"], lane, name, start_s, start_s + duration_us / 1e6, detail)


def _explained(timeline: Timeline) -> Iterator[Span]:
    """The spans, with the reason of those that wait."""
    rounds = _Rounds(timeline)
    throttled = {rank: _Marks(timeline, rank, "throttle") for rank in timeline.ranks}
    for span in timeline.spans:
        text = ""
        if span.name == "wait for a round":
            text = rounds.why(span)
        elif span.name == "wait at the limit":
            last = throttled[span.rank].last_until(span.start_s)
            limit = last.facts["limit_step"] if last else span.detail
            text = f"limited to {limit} batches until slower ranks have caught up (max_batch_diff, or a pause)"
        elif span.name == "wait for data":
            text = "the next batch is not fetched yet: more num_workers, or a faster data set, would help"
        elif span.name == "idle":
            text = rounds.why_idle(span)
        yield Span(span.rank, span.lane, span.name, span.start_s, span.end_s, span.detail, text) if text else span


class _Rounds:
    """The rank that entered each round last, and the coordinator's messages to each rank."""

    def __init__(self, timeline: Timeline) -> None:
        self._entries: dict[int, dict[int, Span]] = {}
        for span in timeline.spans:
            if span.name == "average":
                self._entries.setdefault(span.detail, {})[span.rank] = span
        self._marks = {rank: _Marks(timeline, rank) for rank in timeline.ranks}

    def why(self, wait: Span) -> str:
        entries = self._entries.get(wait.detail, {})
        if wait.rank not in entries or len(entries) < 2:
            return f"round {wait.detail}: the averaging"
        own_s = entries[wait.rank].start_s
        last = max(entries.values(), key=lambda entry: entry.start_s)
        late_ms = (last.start_s - max(own_s, wait.start_s)) * 1000
        if last.rank == wait.rank or late_ms <= 0.5 * (wait.end_s - wait.start_s) * 1000:
            return f"round {wait.detail}: the averaging itself; all ranks had entered"
        return f"round {wait.detail}: rank {last.rank} entered {late_ms:.1f} ms later"

    def why_idle(self, wait: Span) -> str:
        last = self._marks[wait.rank].last_until(wait.end_s + 0.05)
        if last is None or last.at_s < wait.start_s - 0.05:
            return "it had no work and no message came"
        return f"it had no work until the coordinator sent: {last.name}"


class _Marks:
    """The marks of one rank, in order of time."""

    def __init__(self, timeline: Timeline, rank: int, name: str = "") -> None:
        self._all = [one for one in timeline.marks if one.rank == rank and name in ("", one.name)]
        self._at_s = [one.at_s for one in self._all]

    def last_until(self, at_s: float) -> TimelineMark | None:
        """The last mark up to a time; None before the first."""
        index = bisect_right(self._at_s, at_s)
        return self._all[index - 1] if index else None


def _gaps(timeline: Timeline) -> Iterator[Span]:
    """Spans for the times in a rank's loop that no span covers."""
    last: dict[int, Span] = {}
    for span in timeline.spans:
        if span.lane != LOOP:
            continue
        before = last.get(span.rank)
        if before is not None and span.start_s - before.end_s > MIN_GAP_S:
            text = f"between {before.name!r} and {span.name!r}: host code such as callbacks, or another process"
            yield Span(span.rank, LOOP, GAP, before.end_s, span.start_s, 0, text)
        if before is None or span.end_s > before.end_s:
            last[span.rank] = span


def to_trace(timeline: Timeline) -> dict[str, Any]:
    """The timeline in the trace event format, which Perfetto and chrome://tracing read."""
    start_s = _start_s(timeline)
    lanes = sorted(
        {(span.rank, span.lane) for span in timeline.spans}, key=lambda pair: (pair[0], pair[1] != LOOP, pair[1])
    )
    threads = {lane: index + 1 for index, lane in enumerate(lanes)}
    events: list[dict[str, Any]] = [_name("process_name", 0, 0, "coordinator")]
    for rank in timeline.ranks:
        ahead_s, wrong_s = timeline.clocks.get(rank, (0.0, 0.0))
        note = f"rank {rank} (clock {ahead_s * 1000:+.2f} ms, ± {wrong_s * 1000:.2f} ms)"
        events.append(_name("process_name", rank + 1, 0, note))
    events.extend(_name("thread_name", rank + 1, threads[rank, lane], lane) for rank, lane in lanes)
    for span in timeline.spans:
        facts: dict[str, Any] = {"why": span.text} if span.text else {}
        if detail := _detail(span.name):
            facts[detail] = span.detail
        events.append(
            {
                "ph": "X",
                "name": span.name,
                "cat": span.lane,
                "pid": span.rank + 1,
                "tid": threads[span.rank, span.lane],
                "ts": round((span.start_s - start_s) * 1e6, 1),
                "dur": round((span.end_s - span.start_s) * 1e6, 1),
                "args": facts,
            }
        )
    for mark in timeline.marks:
        at_us = round((mark.at_s - start_s) * 1e6, 1)
        process = 0 if mark.rank is None else mark.rank + 1
        common = {"pid": process, "tid": 0, "ts": at_us}
        events.append({"ph": "i", "s": "p", "name": mark.name, "cat": "coordinator", "args": mark.facts, **common})
        if "anchor" in mark.facts:
            counted = {
                "anchor": mark.facts["anchor"],
                **{f"rank {i}": n for i, n in enumerate(mark.facts["batches"])},
            }
            events.append({"ph": "C", "name": "batches between averagings", "args": counted, **common})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"dropped spans": timeline.num_dropped}}


def to_page(timeline: Timeline, title: str) -> str:
    """A self-contained HTML page with lanes for each rank, which can be zoomed and panned."""
    start_s = _start_s(timeline)
    names = sorted({span.name for span in timeline.spans})
    number = {name: index for index, name in enumerate(names)}
    texts: dict[str, int] = {}
    lanes: dict[tuple[int, str], list[list[int]]] = {}
    for span in timeline.spans:
        row = [
            round((span.start_s - start_s) * 1e6),
            round((span.end_s - span.start_s) * 1e6),
            number[span.name],
            span.detail,
        ]
        row.append(texts.setdefault(span.text, len(texts)))
        lanes.setdefault((span.rank, span.lane), []).append(row)
    ordered = sorted(lanes.items(), key=lambda item: (item[0][0], item[0][1] != LOOP, item[0][1]))
    data = {
        "title": title,
        "start_s": start_s,
        "names": names,
        "details": [_detail(name) for name in names],
        "texts": list(texts),
        "lanes": [{"rank": rank, "lane": lane, "spans": spans} for (rank, lane), spans in ordered],
        "moments": [[round((m.at_s - start_s) * 1e6), m.rank, m.name, m.facts] for m in timeline.marks],
        "idle": _sums(timeline),
        "dropped": timeline.num_dropped,
    }
    template = (Path(__file__).parent / "timeline.html").read_text(encoding="utf-8")
    # "</script>" in a text would end the page's script, and what follows it would be HTML.
    return template.replace("/*DATA*/null", json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"))


def _sums(timeline: Timeline) -> dict[str, dict[str, float]]:
    """Seconds of each rank's loop, by activity."""
    sums: dict[str, dict[str, float]] = {str(rank): {} for rank in timeline.ranks}
    for span in timeline.spans:
        if span.lane == LOOP:
            of_rank = sums[str(span.rank)]
            of_rank[span.name] = of_rank.get(span.name, 0.0) + span.end_s - span.start_s
    return sums


def _start_s(timeline: Timeline) -> float:
    firsts = [*(span.start_s for span in timeline.spans[:1]), *(mark.at_s for mark in timeline.marks[:1])]
    return min(firsts, default=0.0)


def _detail(name: str) -> str:
    return next((kind.detail for kind in KINDS if kind.name == name), "")


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}
