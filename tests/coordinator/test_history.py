"""What is kept of jobs: a coordinator of any version reads of an ended one what the one before showed."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from elche.settings import AgreedSettings
from elche_coordinator.archive.history import History
from elche_coordinator.core.messages.events import JobCancelled
from elche_coordinator.core.messages.ids import JobId, Rank
from elche_coordinator.core.messages.spec import JobSpec
from elche_coordinator.core.results.counts import Counts
from elche_coordinator.storage.job_rows import JobRows, Record
from elche_coordinator.storage.sql.store import SqlStore
from elche_coordinator.storage.store import JobRow
from support.watched import WatchedSimulation, ranks

JOB = JobId("job")
SPEC = JobSpec(
    name="job",
    source_hash="",
    file_name="job.py",
    num_ranks=2,
    slow_factors={1: 2.5},
    settings={"epochs": "2"},
    arguments=("--fast", "1"),
    conditions=("device=cpu",),
    secrets=("KEY",),
)


@pytest.fixture
def simulation() -> WatchedSimulation:
    """A job that trains."""
    settings = AgreedSettings(
        dataset_size=4000, batch_size=10, epochs=2, policy="cadence", has_evaluation=True, checkpoint_every_epochs=1
    )
    simulation = WatchedSimulation(settings=settings, ranks=ranks(5, 11.5), evaluate=lambda version: {"m": 0.5})
    simulation.start()
    simulation.run_until(lambda: len(simulation.rounds) > 3)
    return simulation


def row_of(simulation: WatchedSimulation) -> Record:
    rows = JobRows(simulation.core)
    rows.touch([JOB])
    return rows.take_changed()[JOB]


def read(folder: Path, record: Record) -> History:
    """The history of a coordinator that starts with this one record."""
    store = SqlStore.in_file(folder / "elche.sqlite")
    store.write([JobRow(id=JOB, record=json.dumps(record), spec=json.dumps(asdict(SPEC)))])
    return History(store)


def test_a_job_that_has_ended_is_shown_as_before(simulation: WatchedSimulation, tmp_path: Path) -> None:
    result = simulation.run()
    view = simulation.core.view(JOB, simulation.clock.now_s)
    assert view is not None
    kept = read(tmp_path, row_of(simulation)).jobs[JOB]
    assert (kept.spec, kept.view, kept.result) == (SPEC, replace(view, ended_s=None), result)


def test_what_earlier_versions_have_kept_is_read(simulation: WatchedSimulation, tmp_path: Path) -> None:
    simulation.run()
    record = row_of(simulation)
    del record["view"]["counts"]
    record["view"]["ended_for_s"] = 5.0
    kept = read(tmp_path, record).jobs[JOB]
    assert kept.view.counts == Counts()
    assert kept.view.state == "succeeded"


def test_a_job_that_ran_goes_on_as_it_was_submitted(simulation: WatchedSimulation, tmp_path: Path) -> None:
    record = row_of(simulation)
    (again,) = read(tmp_path, record).unfinished
    resumed = {name: record[name] for name in ("resume", "resume_host", "resume_work_folder", "resume_version")}
    assert again.spec == replace(SPEC, **resumed)
    assert (again.past_attempts, again.last_incarnation) == (1, 2)


def test_a_job_whose_end_was_decided_has_ended_so(simulation: WatchedSimulation, tmp_path: Path) -> None:
    simulation.processes[Rank(1)].receive = lambda command: None  # type: ignore[method-assign]  # stopping takes time
    simulation.handle(JobCancelled(job_id=JOB))
    record = row_of(simulation)
    kept = read(tmp_path, record).jobs[JOB]
    assert (kept.view.state, kept.view.num_rounds) == (kept.result.outcome, kept.result.rounds) == ("cancelled", 4)
    assert 0 < kept.view.progress_fraction < 1
    assert kept.view.checkpoints == kept.result.checkpoints


@pytest.mark.parametrize("name", ["submitted_at", "resume", "attempt", "num_ranks", "min_ranks"])
def test_a_record_with_a_value_of_another_type_is_left_out(
    simulation: WatchedSimulation, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    other: Any = None
    assert not read(tmp_path, {**row_of(simulation), name: other}).unfinished
    assert f"its {name} is no" in caplog.text
