"""What the page draws and is told: bounded, JSON that a browser takes, and events told once."""

import json
from dataclasses import replace
from math import inf, nan

import pytest

from elche_coordinator.core.describe import JobDetails
from elche_coordinator.core.messages.ids import AgentId, JobId, Rank
from elche_coordinator.core.messages.reports import (
    Checkpoint,
    EvaluationReport,
    JobResult,
    MembershipReport,
    Outcome,
    StallReport,
)
from elche_coordinator.core.messages.spec import JobSpec, Slot
from elche_coordinator.core.records.fleet import HostView
from elche_coordinator.web import payloads
from elche_coordinator.web.page_stream import PageStream
from elche_coordinator.web.payloads import ListQuery
from elche_coordinator.web.recorder import MAX_JOBS, MAX_NAMES, MAX_POINTS, JobRecording, Recorder, Table
from support.effort import lines_run
from support.views import FULL, Wall, epoch_report, job_view, rank_view


def test_points_come_half_as_often_when_there_are_many() -> None:
    recording, now = JobRecording(), 0.0
    for _ in range(10 * MAX_POINTS):
        now += 1.0
        recording.add(job_view(3), now)
    at = recording.moments.at
    assert len(at) < MAX_POINTS
    assert recording.every_s == 16.0
    assert list(at) == sorted(at)
    columns = [
        *recording.moments.figures.values(),
        *(one for rank in recording.ranks.values() for one in rank.values()),
    ]
    assert {len(values) for values in columns} == {len(at)}


def test_ranks_that_come_later_have_no_past() -> None:
    recording, cursor = JobRecording(), payloads.Cursor()
    recording.add(job_view(1), 1.0)
    recording.add(job_view(2), 3.0)
    whole = payloads.rows(recording.moments, cursor, payloads.rank_columns(recording, (0, 1)))
    assert whole is not None
    assert whole["is_whole"]
    assert whole["figures"]["samples_per_s@1"] == [None, 1600.0]
    recording.add(job_view(2), 5.0)
    news = payloads.rows(recording.moments, cursor, payloads.rank_columns(recording, (0, 1)))
    assert news is not None
    assert (news["at"], news["is_whole"]) == ([5.0], False)
    assert payloads.rows(recording.moments, cursor, payloads.rank_columns(recording, (0, 1))) is None


def test_a_rank_that_is_gone_from_a_view_leaves_no_short_column() -> None:
    recording = JobRecording()
    recording.add(job_view(2), 1.0)
    recording.add(job_view(1), 3.0)
    assert {len(column) for columns in recording.ranks.values() for column in columns.values()} == {2}


def test_the_users_own_metrics_are_series_by_time_batch_and_epoch() -> None:
    recorder = Recorder(Wall())
    recorder.take_report("j-1", epoch_report(0, accuracy=0.5))
    recorder.take_report("j-1", EvaluationReport(epoch=0, metrics={"accuracy": 0.4}, duration_s=1.0))
    recorder.take_report("j-1", epoch_report(1, accuracy=0.75, margin=2.0))
    recording = recorder.jobs["j-1"]
    epochs, evaluations = recording.epochs, recording.evaluations
    assert (list(epochs.step), list(epochs.epoch)) == ([10.0, 20.0], [1.0, 2.0])
    assert list(epochs.figures["accuracy"]) == [0.5, 0.75]
    assert json.loads(json.dumps(payloads.series(recording)))["epochs"]["figures"]["margin"] == [None, 2.0]
    assert (list(evaluations.step), list(evaluations.epoch)) == ([10.0], [1.0])


def test_the_learning_rate_is_a_series() -> None:
    recording = JobRecording()
    recording.add(job_view(1), 1.0)
    assert recording.moments.figures["learning_rate"][0] == pytest.approx(FULL.learning_rate)


def test_names_without_end_do_not_fill_the_memory() -> None:
    table = Table()
    for index in range(1000):
        table.offer(index, index, index, {f"{index} {'x' * 1000}": 1.0})
    assert len(table.figures) == MAX_NAMES
    assert max(map(len, table.figures)) <= 80
    assert {len(column) for column in table.figures.values()} == {len(table.at)}


def test_a_stalled_rank_has_no_speed_and_is_marked() -> None:
    stalled = replace(rank_view(1), state="stalled", samples_per_s=9e9)
    view = replace(job_view(0), ranks=(rank_view(0), stalled))
    recorder = Recorder(Wall())
    recorder.take_views([replace(view, ranks=(rank_view(0), rank_view(1)))])
    recorder.take_views([view])
    recorder.take_views([view])
    recording = recorder.jobs["j-1"]
    assert json.loads(json.dumps(payloads.detail(view)))["table"][1]["samples_per_s"] is None
    assert payloads.summary(view)["num_stalled"] == 1
    assert payloads.detail(view)["spread"]["rank"] == 0
    columns = payloads.rank_columns(recording, (1,))
    assert payloads.rows(recording.moments, payloads.Cursor(), columns)["figures"]["samples_per_s@1"] == [
        1600.0,
        None,
        None,
    ]  # type: ignore[index]
    stacks = "\n".join(f"  File train.py, line {number} in train_step" for number in range(100))
    report = StallReport(rank=1, host="host", device="cpu", silent_s=12.0, usual_ms=25.0, stacks=stacks)
    recorder.take_report("j-1", report)
    (told,) = (one.text for one in recording.events if "rank 1" in one.text)
    assert told.endswith("line 99 in train_step")


def test_jobs_that_are_forgotten_stay_forgotten() -> None:
    recorder = Recorder(Wall())
    running = [job_view(1, f"job-{index}") for index in range(MAX_JOBS + 20)]
    recorder.take_views(running)
    ended = [replace(view, state="succeeded", ended_s=1.0) for view in running]
    recorder.take_views(ended)
    recorder.take_views([*ended, job_view(1, "new")])
    kept = {name: len(one.events) for name, one in recorder.jobs.items()}
    assert len(kept) <= MAX_JOBS + 1
    for _ in range(5):
        recorder.take_views([*ended, job_view(1, "new")])
    assert {name: len(one.events) for name, one in recorder.jobs.items()} == kept


def test_a_new_job_is_recorded_without_a_look_at_all_others() -> None:
    """After a restart, when all are new, 10,000 queued jobs would have taken 10,000 times as long as one."""

    def lines_of_a_new_one(num_jobs: int) -> int:
        recorder = Recorder(Wall())
        waiting = [replace(job_view(0, f"job-{index}"), state="queued") for index in range(num_jobs)]
        recorder.take_views(waiting)
        return lines_run(lambda: recorder.take_views([replace(waiting[0], job_id="new")]))

    assert lines_of_a_new_one(800) == lines_of_a_new_one(MAX_JOBS + 20)


def test_why_a_job_failed_is_told_once() -> None:
    recorder, why = Recorder(Wall()), "rank 1 was killed"
    view = job_view(2)
    recorder.take_views([view])
    recorder.take_views([replace(view, state="stopping", reason=why, num_lost_ranks=1)])
    recorder.take_report("j-1", JobResult(outcome=Outcome.FAILED, error=why))
    for _ in range(3):
        recorder.take_views([replace(view, state="failed", reason=why, num_lost_ranks=1, ended_s=0.1)])
    told = [(one.kind, one.text) for one in recorder.jobs["j-1"].events]
    assert told == [("state", "training"), ("state", "stopping"), ("error", "failed: rank 1 was killed")]


def test_a_rank_that_is_lost_and_comes_back_while_the_job_goes_on_is_told_once_each() -> None:
    recorder, view = Recorder(Wall()), job_view(2)
    recorder.take_views([view])
    recorder.take_report("j-1", MembershipReport(rank=1, text="rank 1 was killed", num_ranks=1))
    for _ in range(3):
        recorder.take_views([replace(view, num_lost_ranks=1)])
    recorder.take_report("j-1", MembershipReport(rank=1, text="rank 1 trains again", num_ranks=2, is_back=True))
    assert [(one.kind, one.text) for one in recorder.jobs["j-1"].events] == [
        ("state", "training"),
        ("error", "rank 1 was killed; 1 rank in training"),
        ("state", "rank 1 trains again; 2 ranks in training"),
    ]


@pytest.mark.parametrize("bad", [inf, -inf, nan, 1e300])
def test_numbers_that_json_has_not_reach_no_page(bad: float) -> None:
    checkpoint = Checkpoint(version=1, name="1-1", path="/x", epoch=1, global_step=1, metrics={"loss": bad})
    rank = replace(
        rank_view(0), loss=bad, divergence=bad, data_wait_s=bad, throttled_s=bad, waited_s=bad, samples_per_s=bad
    )
    view = replace(job_view(0), ranks=(rank,), loss=bad, eta_s=bad, metrics={"loss": bad}, checkpoints=(checkpoint,))
    recording = JobRecording()
    recording.add(view, 1.0)
    recording.take_epoch(epoch_report(0, x=bad), 1.0)
    result = JobResult(outcome=Outcome.SUCCEEDED, metrics={"loss": bad}, duration_s=bad, checkpoints=(checkpoint,))
    known = JobDetails(spec=JobSpec(name="x", source_hash="", file_name="x"), result=result, ran_s=bad)
    telling = PageStream()
    text = telling.message(
        {"job": payloads.detail(view), "about": payloads.about(view, known), **telling.figures(view, recording)}
    )
    shown = json.loads(text.removeprefix("data: "))
    assert shown["moments"]["figures"]["loss"] == [None]
    assert shown["epochs"]["figures"]["x"] == [None]


def test_charts_show_the_fastest_and_the_slowest() -> None:
    view = replace(job_view(0), ranks=tuple(replace(rank_view(i), ms_per_batch=float(i + 1)) for i in range(100)))
    assert payloads.charted(view) == (*range(6), *range(94, 100))
    assert payloads.charted(job_view(3)) == (0, 1, 2)
    table = payloads.detail(view)
    assert len(table["table"]) == payloads.MAX_ROWS
    assert table["num_ranks_hidden"] == 0


def test_the_list_of_jobs_is_searched_and_comes_in_pages() -> None:
    views = [
        replace(job_view(1), job_id=f"job-{index}", state="failed" if index % 10 == 0 else "training")
        for index in range(240)
    ]
    first = payloads.jobs(views, ListQuery())
    assert [one["id"] for one in first["items"]] == [f"job-{index}" for index in range(239, 214, -1)]
    assert (first["num"], first["pages"]) == (240, 10)
    assert first["counts"] == {"open": 216, "succeeded": 0, "failed": 24, "cancelled": 0}
    last = payloads.jobs(views, ListQuery(page=99))
    assert (last["page"], len(last["items"])) == (9, 15)
    failed = payloads.jobs(views, ListQuery(text="JOB-2", state="failed"))
    assert {one["state"] for one in failed["items"]} == {"failed"}
    assert failed["num"] == 5  # 20, 200, 210, 220, 230
    assert payloads.jobs(views, ListQuery(text="no such"))["items"] == []


def test_hosts_of_one_name_are_told_apart() -> None:
    slots = (Slot(device="cpu"), Slot(device="cuda:0", model="H200"))
    idle = HostView(agent_id=AgentId("agent-1"), host="node", slots=slots, ranks={})
    busy = HostView(agent_id=AgentId("agent-2"), host="node", slots=slots, ranks={1: (JobId("j-1"), Rank(3))})
    shown = payloads.hosts([idle, busy], ListQuery())
    assert [(one["id"], one["is_namesake"], one["busy"]) for one in shown["items"]] == [
        ("agent-1", True, 0),
        ("agent-2", True, 1),
    ]
    assert shown["items"][1]["slots"][1] == {"device": "cuda:0 H200", "job": "j-1", "rank": 3}


def test_a_large_cluster_with_long_names_does_not_flood_the_page() -> None:
    long = "ä\ud800" * 50_000
    slots = tuple(Slot(device=long, model=long) for _ in range(64))
    hosts = [HostView(agent_id=AgentId(f"agent-{index}"), host=long, slots=slots, ranks={}) for index in range(300)]
    rank = replace(rank_view(0), host=long, device=long, agent_id=long)
    checkpoint = Checkpoint(version=1, name=long, path=long, epoch=1, global_step=1, metrics={long: 1.0})
    view = replace(
        *(job_view(0),),
        name=long,
        reason=long,
        pacing=long,
        backend=long,
        ranks=tuple(replace(rank, rank=index) for index in range(500)),
        metrics={f"{index}{long}": 1.0 for index in range(500)},
        checkpoints=(checkpoint,) * 200,
    )
    settings = {f"{long}{index}": long for index in range(200)}
    result = JobResult(outcome=Outcome.FAILED, error=long, traceback=long, model=long)
    spec = JobSpec(name=long, source_hash="", file_name=long, settings=settings, resume=long)
    parts = {
        "jobs": payloads.jobs([view] * 500, ListQuery()),
        "hosts": payloads.hosts(hosts, ListQuery()),
        "job": payloads.detail(view),
        "about": payloads.about(view, JobDetails(spec=spec, result=result)),
    }
    telling = PageStream()
    message = telling.message(parts)
    print(len(message))
    assert len(message) < 1_000_000
    assert telling.message(parts) == "data: {}\n\n"  # and nothing of that a second time


def test_the_command_asks_for_the_same_again() -> None:
    spec = JobSpec(
        name="x",
        source_hash="",
        file_name="my job.py",
        num_ranks=2,
        slow_factors={1: 3.0},
        settings={
            "epochs": "3",
            "policy": '"sync"',
            "max_steps": "null",
            "speed_hint": "[1, 2.5]",
            "drop_last": "true",
        },
    )
    assert payloads.command(spec) == (
        "elche submit 'my job.py' --ranks 2 --slow 1=3 --drop-last true --epochs 3 --max-steps none --policy sync "
        "--speed-hint 1=2.5"
    )
