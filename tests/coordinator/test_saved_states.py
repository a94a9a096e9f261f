"""A saved state or a tape that contradicts itself is not gone on with: the log says what is wrong, and jobs go back.

What contradicts itself in one job sends that one back alone.
"""

import asyncio
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elche.settings import AgreedSettings
from elche_coordinator.core.coordinator import Coordinator
from elche_coordinator.core.messages.commands import StopRank
from elche_coordinator.core.messages.events import JobSubmitted
from elche_coordinator.core.messages.ids import JobId, Rank
from elche_coordinator.core.messages.spec import JobSpec
from elche_coordinator.core.records.machine import JobPhase
from elche_coordinator.driver import Driver
from elche_coordinator.simulator.simulation import JOB, RankModel, Simulation
from elche_coordinator.storage import tape
from elche_coordinator.storage.snapshots import Snapshots
from elche_coordinator.storage.sql.store import SqlStore
from elche_coordinator.storage.tape import Entry
from elche_coordinator.storage.unpickling import loads, sealed, unsealed
from elche_coordinator.streams.streams import Streams

OTHER = JobId("other")


class Left:
    """What a coordinator has left in mid-training: a saved state, and three pieces of its tape. A second job waits."""

    def __init__(self, **settings: Any) -> None:
        entries: list[Entry] = []

        class Taped(Coordinator):
            def handle(self, event: Any, *, now_s: float) -> Any:
                entries.append(Entry(now_s, event))
                return super().handle(event, now_s=now_s)

        agreed = AgreedSettings(dataset_size=600, epochs=3, batch_size=10, **settings)
        simulation = Simulation(settings=agreed, ranks=[RankModel(batch_ms=20), RankModel(batch_ms=45)], core=Taped())
        simulation.start()
        spec = JobSpec(name="other", source_hash="", file_name="", num_ranks=1)
        simulation.handle(JobSubmitted(job_id=OTHER, spec=spec, submitted_at=1.0))
        simulation.run_until(lambda: simulation.num_events >= 60)
        core = simulation.core
        core.__class__ = Coordinator
        snapshots = Snapshots(core, Streams())
        snapshots.touch(list(core.jobs))
        self.saved = snapshots.take(len(entries), tape.code_version())
        core.__class__ = Taped
        simulation.run_until(lambda: simulation.num_events >= 69)
        self.pieces = [entries[at : at + 3] for at in (60, 63, 66)]
        self.lasts = [63, 66, 69]

    def change(self, of_core: Callable[[Any], None] | None = None, of_job: Callable[[Any], None] | None = None) -> None:
        """Changes what is saved, with a right checksum."""
        common, part = loads(unsealed(self.saved.state)), loads(unsealed(self.saved.parts[JOB]))
        if of_core is not None:
            of_core(common[0])
        if of_job is not None:
            of_job(part[0])
        parts = {**self.saved.parts, str(JOB): sealed(pickle.dumps(part))}
        self.saved = replace(self.saved, state=sealed(pickle.dumps(common)), parts=parts)

    def read(self) -> tape.Recorded | None:
        pieces = [sealed(pickle.dumps(piece)) for piece in self.pieces]
        store: Any = SimpleNamespace(load_state=lambda: (self.saved, pieces, 1.0, self.lasts))
        return tape.read(store)


def lost_lease(left: Left) -> None:
    left.change(of_job=lambda job: job.run.training.ledger.rank_leases[Rank(0)].leases.pop())


def lease_of_another_place(left: Left) -> None:
    def move(job: Any) -> None:
        leases = job.run.training.ledger.rank_leases
        leases[Rank(0)].leases, leases[Rank(1)].leases = leases[Rank(1)].leases, leases[Rank(0)].leases

    left.change(of_job=move)


def round_without_a_member(left: Left) -> None:
    left.change(of_job=lambda job: job.run.generation.rounds[0].targets.pop(Rank(1)))


def round_that_is_there_twice(left: Left) -> None:
    def double(job: Any) -> None:
        rounds = job.run.generation.rounds
        rounds.append(rounds[0])

    left.change(of_job=double)


def rank_without_leases(left: Left) -> None:
    left.change(of_job=lambda job: job.run.training.ledger.rank_leases.pop(Rank(1)))


def slot_of_nobody(left: Left) -> None:
    left.change(of_core=lambda core: core.fleet.taken.popitem())


def missing_piece(left: Left) -> None:
    del left.pieces[1], left.lasts[1]


def piece_that_is_there_twice(left: Left) -> None:
    left.pieces.insert(1, left.pieces[0])
    left.lasts.insert(1, 63)


def missing_entry(left: Left) -> None:
    del left.pieces[1][0]


def entry_that_is_none(left: Left) -> None:
    entries: list[Any] = left.pieces[2]
    entries[1] = tuple(entries[1])


def event_that_is_none(left: Left) -> None:
    left.pieces[2][1] = left.pieces[2][1]._replace(event=None)  # type: ignore[arg-type]


WRONG_IN_ONE: dict[Callable[[Left], None], str] = {
    lost_lease: "epoch .*: position",
    lease_of_another_place: "epoch .*: position|rank 0: committed",
    round_without_a_member: "job job: round .* has other members",
    round_that_is_there_twice: "job job: open rounds .* are not in order",
    rank_without_leases: "epoch .*: position",
}
"""In the state of one job."""
WRONG: dict[Callable[[Left], None], str] = {
    slot_of_nobody: "slots .* are not those of living ranks",
    missing_piece: "after event 63 its tape has 3 events up to number 69",
    piece_that_is_there_twice: "after event 63 its tape has 3 events up to number 63",
    missing_entry: "after event 63 its tape has 2 events up to number 66",
    entry_that_is_none: "entry 68 of its tape is no event",
    event_that_is_none: "entry 68 of its tape is no event",
}


def test_what_a_coordinator_has_left_is_gone_on_with() -> None:
    recorded = Left().read()
    assert recorded is not None
    assert (len(recorded.entries), recorded.last) == (9, 69)


@pytest.mark.parametrize("wrong", WRONG, ids=lambda one: one.__name__)
def test_what_contradicts_itself_is_named_and_jobs_go_back(
    wrong: Callable[[Left], None], caplog: pytest.LogCaptureFixture
) -> None:
    left = Left()
    wrong(left)
    assert left.read() is None
    (said,) = [record.getMessage() for record in caplog.records]
    start, end = "has left a state that contradicts itself (", "): jobs that ran go back to their newest checkpoints"
    assert start in said
    assert said.endswith(end)
    assert len(said) < 500
    assert re.search(WRONG[wrong], said), said


def started(left: Left, path: Path) -> tuple[Driver, list[object]]:
    """A driver that goes on from this, once it has handled what follows; and the commands of its last event."""
    recorded = left.read()
    assert recorded is not None
    commands: list[object] = []

    async def story() -> Driver:
        handle = Coordinator.handle

        def noting(core: Coordinator, event: Any, *, now_s: float) -> Any:
            commands[:] = handle(core, event, now_s=now_s)
            return commands

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Coordinator, "handle", noting)
            driver = Driver(Coordinator(), SqlStore.in_file(path / "elche.sqlite"), recorded=recorded)
            await asyncio.sleep(0)
        await asyncio.wait_for(driver.durable(), 60)
        driver.stop()
        return driver

    return asyncio.run(story()), commands


@pytest.mark.parametrize("wrong", WRONG_IN_ONE, ids=lambda one: one.__name__)
def test_a_job_that_contradicts_itself_goes_back_alone(
    wrong: Callable[[Left], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All jobs went back for one."""
    left = Left()
    left.pieces, left.lasts = [], []
    wrong(left)
    driver, commands = started(left, tmp_path)
    wrong_of_it, back = [one.getMessage() for one in caplog.records if one.getMessage().startswith("job=job")]
    assert re.search(f"its saved state contradicts itself .*({WRONG_IN_ONE[wrong]})", wrong_of_it), wrong_of_it
    assert re.search("its saved state contradicted itself .*; the job goes back to its start", back), back
    job = driver.core.trainings[JOB]
    assert job.phase is JobPhase.QUEUED
    assert job.attempt == 2
    assert [one.rank for one in commands if isinstance(one, StopRank)] == [0, 1]
    assert driver.core.trainings[OTHER].phase is JobPhase.QUEUED
    assert driver.core.trainings[OTHER].attempt == 1


@pytest.mark.parametrize("wrong", WRONG_IN_ONE, ids=lambda one: one.__name__)
def test_a_job_that_contradicts_itself_ends_alone_whatever_its_events_led_to(
    wrong: Callable[[Left], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    left = Left()
    wrong(left)
    driver, _ = started(left, tmp_path)
    assert any("job=job its saved state contradicts itself" in one.getMessage() for one in caplog.records)
    job = driver.core.trainings[JOB]
    assert job.phase is JobPhase.STOPPING or (job.phase, job.attempt) == (JobPhase.QUEUED, 2)
    assert driver.core.trainings[OTHER].phase is JobPhase.QUEUED


def test_a_job_that_contradicts_itself_and_may_not_go_back_fails_alone(tmp_path: Path) -> None:
    left = Left(on_rank_loss="fail")
    lost_lease(left)
    driver, _ = started(left, tmp_path)
    job = driver.core.trainings[JOB]
    assert job.phase is JobPhase.STOPPING
    assert job.reason == "its saved state contradicted itself (see the coordinator's log)"
    assert driver.core.trainings[OTHER].phase is JobPhase.QUEUED
