"""A job's view is made once for all who watch it, and is the newest where that matters."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elche.v1 import job_pb2
from elche_coordinator.archive.catalogue import JobCatalogue
from elche_coordinator.archive.history import History
from elche_coordinator.core.coordinator import Coordinator
from elche_coordinator.core.messages.events import JobCancelled, JobSubmitted
from elche_coordinator.core.messages.ids import JobId
from elche_coordinator.core.messages.spec import JobSpec
from elche_coordinator.driver import Driver
from elche_coordinator.services import job_service
from elche_coordinator.services import shared_views as module
from elche_coordinator.services.job_service import JobServicer
from elche_coordinator.services.shared_views import MAX_VIEWS_PER_S, VIEW_COST, VIEW_EVERY_S, SharedViews, view_every_s
from elche_coordinator.storage import tape
from elche_coordinator.storage.sql.store import SqlStore


class Making:
    """Views that take so long, by a clock of their own."""

    def __init__(self, took_s: float = 0.0) -> None:
        self.took_s, self.now_s, self.last_change, self.num_made = took_s, 100.0, 0, 0
        self.views = SharedViews(self.make, lambda _: self.last_change, lambda: self.now_s)

    def make(self, job_id: str) -> job_pb2.JobView:
        self.num_made += 1
        self.now_s += self.took_s
        return job_pb2.JobView(job_id=job_id, epoch=self.num_made)


def test_a_hundred_who_watch_cost_as_much_as_one() -> None:
    one = Making()
    for _ in range(10):
        for _ in range(100):
            one.views.recent("j")
            one.now_s += VIEW_EVERY_S / 100
            one.last_change += 1
    assert one.num_made == 10


def test_what_is_asked_for_as_it_is_now_is_no_older_than_its_last_change() -> None:
    one = Making()
    assert [one.views.newest("j").epoch for _ in range(3)] == [1, 1, 1]
    one.last_change += 1
    assert one.views.newest("j").epoch == 2
    assert one.views.newest("other").epoch == 3
    one.now_s += VIEW_EVERY_S
    assert one.views.newest("j").epoch == 4, "time changes it, too"
    one.now_s += VIEW_EVERY_S / 2
    assert one.views.recent("j").epoch == 4


def test_views_that_take_long_are_made_less_often() -> None:
    """Of 10,000 ranks one took 20 ms, four times a second for each who watched."""
    one = Making(0.1)
    one.views.recent("j")
    one.now_s += VIEW_COST * 0.1 - 0.01
    one.views.recent("j")
    assert one.num_made == 1
    one.now_s += 0.02
    one.views.recent("j")
    assert one.num_made == 2


def test_two_thousand_who_watch_get_no_more_views_in_a_second_than_a_few_hundred() -> None:
    """8,000 a second took all of the event loop: 103 of the 2,000 calls were not looked at for 30 s, and ended."""
    assert view_every_s(1) == view_every_s(250) == VIEW_EVERY_S
    for num_watchers in (1, 250, 251, 2_000, 8_192):
        assert num_watchers / view_every_s(num_watchers) <= MAX_VIEWS_PER_S


def test_few_views_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_KEPT", 2)
    one = Making()
    for job_id in ("a", "b", "a", "c", "d"):
        one.views.recent(job_id)
    assert list(one.views._made) == ["c", "d"]


def test_all_who_watch_a_job_share_its_view_and_its_end_is_shown_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = list[int]()
    monkeypatch.setattr(job_service, "view_every_s", lambda num: counted.append(num) or view_every_s(num))

    async def story() -> None:
        store = SqlStore.in_file(tmp_path / "elche.sqlite")
        driver = Driver(Coordinator(), store, recorded=tape.read(store))
        nobody: Any = SimpleNamespace()
        catalogue, made = JobCatalogue(driver, History(store)), list[str]()
        make = catalogue.known_view
        catalogue.known_view = lambda job_id: made.append(job_id) or make(job_id)  # type: ignore[func-returns-value,method-assign]
        servicer = JobServicer(driver, catalogue, nobody, nobody, nobody, nobody, nobody, nobody)
        servicer._messages = SharedViews(servicer._messages._make, driver.last_change, lambda: 100.0)
        spec = JobSpec(name="j", source_hash=driver.sources.add("job = 1"), file_name="job.py", num_ranks=1)
        driver.handle(JobSubmitted(job_id=JobId("j"), spec=spec, submitted_at=1.0))
        await driver.durable()
        request = job_pb2.WatchJobRequest(job_id="j")
        watches: list[Any] = [servicer.WatchJob(request, nobody) for _ in range(20)]
        for _ in range(3):  # the first at once, and then at intervals
            views = await asyncio.gather(*(anext(watch) for watch in watches))
            assert {one.view.state for one in views} == {job_pb2.JOB_STATE_QUEUED}
        assert made == ["j"]
        assert {len(watches)} == set(counted[-len(watches) :]), "the more watch, the longer each interval"
        driver.handle(JobCancelled(job_id=JobId("j")))
        await driver.durable()
        for watch in watches:
            *_, last, result = [one async for one in watch]
            assert last.view.state == result.result.state == job_pb2.JOB_STATE_CANCELLED
        assert made == ["j"] * 2
        assert driver.watchers.num_watchers == 0
        driver.stop()

    asyncio.run(asyncio.wait_for(story(), 100))
