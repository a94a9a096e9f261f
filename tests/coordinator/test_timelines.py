"""Timelines take a bounded part of the disk."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elche_coordinator import timelines as module
from elche_coordinator.timelines import Timelines


def test_the_oldest_make_room_and_those_of_jobs_that_go_on_never(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver: Any = SimpleNamespace(
        on_performed=lambda action: None, watchers=SimpleNamespace(on_published=lambda action: None)
    )
    timelines = Timelines(tmp_path, driver)
    for number in range(5):
        path = tmp_path / f"job-{number}.jsonl"
        path.write_bytes(b"x" * 400)
        os.utime(path, (number, number))
    monkeypatch.setattr(module, "MAX_TOTAL_BYTES", 1000)
    timelines._make_room({"job-0"})
    assert sorted(one.stem for one in tmp_path.iterdir()) == ["job-0", "job-3", "job-4"]
