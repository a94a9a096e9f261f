"""What agents of one token may have at once: what their hosts say of themselves, and calls."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from elche.errors import TooMuch, Unreachable
from elche.v1 import agent_pb2
from elche_coordinator.core.coordinator import Coordinator
from elche_coordinator.core.messages.events import Event, JobSubmitted, RankExited, StacksReported
from elche_coordinator.core.messages.ids import JobId
from elche_coordinator.core.messages.spec import JobSpec
from elche_coordinator.driver import Driver
from elche_coordinator.services import agent_service
from elche_coordinator.services.agent_service import MANY_IN_VAIN, UNREACHED, AgentServicer
from elche_coordinator.services.sessions import attend
from elche_coordinator.storage.sql.store import SqlStore
from elche_coordinator.streams import agents
from elche_coordinator.streams.agents import SLOT_BYTES
from elche_coordinator.streams.transfers import Transfers


def hello(name: str) -> agent_pb2.AgentHello:
    return agent_pb2.AgentHello(host=name.ljust(50), slots=[agent_pb2.Slot(device="cpu")], identity=name)


def test_hosts_of_a_token_are_described_in_so_many_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """300 agents of one token, each with 1,024 slots of long names: +663 MB, and no end."""
    size = hello("a").ByteSize() + SLOT_BYTES
    monkeypatch.setattr(agents, "MAX_HOSTS_BYTES_OF_CALLER", 2 * size)
    monkeypatch.setattr(agents, "MAX_HOSTS_BYTES", 4 * size)

    async def story() -> None:
        driver = Driver(Coordinator(), SqlStore.in_file(tmp_path / "elche.sqlite"))
        first, *_ = attend(driver, hello("a"), "mallory")
        attend(driver, hello("b"), "mallory")
        again = agent_pb2.AgentHello(store=driver.identity.id)
        again.MergeFrom(hello("a"))
        attend(driver, again, "mallory")  # another connection of the same
        with pytest.raises(TooMuch, match=r"your workers have 0 MiB of descriptions of hosts, and 0 MiB is the limit"):
            attend(driver, hello("c"), "mallory")
        assert {one.host.strip() for one in driver.agents.hosts()} == {"a", "b"}
        attend(driver, hello("d"), "pool")
        driver.presence.lose_agent(first)
        attend(driver, hello("c"), "mallory")
        attend(driver, hello("e"), "")
        with pytest.raises(TooMuch, match="all workers have"):
            attend(driver, hello("f"), "")
        driver.stop()

    asyncio.run(story())


def test_slots_without_words_count_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts of 1,024 short slots: five million fitted, and a submission would have taken 4 s of processor."""
    monkeypatch.setattr(agents, "MAX_HOSTS_BYTES_OF_CALLER", 200 * SLOT_BYTES)

    async def story() -> None:
        driver = Driver(Coordinator(), SqlStore.in_file(tmp_path / "elche.sqlite"))
        many = agent_pb2.AgentHello(host="many", slots=[agent_pb2.Slot()] * 150)
        attend(driver, many, "mallory")
        with pytest.raises(TooMuch, match="your workers have"):
            attend(driver, many, "mallory")
        driver.stop()

    asyncio.run(story())


async def silence() -> AsyncIterator[Any]:
    await asyncio.Event().wait()
    yield


def test_an_agent_that_does_not_say_who_it_is_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """4,000 such calls stayed open: +121 MB, for as long as their owner liked."""
    monkeypatch.setattr(agent_service, "HELLO_S", 0.01)
    monkeypatch.setattr(agent_service, "BEGIN_S", 0.01)

    async def story() -> None:
        driver = Driver(Coordinator(), SqlStore.in_file(tmp_path / "elche.sqlite"))
        servicer = AgentServicer(driver, Transfers())
        context: Any = None
        with pytest.raises(Unreachable, match=r"nothing has come for 0\.01 s"):
            await anext(servicer.Attend(silence(), context))
        with pytest.raises(Unreachable, match=r"nothing has come for 0\.01 s"):
            await servicer.Deliver(silence(), context)
        driver.stop()

    asyncio.run(asyncio.wait_for(story(), 30))


def test_what_an_agent_says_of_anothers_processes_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stacks of 100 kB, again and again, which the core refused: +300 MB, and others' calls waited for 2 s."""

    async def story() -> None:
        driver = Driver(Coordinator(), SqlStore.in_file(tmp_path / "elche.sqlite"))
        servicer, handle, texts = AgentServicer(driver, Transfers()), driver.handle, list[str]()

        def note(event: Event, **more: Any) -> None:
            if isinstance(event, StacksReported | RankExited):
                texts.append(event.text if isinstance(event, StacksReported) else event.log_tail)
            handle(event, **more)

        owner, other = attend(driver, hello("a")), attend(driver, hello("b"))
        spec = JobSpec(name="job", source_hash="", file_name="job.py", num_ranks=1)
        driver.handle(JobSubmitted(job_id=JobId("job"), spec=spec, submitted_at=1.0))
        (address,) = driver.core.addresses(JobId("job"))
        monkeypatch.setattr(driver, "handle", note)

        async def said() -> AsyncIterator[agent_pb2.AttendRequest]:
            yield agent_pb2.AttendRequest(rank_stacks=agent_pb2.RankStacks(**address, text="long"))
            yield agent_pb2.AttendRequest(rank_exited=agent_pb2.RankExited(**address, log_tail="long"))

        for agent_id, stream, queue in (other, owner):
            await servicer._read(agent_id, said(), stream, queue)
        assert texts == ["", "", "long", "long"]
        driver.stop()

    asyncio.run(asyncio.wait_for(story(), 30))


def test_a_host_whose_orders_do_not_arrive_gets_no_more_ranks_until_they_do(tmp_path: Path) -> None:
    """Large packets to it are lost, so its connections break; its job stayed in `starting`, and nothing said why."""

    async def story() -> None:
        driver = Driver(Coordinator(), SqlStore.in_file(tmp_path / "elche.sqlite"))
        servicer, context = AgentServicer(driver, Transfers()), Mock()
        mine = agent_pb2.AgentHello(host="a", slots=[agent_pb2.Slot()], identity="a", store=driver.identity.id)

        async def said(*more: agent_pb2.AttendRequest) -> AsyncIterator[agent_pb2.AttendRequest]:
            yield agent_pb2.AttendRequest(hello=mine)
            for one in more:
                yield one

        def problem() -> str:
            return next(iter(driver.core.fleet.agents.values())).problem

        _, stream, queue = attend(driver, mine)
        stream.disconnect(queue)
        spec = JobSpec(name="job", source_hash="", file_name="job.py", num_ranks=1)
        driver.handle(JobSubmitted(job_id=JobId("job"), spec=spec, submitted_at=1.0))
        for _ in range(MANY_IN_VAIN):
            assert problem() == ""
            async for _order in servicer.Attend(said(), context):
                pass
        assert problem() == UNREACHED
        view = driver.core.view(JobId("job"), driver.now_s)
        assert view is not None
        assert view.reason == f"rank 0 waits for host a: {UNREACHED}"
        mine.num_received = 1
        async for _welcome in servicer.Attend(said(), context):
            assert problem() == ""
        driver.stop()

    asyncio.run(asyncio.wait_for(story(), 30))
