"""What the page draws: bounded, JSON that a browser takes, and events told once."""

import json
from dataclasses import replace
from math import inf, nan

import pytest
from test_metrics import job_view, rank_view

from elche_coordinator.core.reports import Checkpoint
from elche_coordinator.web import shapes
from elche_coordinator.web.recorder import MAX_JOBS, MAX_POINTS, JobRecording, Recorder


class Wall:
    now = 1_700_000_000.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_points_come_half_as_often_when_there_are_many() -> None:
    recording, now = JobRecording(), 0.0
    for _ in range(10 * MAX_POINTS):
        now += 1.0
        recording.add(job_view(3), now)
    assert len(recording.at) < MAX_POINTS
    assert recording.every_s == 16.0
    assert list(recording.at) == sorted(recording.at)
    lengths = {len(values) for figures in recording.ranks.values() for values in figures.values()}
    assert lengths == {len(recording.at)}


def test_ranks_that_come_later_have_no_past() -> None:
    recording = JobRecording()
    recording.add(job_view(1), 1.0)
    recording.add(job_view(2), 3.0)
    whole = shapes.series(recording, (0, 1), None)
    assert whole["is_whole"]
    assert whole["ranks"]["1"]["samples_per_s"] == [None, 1600.0]
    news = shapes.series(recording, (0, 1), 1.0)
    assert (news["at"], news["is_whole"]) == ([3.0], False)


def test_jobs_that_are_forgotten_stay_forgotten() -> None:
    recorder = Recorder(Wall())
    running = [job_view(1, f"job-{index}") for index in range(MAX_JOBS + 20)]
    recorder.take_views(running)
    ended = [replace(view, state="succeeded", ended_for_s=1.0) for view in running]
    recorder.take_views(ended)
    recorder.take_views([*ended, job_view(1, "new")])
    kept = {name: len(one.happenings) for name, one in recorder.jobs.items()}
    assert len(kept) <= MAX_JOBS + 1
    for _ in range(5):
        recorder.take_views([*ended, job_view(1, "new")])
    assert {name: len(one.happenings) for name, one in recorder.jobs.items()} == kept


def test_a_change_is_told_once() -> None:
    recorder = Recorder(Wall())
    view = job_view(2)
    recorder.take_views([view])
    lost = replace(view, state="failed", reason="rank 1 was killed", num_lost_ranks=1, ended_for_s=0.1)
    for _ in range(3):
        recorder.take_views([lost])
    told = [(one.kind, one.text) for one in recorder.jobs["j-1"].happenings]
    assert told == [
        ("state", "training"),
        ("state", "failed: rank 1 was killed"),
        ("error", "a rank is lost: rank 1 was killed"),
    ]


@pytest.mark.parametrize("bad", [inf, -inf, nan])
def test_numbers_that_json_has_not_reach_no_page(bad: float) -> None:
    checkpoint = Checkpoint(version=1, name="1-1", path="/x", epoch=1, global_step=1, metrics={"loss": bad})
    rank = replace(rank_view(0), loss=bad, divergence=bad, data_wait_s=bad, throttled_s=bad, waited_s=bad)
    view = replace(job_view(0), ranks=(rank,), loss=bad, metrics={"loss": bad}, checkpoints=(checkpoint,))
    recording = JobRecording()
    recording.add(view, 1.0)
    shown = {"job": shapes.detail(view), "series": shapes.series(recording, shapes.charted(view), None)}
    assert json.loads(json.dumps(shown, allow_nan=False))["job"]["loss"] is None


def test_charts_show_the_fastest_and_the_slowest() -> None:
    view = replace(job_view(0), ranks=tuple(replace(rank_view(i), ms_per_batch=float(i + 1)) for i in range(100)))
    assert shapes.charted(view) == (*range(6), *range(94, 100))
    assert shapes.charted(job_view(3)) == (0, 1, 2)
    table = shapes.detail(view)
    assert len(table["table"]) == shapes.MAX_ROWS
    assert table["num_ranks_hidden"] == 0
