"""Timelines take a bounded part of the disk, each, of each user and in all."""

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elche.v1 import rank_pb2
from elche_coordinator.core.messages.reports import JobResult, Outcome
from elche_coordinator.limits.budgets import Held
from elche_coordinator.telemetry import timelines as module
from elche_coordinator.telemetry.timelines import Timelines


class Jobs:
    """What timelines ask of a driver: jobs by id, each of the user that its id begins with."""

    def __init__(self) -> None:
        self.results: dict[str, JobResult] = {}
        self.core, self.watchers, self.streams = self, self, SimpleNamespace(ranks={})

    def on_performed(self, action: Any) -> None:
        pass

    def on_published(self, action: Any) -> None:
        pass

    def spec(self, job_id: str) -> Any:
        return SimpleNamespace(submitted_by=job_id.partition("-")[0])

    def result(self, job_id: str) -> JobResult | None:
        return self.results.get(job_id)


SPANS = rank_pb2.Spans(kinds=[1] * 100, starts_us=[1] * 100, durations_us=[1] * 100, details=[1] * 100)


def sent(timelines: Timelines, job_id: str, num: int = 1) -> None:
    for _ in range(num):
        timelines.take_spans(job_id, 0, SPANS)


def written(folder: Path) -> dict[str, int]:
    return {path.stem: path.stat().st_size for path in folder.iterdir()}


def of_spans(folder: Path) -> int:
    """Bytes of one message's line."""
    timelines = Timelines(folder / "one", Jobs())  # type: ignore[arg-type]
    sent(timelines, "x")
    asyncio.run(timelines._flush())
    return written(folder / "one")["x"]


def test_spans_that_nobody_has_asked_for_take_a_bounded_part_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """256 MiB for each job, and a user may have thousands."""
    line = of_spans(tmp_path)
    monkeypatch.setattr(module, "MAX_BYTES", 10 * line)
    folder = tmp_path / "all"
    timelines = Timelines(folder, Jobs())  # type: ignore[arg-type]
    timelines._held = Held("timelines", 25 * line, 40 * line)
    for number in range(5):
        sent(timelines, f"eve-{number}", 20)
        asyncio.run(timelines._flush())
    assert written(folder) == {"eve-0": 10 * line, "eve-1": 10 * line, "eve-2": 5 * line}
    sent(timelines, "bob-1", 20)
    sent(timelines, "anna-1", 20)
    asyncio.run(timelines._flush())
    assert written(folder)["bob-1"] == 10 * line, "others have their room"
    assert sum(written(folder).values()) == 40 * line, "and all together so much"


def test_what_a_job_that_has_ended_has_written_makes_room(tmp_path: Path) -> None:
    line = of_spans(tmp_path)
    folder, jobs = tmp_path / "all", Jobs()
    timelines = Timelines(folder, jobs)  # type: ignore[arg-type]
    timelines._held = Held("timelines", 5 * line, 5 * line)
    sent(timelines, "eve-1", 9)
    sent(timelines, "eve-2")
    jobs.results["eve-1"] = JobResult(outcome=Outcome.SUCCEEDED)
    asyncio.run(timelines._end("eve-1"))
    sent(timelines, "eve-1", 9)  # a message that was on its way
    sent(timelines, "eve-3", 9)
    asyncio.run(timelines._flush())
    assert written(folder) == {"eve-1": 5 * line, "eve-3": 5 * line}
    assert "eve-1" not in timelines._open


def test_what_an_earlier_coordinator_has_written_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = of_spans(tmp_path)
    monkeypatch.setattr(module, "MAX_BYTES", 10 * line)
    monkeypatch.setattr(module, "MAX_WAITING_BYTES", 6 * line)
    folder = tmp_path / "all"
    for _ in range(3):
        timelines = Timelines(folder, Jobs())  # type: ignore[arg-type]
        sent(timelines, "eve-1", 4)
        asyncio.run(timelines._flush())
    assert written(folder) == {"eve-1": 10 * line}


def test_lines_that_wait_for_a_slow_disk_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = of_spans(tmp_path)
    monkeypatch.setattr(module, "MAX_WAITING_BYTES", 6 * line)
    timelines = Timelines(tmp_path / "all", Jobs())  # type: ignore[arg-type]
    sent(timelines, "eve-1", 4)
    asyncio.run(timelines._flush())
    sent(timelines, "eve-1", 4)
    sent(timelines, "bob-1", 9)
    assert timelines._num_waiting == 6 * line
    asyncio.run(timelines._flush())
    assert written(tmp_path / "all") == {"eve-1": 8 * line, "bob-1": 2 * line}


def test_the_oldest_of_who_has_most_make_room_and_those_of_jobs_that_go_on_never(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver: Any = SimpleNamespace(
        on_performed=lambda action: None, watchers=SimpleNamespace(on_published=lambda action: None)
    )
    timelines = Timelines(tmp_path, driver, lambda job_id: "bob" if job_id == "job-1" else "eve")
    for number in range(5):
        path = tmp_path / f"job-{number}.jsonl"
        path.write_bytes(b"x" * 400)
        os.utime(path, (number, number))
    monkeypatch.setattr(module, "MAX_TOTAL_BYTES", 1000)
    timelines._make_room({"job-0"})
    assert sorted(one.stem for one in tmp_path.iterdir()) == ["job-0", "job-1", "job-4"]


def test_ranks_are_told_the_time_also_after_the_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once they were not until it had caught up, and their spans lay an hour beside the coordinator's messages."""
    times, told = iter([5000.0, 5001.0, 1000.0, 1001.0, 1003.0]), []
    timelines = Timelines(tmp_path / "all", Jobs())  # type: ignore[arg-type]
    timelines._open["x"] = module._Open("")
    monkeypatch.setattr(timelines, "_send_clock", lambda job_id, now_s: told.append(now_s))
    monkeypatch.setattr(module, "EVERY_S", 0.0)

    async def write() -> None:
        with pytest.raises(RuntimeError):  # no more times
            await timelines.write()

    with monkeypatch.context() as patch:
        patch.setattr(module.time, "time", times.__next__)
        asyncio.run(write())
    assert told == [5000.0, 1000.0, 1003.0]
