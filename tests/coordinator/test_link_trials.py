"""Measuring links asks agents that can, believes nothing that they say, and leaves nothing behind."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest

from elche.errors import InvalidJob, TooMuch
from elche.v1 import agent_pb2, job_pb2
from elche_coordinator.core.coordinator import Coordinator
from elche_coordinator.driver import Driver
from elche_coordinator.services.link_trials import LinkTrials
from elche_coordinator.services.sessions import AgentQueue, attend
from elche_coordinator.storage.sql.store import SqlStore
from elche_coordinator.streams.transfers import Transfers

Answer = Callable[[agent_pb2.AttendResponse], bytes | InvalidJob]
MEASURED = job_pb2.LinkMeasured(round_trip_s=0.001, to_bytes_per_s=1e9, from_bytes_per_s=2e9)


def well(order: agent_pb2.AttendResponse) -> bytes | InvalidJob:
    """What an agent delivers."""
    return b"10.0.0.7:40000" if order.HasField("open_link") else MEASURED.SerializeToString()


async def serve(queue: AgentQueue, transfers: Transfers, answer: Answer) -> None:
    """An agent."""
    async for order in queue:
        if order.HasField("open_link") or order.HasField("try_link"):
            transfer = (order.open_link if order.HasField("open_link") else order.try_link).transfer
            with suppress(InvalidJob):  # nobody wants more, as after an answer that is too long
                await transfers.deliver(transfer, answer(order))
                await transfers.deliver(transfer, None)


def found(folder: Path, *agents: tuple[str, Answer], names: tuple[str, ...] = ()) -> list[job_pb2.MeasureLinksResponse]:
    """What these agents, by host, find."""

    async def story() -> list[job_pb2.MeasureLinksResponse]:
        driver, transfers = Driver(Coordinator(), SqlStore.in_file(folder / "elche.sqlite")), Transfers()
        serving: list[asyncio.Future[None]] = []
        for host, answer in agents:
            hello = agent_pb2.AgentHello(host=host, slots=[agent_pb2.Slot(device="cpu")])
            _, _, queue = attend(driver, hello)
            serving.append(asyncio.ensure_future(serve(queue, transfers, answer)))
        try:
            answers = [one async for one in LinkTrials(driver.agents, transfers).measure(names)]
            assert not transfers._open, "nothing waits for an agent any more"
            return answers
        finally:
            for one in serving:
                one.cancel()
            driver.stop()

    return asyncio.run(_in_time(story()))


async def _in_time(story: Awaitable[list[job_pb2.MeasureLinksResponse]]) -> list[job_pb2.MeasureLinksResponse]:
    return await asyncio.wait_for(story, 20)


def test_each_pair_of_hosts_is_measured_once(tmp_path: Path) -> None:
    answers = found(tmp_path, ("a", well), ("b", well), ("b", well), ("c", well))
    assert [(one.host, one.other, one.num_links, one.error) for one in answers] == [
        ("a", "b", 3, ""),
        ("a", "c", 3, ""),
        ("b", "c", 3, ""),
    ]
    assert all(one.measured == MEASURED for one in answers)
    assert len(found(tmp_path, ("a", well), ("b", well), names=("b", "a", "b"))) == 1


def test_a_link_that_is_open_one_way_is_none(tmp_path: Path) -> None:
    def refused(order: agent_pb2.AttendResponse) -> bytes | InvalidJob:
        return InvalidJob("10.0.0.7:40000: Connection refused") if order.HasField("try_link") else well(order)

    (one,) = found(tmp_path, ("a", well), ("b", refused))
    assert one.error == "b cannot connect to a: 10.0.0.7:40000: Connection refused"


@pytest.mark.parametrize("said", [b"\xff\xff\xff", b"x" * 100_000])
def test_what_is_no_answer_says_nothing_of_the_link(tmp_path: Path, said: bytes) -> None:
    answers = found(tmp_path, ("a", lambda order: said), ("b", well), ("c", well))
    assert [("other than a measurement" in one.error, bool(one.error)) for one in answers] == [
        (True, True),
        (True, True),
        (False, False),
    ]


def test_too_few_and_too_many(tmp_path: Path) -> None:
    with pytest.raises(InvalidJob, match="hosts connected: 1"):
        found(tmp_path, ("a", well))
    with pytest.raises(InvalidJob, match="hosts named: 1"):
        found(tmp_path, ("a", well), ("b", well), names=("a", "a"))
    with pytest.raises(InvalidJob, match="no host named 'z' is connected"):
        found(tmp_path, ("a", well), names=("a", "z"))
    with pytest.raises(TooMuch, match="65 hosts have 2080 links"):
        found(tmp_path, *((f"h{number}", well) for number in range(65)))
