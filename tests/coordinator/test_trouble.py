"""What fails again and again, such as writing to a full disk, does not fill the log."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elche_coordinator.storage.store import StoreFailed
from elche_coordinator.storage.trouble import Trouble
from elche_coordinator.storage.writer import Transaction, Writer
from elche_coordinator.web.recorder import JobRecording
from elche_coordinator.web.recordings import Recordings
from support.real_processes import eventually


@pytest.fixture
def clock() -> SimpleNamespace:
    return SimpleNamespace(now_s=0.0)


@pytest.fixture
def trouble(clock: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> Trouble:
    caplog.set_level(logging.INFO)
    return Trouble(logging.getLogger("here"), logging.ERROR, "it fails", "it works again", now_s=lambda: clock.now_s)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_a_disk_that_is_full_for_an_hour_is_told_once_a_minute(
    trouble: Trouble, clock: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3600):
        trouble.failed("no space")
        clock.now_s += 1.0
    trouble.failed("read-only")
    trouble.succeeded()
    trouble.succeeded()
    first, second, *_ = told = said(caplog)
    assert (first, second) == ("it fails: no space", "it fails, for 60 s now: no space")
    assert told[-2:] == ["it fails, for 3600 s now: read-only", "it works again, after 3600 s"]
    assert len(told) == 62
    assert trouble.reason == ""


def test_what_comes_and_goes_is_told_once_a_minute_too(
    trouble: Trouble, clock: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    """On a disk with little room some writes succeed."""
    for _ in range(61):
        trouble.failed("no space")
        trouble.succeeded()
        clock.now_s += 1.0
    assert said(caplog) == ["it fails: no space", "it works again, after 0 s"] * 2


def test_records_that_cannot_be_written_are_told_once_with_their_place(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elche_coordinator.storage.writer.RETRY_S", 0.001)
    written: list[int] = []

    class Store:
        name = "/data/elche.sqlite"
        num_tries = 0

        def write(self, rows: Any, **more: Any) -> None:
            self.num_tries += 1
            if self.num_tries < 50:
                raise StoreFailed("database or disk is full")

        def close(self) -> None:
            pass

    with caplog.at_level(logging.INFO):
        writer = Writer(Store(), written.append)  # type: ignore[arg-type]
        writer.write(Transaction(last=7))
        eventually(lambda: bool(written), "it is written")
        writer.stop()
    first, last = (record.getMessage() for record in caplog.records)
    assert first == (
        "records cannot be written to /data/elche.sqlite, jobs wait until they can: database or disk is full"
    )
    assert last.startswith("records are written to /data/elche.sqlite again, and jobs go on, after")
    assert writer.num_failures == 49


def test_of_a_thousand_jobs_whose_charts_cannot_be_saved_there_is_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("no folder")
    recordings = Recordings(blocked)
    for number in range(1000):
        recordings.save(f"job-{number}", JobRecording(), (), {})
    (only,) = caplog.records
    assert str(blocked) in only.getMessage()
