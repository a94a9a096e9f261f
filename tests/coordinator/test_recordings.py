"""Figures of jobs in files: whole or not there, for their owner alone, few, and never in the way."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from elche_coordinator.web import payloads, recordings
from elche_coordinator.web.recorder import MAX_POINTS, JobRecording, Recorder
from elche_coordinator.web.recordings import Recordings
from support.views import Wall, epoch_report, job_view


def recorded() -> JobRecording:
    recorder = Recorder(Wall())
    for epoch in range(3):
        recorder.take_views([job_view(2)])
        recorder.take_report("j-1", epoch_report(epoch, accuracy=0.1))
    return recorder.jobs["j-1"]


def test_what_was_kept_is_what_was_recorded(tmp_path: Path) -> None:
    kept, recording = Recordings(tmp_path / "recordings"), recorded()
    kept.save("j-1", recording, (0, 1), payloads.detail(job_view(2)))
    path = tmp_path / "recordings" / "j-1.json"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    loaded = kept.load("j-1")
    assert loaded is not None
    assert payloads.series(loaded.recording) == payloads.series(recording)
    assert payloads.events(loaded.recording) == payloads.events(recording)
    again = payloads.rows(loaded.recording.moments, payloads.Cursor(), payloads.rank_columns(loaded.recording, (0, 1)))
    assert again == payloads.rows(recording.moments, payloads.Cursor(), payloads.rank_columns(recording, (0, 1)))
    assert len(payloads.with_saved(payloads.detail(job_view(0)), loaded.shown)["table"]) == 2


def test_a_recording_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    kept, recording = Recordings(tmp_path / "recordings"), recorded()
    now = recording.copy((0, 1))
    events, epochs = payloads.events(recording), list(recording.epochs.at)
    recording.take_epoch(epoch_report(3), 99.0)
    kept.save("j-1", now, (0, 1), {})
    assert list(now.epochs.at) == epochs, "a copy does not change while it is saved"

    def load(job_id: str) -> JobRecording | None:
        saved = kept.load(job_id)
        return saved.recording if saved else None

    recorder = Recorder(Wall(), load)
    recorder.take_report("j-1", epoch_report(3, accuracy=0.1))
    again = recorder.jobs["j-1"]
    assert payloads.events(again)[: len(events)] == events
    assert "the coordinator was started again" in [one.text for one in again.events]
    numbers = [one.number for one in again.events]
    assert numbers == sorted(set(numbers))
    assert list(again.epochs.at)[: len(epochs)] == epochs
    assert again.epochs.step[-1] > again.epochs.step[-2], "batches are counted on"
    recorder.take_report("j-2", epoch_report(0, accuracy=0.1))
    assert len(recorder.jobs["j-2"].events) == 1, "of a new job nothing was recorded before"


def test_a_job_that_has_none_is_not_there(tmp_path: Path) -> None:
    assert Recordings(tmp_path / "recordings").load("j-1") is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: "null",
        lambda text: "[" * 100_000,
        lambda text: text.replace('"format":1', '"format":2'),
        lambda text: text.replace('"step":[', '"step":[1.0,'),
        lambda text: text.replace('"loss":[', '"loss":["x",'),
        lambda text: text.replace('"loss":[', '"loss":[1e999,'),
        lambda text: text.replace('"events":[', '"events":[7,'),
        lambda text: json.dumps({**json.loads(text), "shown": []}),
        lambda text: json.dumps({**json.loads(text), "ended_at": "now"}),
    ],
)
def test_a_damaged_file_is_set_aside_with_a_word(
    tmp_path: Path, damage: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    kept = Recordings(tmp_path)
    kept.save("j-1", recorded(), (0, 1), {})
    path = tmp_path / "j-1.json"
    damaged = damage(path.read_text())
    assert damaged != path.read_text()
    path.write_text(damaged)
    assert kept.load("j-1") is None
    assert len(caplog.records) == 1
    assert [one.name for one in tmp_path.iterdir()] == ["j-1.damaged"]
    assert kept.load("j-1") is None
    assert len(caplog.records) == 1


def test_what_fits_no_page_is_not_shown() -> None:
    shown = payloads.detail(job_view(2))
    for kept in ({}, {"table": 7}, {"table": [7]}, {"table": [{}], "overhead": 0.5}):
        assert payloads.with_saved(shown, kept) == shown


def test_only_the_newest_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings, "MAX_FILES", 3)
    kept = Recordings(tmp_path)
    for index in range(6):
        kept.save(f"j-{index}", JobRecording(), (), {})
        os.utime(tmp_path / f"j-{index}.json", (index, index))
    assert sorted(one.name for one in tmp_path.iterdir()) == ["j-3.json", "j-4.json", "j-5.json"]


def test_recordings_of_one_user_do_not_push_out_those_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recordings, "MAX_FILES", 3)
    kept = Recordings(tmp_path, lambda job_id: job_id.partition("-")[0])
    for index, job_id in enumerate(("bob-0", "eve-1", "eve-2", "eve-3", "eve-4")):
        kept.save(job_id, JobRecording(), (), {})
        os.utime(tmp_path / f"{job_id}.json", (index, index))
    assert sorted(one.stem for one in tmp_path.iterdir()) == ["bob-0", "eve-3", "eve-4"]


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    Recordings(tmp_path / "file" / "recordings").save("j-1", JobRecording(), (), {})
    assert "cannot be saved" in caplog.text


def test_a_full_recording_is_small(tmp_path: Path) -> None:
    recorder = Recorder(Wall())
    view = job_view(12)
    for index in range(2 * MAX_POINTS - 2):  # as full as its tables become
        recorder.take_views([view])
        recorder.take_report("j-1", epoch_report(index, **{f"metric {number}": 1 / 3 for number in range(64)}))
    kept = Recordings(tmp_path)
    kept.save("j-1", recorder.jobs["j-1"], range(12), payloads.detail(view))
    assert (tmp_path / "j-1.json").stat().st_size < recordings.MAX_BYTES / 4
    assert kept.load("j-1") is not None
