"""How many jobs may wait or train at once, of one user and in all."""

import asyncio
import hashlib
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from elche.errors import TooMuch
from elche.token import Role
from elche_coordinator.archive.catalogue import JobCatalogue
from elche_coordinator.archive.history import History
from elche_coordinator.core.coordinator import Coordinator
from elche_coordinator.core.messages.events import EvaluationDone, JobCancelled, LoopAttached
from elche_coordinator.core.messages.ids import JobId
from elche_coordinator.core.messages.spec import JobSpec
from elche_coordinator.driver import Driver
from elche_coordinator.limits import open_jobs
from elche_coordinator.limits.open_jobs import _why
from elche_coordinator.roles import CALLER, Caller
from elche_coordinator.services.requests import scale, submit
from elche_coordinator.storage import tape
from elche_coordinator.storage.sql.store import SqlStore

MIB = 1 << 20


def in_loop(story: Callable[[], Coroutine[None, None, None]]) -> None:
    asyncio.run(story())


def started(folder: Path) -> Driver:
    store = SqlStore.in_file(folder / "elche.sqlite")
    return Driver(Coordinator(), store, recorded=tape.read(store))


async def submit_as(driver: Driver, name: str, text: str = "job = 1", **more: Any) -> JobId:
    """With a token of that name; empty: with the coordinator's own."""
    CALLER.set(Caller(name, Role.USER) if name else Caller())
    source, owner = driver.sources.add(text), name or "me@pc"
    return await submit(driver, JobSpec(name="job", source_hash=source, file_name="job.py", submitted_by=owner, **more))


def test_a_user_has_so_many_jobs_and_others_have_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing bounded them: one user filled the coordinator's memory with jobs that wait."""
    monkeypatch.setattr(open_jobs, "MAX_JOBS_OF_USER", 2)

    async def story() -> None:
        driver = started(tmp_path)
        first = await submit_as(driver, "anna")
        await submit_as(driver, "anna")
        for _ in range(2):
            with pytest.raises(
                TooMuch, match=r"2 of your jobs have not ended, and 2 is the limit: cancel some that wait"
            ):
                await submit_as(driver, "anna", "refused")
        assert not driver.sources.take_new().get(hashlib.sha256(b"refused").hexdigest())
        await submit_as(driver, "bob")
        for _ in range(3):
            await submit_as(driver, "")  # whom no token names has no limit of their own
        driver.handle(JobCancelled(job_id=first))
        await submit_as(driver, "anna")
        driver.stop()
        for _ in range(2):  # the next run counts them, and the one after it, which has them from the saved state
            driver = started(tmp_path)
            with pytest.raises(TooMuch, match="2 of your jobs"):
                await submit_as(driver, "anna")
            await submit_as(driver, "")
            driver.stop()

    in_loop(story)


def test_all_users_together_have_so_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_jobs, "MAX_JOBS", 2)

    async def story() -> None:
        driver = started(tmp_path)
        of_anna = await submit_as(driver, "anna")
        loop = JobSpec(name="loop", source_hash="", file_name="loop", num_ranks=1, is_loop=True)
        driver.handle(
            LoopAttached(job_id=JobId("loop"), spec=loop, ranks=(("host", "cpu"),), policy="", submitted_at=1.0)
        )
        for name in ("bob", ""):
            with pytest.raises(TooMuch, match=r"2 of all users' jobs have not ended, and 2 is the limit"):
                await submit_as(driver, name)
        driver.handle(JobCancelled(job_id=of_anna))
        await submit_as(driver, "")
        driver.stop()

    in_loop(story)


@pytest.mark.parametrize(
    ("limit", "who", "whose"), [("MAX_BYTES_OF_USER", "anna", "your"), ("MAX_BYTES", "", "all users'")]
)
def test_what_is_sent_with_jobs_is_bounded(
    limit: str, who: str, whose: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_jobs, limit, 2 * MIB)

    async def story() -> None:
        driver = started(tmp_path)
        jobs = [await submit_as(driver, who, f"# {number}".ljust(MIB)) for number in range(2)]
        with pytest.raises(TooMuch, match=f"{whose} 2 jobs that have not ended take 2 MiB, and 2 MiB is the limit"):
            await submit_as(driver, who)
        driver.handle(JobCancelled(job_id=jobs[0]))
        await submit_as(driver, who)
        driver.stop()

    in_loop(story)


def test_ranks_of_loops_that_have_not_ended_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user may attach 2,000 loops of 10,000 ranks each, which take 21 MB, from the beginning."""
    monkeypatch.setattr(open_jobs, "MAX_BYTES_OF_USER", MIB)

    async def story() -> None:
        driver = started(tmp_path)
        spec = JobSpec(name="loop", source_hash="", file_name="loop", num_ranks=600, is_loop=True, submitted_by="anna")
        ranks = (("host", "cpu"),) * 600
        driver.handle(LoopAttached(job_id=JobId("loop"), spec=spec, ranks=ranks, policy="", submitted_at=1.0))
        with pytest.raises(TooMuch, match="your 1 jobs that have not ended take 1 MiB"):
            await submit_as(driver, "anna")
        await submit_as(driver, "bob")
        driver.stop()

    in_loop(story)


def test_who_has_too_much_state_loses_the_largest_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2,000 loops whose ranks report a thousand long names took 3 MB each."""
    monkeypatch.setattr(tape, "SAVE_EVERY", 1)
    monkeypatch.setattr(tape, "SAVE_FRACTION", 1e9)
    monkeypatch.setattr(open_jobs, "MAX_STATE_BYTES", 3 * MIB)
    monkeypatch.setattr(open_jobs, "MAX_STATE_BYTES_OF_USER", 4 * MIB)
    monkeypatch.setattr(open_jobs, "MAX_STATE_BYTES_IN_ALL", 8 * MIB)

    async def story() -> None:
        driver = started(tmp_path)

        def attach(name: str, user: str) -> None:
            spec = JobSpec(name=name, source_hash="", file_name=name, num_ranks=1, is_loop=True, submitted_by=user)
            ranks = (("host", "cpu"),)
            driver.handle(LoopAttached(job_id=JobId(name), spec=spec, ranks=ranks, policy="", submitted_at=1.0))

        async def report(name: str, num_mib: int) -> None:
            (address,) = driver.core.addresses(JobId(name))
            sums = {f"{number}".ljust(MIB): (1.0, 1) for number in range(num_mib)}
            driver.handle(EvaluationDone(**address, epoch=1, sums=sums, duration_ms=1.0))
            await driver.durable()
            await driver.durable()  # what follows from the save

        seen: dict[str, str] = {}

        def failed() -> dict[str, str]:
            """Those seen so far: without ranks that answer, a job that fails has ended soon."""
            views = {name: driver.core.view(JobId(name), driver.now_s) for name in ("a1", "a2", "a3", "b1", "own")}
            seen.update(
                (name, view.reason) for name, view in views.items() if view is not None and view.state == "stopping"
            )
            return seen

        for name in ("a1", "a2", "a3"):
            attach(name, "anna")
        attach("b1", "bob")
        attach("own", "")
        for name, num_mib in (("a1", 1), ("a2", 2), ("b1", 2)):
            await report(name, num_mib)
        assert failed() == {}
        await report("a3", 1)
        assert failed() == {"a2": _why("your jobs'", 4 * MIB, 4 * MIB)}
        await report("b1", 3)
        assert failed().keys() == {"a2", "b1"}
        assert failed()["b1"] == _why("its", 3 * MIB, 3 * MIB)
        driver.stop()

    in_loop(story)


def test_a_users_jobs_are_of_so_many_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each event that changes the queue looks at one job of each kind: with 1,000 projects of one user a submission of
    another took ten times as long.
    """
    monkeypatch.setattr(open_jobs, "MAX_KINDS_OF_USER", 3)
    monkeypatch.setattr(open_jobs, "MAX_KINDS", 5)

    async def story() -> None:
        driver = started(tmp_path)
        first = await submit_as(driver, "anna", project="a")
        await submit_as(driver, "anna", conditions=("host=none",))
        same = await submit_as(driver, "anna", num_ranks=2, min_ranks=1)
        await submit_as(driver, "anna", project="a", priority=5)  # of the first one's kind
        with pytest.raises(
            TooMuch, match=r"your jobs that have not ended are of 3 kinds .*, and 3 is the limit: submit"
        ):
            await submit_as(driver, "anna", project="b")
        jobs = JobCatalogue(driver, History(SqlStore.in_file(tmp_path / "elche.sqlite")))
        scale(driver, jobs.known_view(same), 7)  # the least number, which is 1, is the kind's
        driver.handle(JobCancelled(job_id=same))
        await submit_as(driver, "anna", num_ranks=2)
        with pytest.raises(TooMuch, match="your jobs"):
            scale(driver, jobs.known_view(first), 7)
        await submit_as(driver, "bob")
        await submit_as(driver, "")
        with pytest.raises(TooMuch, match="all jobs that have not ended are of 5 kinds"):
            await submit_as(driver, "", num_ranks=3)
        CALLER.set(Caller("bob", Role.USER))
        driver.open_jobs.require_room("bob")  # a loop with processes of its own waits for no slots
        driver.stop()

    in_loop(story)
