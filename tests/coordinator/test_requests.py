"""What clients may ask of a job, by how it has ended; and which jobs are forgotten."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elche.errors import InvalidJob, TooMuch
from elche_coordinator.archive.catalogue import JobCatalogue
from elche_coordinator.archive.history import History
from elche_coordinator.core.coordinator import Coordinator
from elche_coordinator.core.messages.events import AgentJoined, JobCancelled, JobSubmitted
from elche_coordinator.core.messages.ids import AgentId, JobId
from elche_coordinator.core.messages.reports import Checkpoint, JobResult, Outcome
from elche_coordinator.core.messages.spec import JobSpec
from elche_coordinator.driver import Driver
from elche_coordinator.limits.sharing import crowded_out
from elche_coordinator.roles import HAS_CHANGED
from elche_coordinator.services.requests import cancel, drain, model_chunks, pause, resume, scale, taken
from elche_coordinator.storage import tape
from elche_coordinator.storage.bundles import Bundles
from elche_coordinator.storage.sql.store import SqlStore

WRITTEN = (Checkpoint(name="1-2", path="/runs/old/checkpoints/1-2", version=2, epoch=2, global_step=20, size_bytes=1),)
COMPLETE = JobResult(outcome=Outcome.SUCCEEDED, epochs=3, checkpoints=WRITTEN)
IS_COMPLETE = "job old is complete, with 3 epochs"


def started(folder: Path) -> tuple[Driver, JobCatalogue]:
    store = SqlStore.in_file(folder / "elche.sqlite")
    driver = Driver(Coordinator(), store, recorded=tape.read(store))
    return driver, JobCatalogue(driver, History(store))


def resumed(
    folder: Path, result: JobResult | None, settings: Mapping[str, str], state: str = "training", **more: Any
) -> JobSpec:
    """The spec of the job as which one with this result goes on."""

    async def story() -> JobSpec:
        driver, catalogue = started(folder)
        spec = JobSpec(
            name="old",
            file_name="old.py",
            source_hash=driver.sources.add("job = 1"),
            settings={"epochs": "3", "seed": "7"},
            submitted_by="anna",
        )
        driver.sources.hold(JobId("another"), spec.source_hash)
        spec = replace(spec, **more)
        old: Any = SimpleNamespace(result=lambda job_id: result, submission=lambda job_id: spec)
        view: Any = SimpleNamespace(job_id="old", state=state)
        artifacts: Any = SimpleNamespace(checkpoints_place=lambda job_id, path: "")
        try:
            bundles = Bundles(folder / "bundles", catalogue.bundles_in_use)
            job_id, path = await resume(driver, old, artifacts, bundles, view, settings)
            assert path == "/runs/old/checkpoints"
            found = driver.core.spec(job_id)
            assert found is not None
            return found
        finally:
            driver.stop()

    return asyncio.run(story())


@pytest.mark.parametrize(
    "change",
    [
        {"ended_early": "patience"},
        {"outcome": Outcome.FAILED},
        {"outcome": Outcome.CANCELLED},
    ],
)
def test_a_job_that_has_not_trained_all_its_epochs_goes_on(tmp_path: Path, change: Any) -> None:
    """One that had ended early, by its patience, was taken for a complete one."""
    spec = resumed(tmp_path, replace(COMPLETE, **change), {})
    assert (spec.resume, spec.submitted_by) == ("/runs/old/checkpoints", "anna")
    assert spec.settings == {"epochs": "3", "seed": "7"}


@pytest.mark.parametrize("settings", [{"epochs": "4"}, {"max_steps": "100"}, {"epochs": "2", "max_steps": "100"}])
def test_a_complete_job_goes_on_with_more_to_do(tmp_path: Path, settings: Mapping[str, str]) -> None:
    assert resumed(tmp_path, COMPLETE, settings).settings == {"epochs": "3", "seed": "7", **settings}


@pytest.mark.parametrize(
    ("result", "settings", "more", "why"),
    [
        (COMPLETE, {}, {}, IS_COMPLETE),
        (COMPLETE, {"epochs": "3"}, {}, IS_COMPLETE),
        (COMPLETE, {"epochs": "2"}, {}, IS_COMPLETE),
        (COMPLETE, {"seed": "8"}, {}, IS_COMPLETE),
        (None, {}, {}, "job old has not ended"),
        (None, {}, {"state": "paused"}, "job old is paused; `elche pause old --off` lets it go on"),
        (replace(COMPLETE, checkpoints=()), {"epochs": "9"}, {}, "job old has no checkpoint"),
        (COMPLETE, {}, {"is_loop": True}, "has its own training loop, and has succeeded: submit the script again"),
        (COMPLETE, {"epochs": "9"}, {"is_loop": True}, "and has succeeded: submit the script again"),
        (
            replace(COMPLETE, outcome=Outcome.CANCELLED),
            {"seed": "8"},
            {"is_loop": True},
            "has its own training loop: set seed in the script",
        ),
        (
            COMPLETE,
            {},
            {"is_loop": True, "source_hash": ""},
            "start the script again, ELCHE_RESUME=/runs/old/checkpoints/1-2 to resume",
        ),
        (
            replace(COMPLETE, outcome=Outcome.CANCELLED),
            {},
            {"bundle": "ab" * 32},
            "the coordinator does not have the folder abababababab of this job",
        ),
    ],
)
def test_what_cannot_be_resumed_is_refused_with_what_to_do(
    tmp_path: Path, result: JobResult | None, settings: Mapping[str, str], more: Any, why: str
) -> None:
    with pytest.raises(InvalidJob, match=why):
        resumed(tmp_path, result, settings, **more)


def test_who_asks_for_the_model_of_a_loop_is_told_who_has_it() -> None:
    """Of one that had succeeded it was said that only those that have succeeded have one."""
    spec = JobSpec(name="old", file_name="old.py", source_hash="hash", is_loop=True)
    catalogue: Any = SimpleNamespace(result=lambda job_id: COMPLETE, spec=lambda job_id: spec)
    nothing: Any = None
    view: Any = SimpleNamespace(job_id="old")
    with pytest.raises(InvalidJob, match="job old has its own training loop, and such scripts save their models them"):
        model_chunks(catalogue, nothing, nothing, view, nothing)


def test_those_that_ended_first_are_forgotten_first(tmp_path: Path) -> None:
    """Not those that were submitted first; and those of earlier runs before all of this one."""

    async def story() -> None:
        driver, _ = started(tmp_path)
        submit(driver, "of-before", "waits")
        driver.handle(JobCancelled(job_id=JobId("of-before")))
        await driver.durable()
        driver.stop()
        driver, catalogue = started(tmp_path)
        submit(driver, "first", "second", "third", "lives")
        for name in ("third", "first", "second"):
            driver.handle(JobCancelled(job_id=JobId(name)))
            driver._clock_offset_s += 1.0
        await driver.durable()
        left = []
        for keep_jobs in (4, 3, 2, 1, 0):
            catalogue.forget_oldest(keep_jobs)
            left.append(sorted(set(catalogue.job_ids()) - {"waits", "lives"}))
        assert left == [
            ["first", "of-before", "second", "third"],
            ["first", "second", "third"],
            ["first", "second"],
            ["second"],
            [],
        ]
        assert {"waits", "lives"} <= set(catalogue.job_ids())
        driver.stop()

    asyncio.run(story())


def test_many_jobs_of_one_user_do_not_push_out_the_few_of_another(tmp_path: Path) -> None:
    """Neither what is known of them, nor their journals, recordings and timelines."""

    async def story() -> None:
        driver, catalogue = started(tmp_path)
        for index in range(7):
            user = "bob" if index < 2 else "eve"
            spec = JobSpec(name="job", source_hash="", file_name="job.py", num_ranks=1, submitted_by=user)
            driver.handle(JobSubmitted(job_id=JobId(f"j-{index}"), spec=spec, submitted_at=float(index)))
            driver.handle(JobCancelled(job_id=JobId(f"j-{index}")))
            driver._clock_offset_s += 1.0
        await driver.durable()
        jobs = [(f"j-{index}", catalogue.owner(f"j-{index}"), 1) for index in range(7)]
        assert crowded_out(jobs, 3) == ["j-2", "j-3", "j-4", "j-0"]
        catalogue.forget_oldest(4)
        assert catalogue.job_ids() == ["j-0", "j-1", "j-5", "j-6"]
        assert catalogue.owner("j-2") == ""
        driver.stop()

    asyncio.run(story())


def submit(driver: Driver, *names: str) -> None:
    for name in names:
        spec = JobSpec(name=name, source_hash=driver.sources.add("job = 1"), file_name="job.py", num_ranks=1)
        driver.handle(JobSubmitted(job_id=JobId(name), spec=spec, submitted_at=1.0))


def test_requests_say_if_there_was_something_to_change(tmp_path: Path) -> None:
    async def story() -> list[bool]:
        driver, jobs = started(tmp_path)
        found = []

        def note() -> None:
            found.append(HAS_CHANGED.get())

        spec = JobSpec(name="a", source_hash="", file_name="a.py", num_ranks=1)
        driver.handle(JobSubmitted(job_id=JobId("a"), spec=spec, submitted_at=1.0))
        driver.handle(AgentJoined(agent_id=AgentId("host-1"), host="host", slots=()))
        for num_ranks in (2, 2):
            scale(driver, jobs.known_view("a"), num_ranks)
            note()
        for is_drained in (True, True, False):
            drain(driver, "host", is_drained=is_drained)
            note()
        for is_paused in (True, False):
            pause(driver, replace(jobs.known_view("a"), state="paused"), is_paused=is_paused)
            note()
        for _ in range(2):
            cancel(driver, jobs.known_view("a"))
            note()
        driver.stop()
        return found

    assert asyncio.run(story()) == [True, False, True, False, True, False, True, True, False]


def test_what_cannot_be_written_for_long_is_answered_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands once said that the coordinator does not answer any more, while its disk was full."""
    monkeypatch.setattr("elche_coordinator.services.requests.WRITE_S", 0.01)
    driver: Any = SimpleNamespace(durable=asyncio.Event().wait, writer=SimpleNamespace(failing="the disk is full"))
    with pytest.raises(TooMuch, match=r"cannot write its records \(the disk is full\); it does this once it can"):
        asyncio.run(taken(driver))
