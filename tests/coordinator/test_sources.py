"""Users' files in the database: each once, whoever has it, for as long as somebody has."""

import asyncio
import pickle
import sqlite3
from collections.abc import Callable, Coroutine
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from elche.v1 import agent_pb2
from elche_coordinator.core.coordinator import Coordinator
from elche_coordinator.core.messages.events import JobCancelled, JobsForgotten, JobSubmitted
from elche_coordinator.core.messages.ids import JobId
from elche_coordinator.core.messages.spec import JobSpec
from elche_coordinator.driver import Driver
from elche_coordinator.services.sessions import attend
from elche_coordinator.storage import tape
from elche_coordinator.storage.sources import Sources
from elche_coordinator.storage.sql.store import SqlStore

MIB = 1 << 20
HELLO = agent_pb2.AgentHello(host="host", slots=[agent_pb2.Slot(device="cpu")])


def in_loop(story: Callable[[], Coroutine[None, None, None]]) -> None:
    asyncio.run(story())


def started(folder: Path) -> Driver:
    store = SqlStore.in_file(folder / "elche.sqlite")
    return Driver(Coordinator(), store, recorded=tape.read(store))


def submit(driver: Driver, name: str, text: str, **more: Any) -> None:
    spec = JobSpec(
        **{"name": name, "source_hash": driver.sources.add(text), "file_name": "a.py", "num_ranks": 1, **more}
    )
    driver.handle(JobSubmitted(job_id=JobId(name), spec=spec, submitted_at=1.0))


def read(folder: Path, query: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(folder / "elche.sqlite")) as database:
        return database.execute(query).fetchall()


def test_what_waits_with_large_files_is_small_in_the_state(tmp_path: Path) -> None:
    """The state had every file in it: 1,050 jobs of 1 MB were more than SQLite writes, for good."""

    async def story() -> None:
        driver = started(tmp_path)
        for number in range(120):
            submit(driver, f"job-{number}", f"# {number % 12}".ljust(MIB))
        await asyncio.wait_for(driver.durable(), 30)
        driver.stop()

    in_loop(story)
    assert read(tmp_path, "SELECT count(*), min(length(text)) FROM sources") == [(12, MIB)]
    ((state,), (parts,), (entries,)) = (
        read(tmp_path, f"SELECT coalesce(sum(length({column})), 0) FROM {table}")[0]
        for table, column in (("states", "state"), ("parts", "state"), ("tape", "entries"))
    )
    assert isinstance(state, int)
    assert isinstance(parts, int)
    assert isinstance(entries, int)
    assert state + parts + entries < MIB
    assert read(tmp_path, "SELECT count(*) FROM parts") != [(0,)], "no state was saved"


def test_who_starts_again_has_the_files_of_all_that_wait(tmp_path: Path) -> None:
    async def story() -> None:
        before = started(tmp_path)
        submit(before, "waits", "the file of one that waits")
        await asyncio.wait_for(before.durable(), 30)
        before.stop()
        driver = started(tmp_path)
        _, _, queue = attend(driver, HELLO)
        assert (await asyncio.wait_for(queue.get(), 10)).HasField("welcome")  # type: ignore[union-attr]
        order = await asyncio.wait_for(queue.get(), 10)
        assert order is not None
        message = driver.order_message(order)
        assert message is not None
        assert message.start_rank.spec.source == "the file of one that waits"
        driver.stop()

    in_loop(story)


def test_orders_to_start_many_ranks_hold_their_jobs_file_and_arguments_once(tmp_path: Path) -> None:
    """512 ranks of a file of 1 MB on a host that took nothing were 2 GB in memory, and 1 GB in the saved state."""

    async def story() -> None:
        driver = started(tmp_path)
        slots = [agent_pb2.Slot(device="cpu")] * 40
        _, _, queue = attend(driver, agent_pb2.AgentHello(host="host", slots=slots, identity="an agent"))
        submit(driver, "job", "#".ljust(MIB), num_ranks=40, arguments=("x" * 30_000,))
        await asyncio.wait_for(driver.durable(), 30)
        assert (await asyncio.wait_for(queue.get(), 10)).HasField("welcome")  # type: ignore[union-attr]
        assert len(pickle.dumps(driver.streams)) < 100_000
        orders = [await asyncio.wait_for(queue.get(), 10) for _ in range(40)]
        made = [driver.order_message(order) for order in orders if order is not None]
        assert [(one.seq, one.start_rank.rank) for one in made if one] == [(n + 1, n) for n in range(40)]
        assert made[39] is not None
        assert len(made[39].start_rank.spec.source) == MIB
        assert driver.secrets.read(made[39].start_rank.secret) == {"job_id": "job", "rank": 39, "incarnation": 40}

        driver.sources.release("job")  # as when it ends before its host has taken all
        assert driver.order_message(orders[0]) == made[0], "the database still has it"  # type: ignore[arg-type]
        with closing(sqlite3.connect(tmp_path / "elche.sqlite")) as database, database:
            database.execute("DELETE FROM sources")
        assert driver.order_message(orders[0]) is None, "nobody needs the rank of a forgotten job"  # type: ignore[arg-type]
        driver.stop()

    in_loop(story)


def test_a_file_is_removed_with_the_last_job_that_has_it(tmp_path: Path) -> None:
    async def story() -> None:
        driver = started(tmp_path)
        for name, text in (("a", "shared"), ("b", "shared"), ("c", "own")):
            submit(driver, name, text)
            driver.handle(JobCancelled(job_id=JobId(name)))
        await asyncio.wait_for(driver.durable(), 30)
        driver.handle(JobsForgotten(job_ids=(JobId("a"), JobId("c"))))
        await asyncio.wait_for(driver.durable(), 30)
        driver.stop()

    in_loop(story)
    assert read(tmp_path, "SELECT text FROM sources") == [("shared",)]
    assert read(tmp_path, "SELECT id FROM jobs") == [("b",)]


def test_a_job_whose_file_the_database_has_lost_fails_and_says_so(tmp_path: Path) -> None:
    async def story() -> None:
        before = started(tmp_path)
        submit(before, "job", "text")
        await asyncio.wait_for(before.durable(), 30)
        before.stop()
        with closing(sqlite3.connect(tmp_path / "elche.sqlite")) as database, database:
            database.execute("DELETE FROM sources")
        driver = started(tmp_path)
        attend(driver, HELLO)
        await asyncio.sleep(0)
        view = driver.core.view(JobId("job"), 0.0)
        assert view is not None
        assert view.reason == "StartRank cannot be carried out: its file is not in the database any more"
        driver.stop()

    in_loop(story)


def test_a_text_is_in_memory_while_a_job_that_has_not_ended_holds_it() -> None:
    stored = {}
    sources = Sources(stored.__getitem__)
    name = sources.add("text")
    assert sources.take_new() == {name: "text"}
    assert sources.take_new() == {}
    stored[name] = "text"
    for job_id in ("a", "b"):
        sources.hold(job_id, name)
    sources.release("a")
    assert sources.text(name) == "text"
    sources.release("b")
    sources.release("b")
    with pytest.raises(LookupError, match="its file is not in the database any more"):
        sources.text(name)
    sources.load(name)
    assert sources.text(name) == "text"


def test_a_text_whose_submission_was_refused_is_dropped_unless_a_job_has_it() -> None:
    sources = Sources({}.__getitem__)
    sources.discard(sources.add("refused"))
    assert sources.take_new() == {}
    name = sources.add("held")
    sources.hold("a", name)
    sources.discard(name)
    assert sources.text(name) == "held"
    assert sources.take_new() == {name: "held"}
