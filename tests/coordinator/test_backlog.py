"""While nothing can be written, those who send much are read no further, and nobody waits for what others have sent."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from elche.v1 import agent_pb2, rank_pb2
from elche_coordinator.core.coordinator import Coordinator
from elche_coordinator.core.messages.events import LoopAttached
from elche_coordinator.core.messages.ids import JobId
from elche_coordinator.core.messages.spec import JobSpec
from elche_coordinator.core.records.ranks import Address
from elche_coordinator.driver import Driver
from elche_coordinator.limits import backlog as module
from elche_coordinator.limits.backlog import EVENT_BYTES, Backlog, Turns
from elche_coordinator.limits.budgets import MAX_UNWRITTEN_BYTES_OF_STREAM, TURN_BYTES
from elche_coordinator.services.rank_service import RankServicer
from elche_coordinator.services.sessions import RankQueue, open_session
from elche_coordinator.storage.sql.store import SqlStore
from elche_coordinator.storage.store import JobRow, StoreFailed

TEXT = rank_pb2.ConverseRequest(event_recorded=rank_pb2.EventRecorded(text="x" * 200))
NUM_BYTES = EVENT_BYTES + TEXT.ByteSize()
MANY = 1000
"""Messages, which were all taken in while the database was locked."""


class Disk(SqlStore):
    """Fails while it is told to."""

    is_full = False

    def write(self, rows: Sequence[JobRow], **tape: Any) -> None:
        if self.is_full:
            raise StoreFailed("the disk is full")
        super().write(rows, **tape)


def in_loop(story: Callable[[], Coroutine[None, None, None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), 120))


def attached(driver: Driver) -> list[tuple[Address, RankQueue]]:
    """The sessions of a loop's two ranks."""
    spec = JobSpec(name="loop", source_hash="", file_name="loop", num_ranks=2, is_loop=True)
    ranks = (("host", "cpu"), ("host", "cpu"))
    driver.handle(LoopAttached(job_id=JobId("loop"), spec=spec, ranks=ranks, policy="", submitted_at=1.0))
    found = []
    for address in driver.core.addresses(JobId("loop")):
        queue = open_session(driver, address, 0)
        assert queue is not None
        found.append((address, queue))
    return found


async def settled() -> None:
    for _ in range(100):
        await asyncio.sleep(0)


def test_while_nothing_can_be_written_who_sends_much_is_read_no_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A locked database: 2,500 messages made the coordinator 1 GB larger, and it took in more."""
    monkeypatch.setattr("elche_coordinator.storage.writer.RETRY_S", 0.01)
    limit = 100 * NUM_BYTES
    monkeypatch.setattr(module, "MAX_UNWRITTEN_BYTES_OF_STREAM", limit)

    async def story() -> None:
        disk = Disk.in_file(tmp_path / "elche.sqlite")
        driver = Driver(Coordinator(), disk)
        timelines: Any = None
        servicer = RankServicer(driver, timelines)
        (loud, loud_queue), (quiet, quiet_queue) = attached(driver)
        num_read = dict.fromkeys((0, 1), 0)

        async def sent(rank: int, num: int) -> AsyncIterator[rank_pb2.ConverseRequest]:
            for number in range(num):
                num_read[rank] += 1
                message = rank_pb2.ConverseRequest(seq=number + 1)
                message.MergeFrom(TEXT)
                yield message

        def read(address: Address, queue: RankQueue, num: int) -> "asyncio.Task[None]":
            stream = driver.streams.of_rank(address)
            assert stream is not None
            return asyncio.ensure_future(servicer._read(address, sent(address["rank"], num), stream, queue))

        await driver.durable()
        disk.is_full = True
        reading = read(loud, loud_queue, MANY)
        await settled()
        assert 50 <= num_read[0] <= 101, "it is read until so much is not written"
        await asyncio.wait_for(read(quiet, quiet_queue, 50), 60)
        assert (num_read[1], reading.done()) == (50, False), "the other is read on"
        disk.is_full = False
        await asyncio.wait_for(reading, 60)
        assert num_read[0] == MANY
        await driver.durable()
        driver.stop()

    in_loop(story)


def message_of(num_bytes: int) -> agent_pb2.AttendRequest:
    message = agent_pb2.AttendRequest()
    message.rank_stacks.text = "x" * num_bytes
    return message


def test_nobody_waits_for_what_others_have_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_UNWRITTEN_BYTES", 100_000)
    monkeypatch.setattr(module, "MAX_UNWRITTEN_BYTES_OF_STREAM", 60_000)
    monkeypatch.setattr(module, "MIN_UNWRITTEN_BYTES_OF_STREAM", 5_000)

    async def story() -> None:
        backlog = Backlog()
        assert backlog.add("a", message_of(30_000), 1)
        assert backlog.add("a", message_of(25_000), 2)
        assert not backlog.add("a", message_of(10_000), 3), "it has sent too much for one"
        assert not backlog.add("b", message_of(40_000), 4), "all have sent too much, and it has sent much of that"
        assert backlog.add("c", message_of(1_000), 5)
        rooms = {name: asyncio.ensure_future(backlog.room(name)) for name in "abc"}
        await settled()
        assert [room.done() for room in rooms.values()] == [False, False, True]
        backlog.settle(1)
        await settled()
        assert [room.done() for room in rooms.values()] == [True, True, True]
        backlog.settle(9)
        assert not backlog._of_stream
        assert backlog._num_bytes == 0
        assert backlog.add("a", message_of(50_000), 10), "what is durable counts no more"

    in_loop(story)


def test_many_small_messages_count_as_the_events_that_they_are() -> None:
    async def story() -> None:
        backlog, num = Backlog(), 0
        while backlog.add("a", agent_pb2.AttendRequest(seq=1), num):
            num += 1
        assert num < MAX_UNWRITTEN_BYTES_OF_STREAM // EVENT_BYTES

    in_loop(story)


def test_the_streams_of_one_user_have_a_bound_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """30 ranks of one user had 64 MiB that was not written, which took 300 MB."""
    monkeypatch.setattr(module, "MAX_UNWRITTEN_BYTES_OF_USER", 100_000)
    monkeypatch.setattr(module, "MIN_UNWRITTEN_BYTES_OF_STREAM", 5_000)

    async def story() -> None:
        backlog = Backlog()
        assert backlog.add("a", message_of(50_000), 1, "eve")
        assert not backlog.add("b", message_of(60_000), 2, "eve")
        assert backlog.add("c", message_of(1_000), 3, "eve"), "it has sent little"
        assert backlog.add("d", message_of(60_000), 4, "bob")
        room = asyncio.ensure_future(backlog.room("b", "eve"))
        await settled()
        assert not room.done()
        backlog.settle(1)
        await asyncio.wait_for(room, 60)
        backlog.settle(4)
        assert not backlog._of_user
        assert backlog.add("a", message_of(90_000), 5), "whoever has no name"
        assert backlog.add("b", message_of(90_000), 6), "has no bound"

    in_loop(story)


def test_of_one_users_streams_so_much_is_read_in_each_turn_of_the_loop() -> None:
    """Others, whose calls take several turns, waited for 30 long messages each time."""

    async def story() -> None:
        turns, read = Turns(), {"eve": 0, "bob": 0}
        num_bytes = TURN_BYTES // 2 - EVENT_BYTES

        async def stream(user: str, num: int) -> None:
            for _ in range(num):
                await turns.take(user, num_bytes)
                read[user] += num_bytes + EVENT_BYTES
                await asyncio.sleep(0)

        eve = [asyncio.ensure_future(stream("eve", 20)) for _ in range(30)]
        ended = asyncio.ensure_future(stream("eve", 20))
        await asyncio.sleep(0)
        ended.cancel()
        bob = asyncio.ensure_future(stream("bob", 2))
        num_turns = 0
        while not all(one.done() for one in eve):
            before = read["eve"]
            await asyncio.sleep(0)
            num_turns += 1
            assert read["eve"] - before <= 2 * TURN_BYTES
            assert num_turns < 1000
        assert bob.done()
        assert num_turns >= 290, "600 messages, two in each turn"
        await settled()
        assert not turns._lines

    in_loop(story)


def test_a_long_message_uses_several_turns() -> None:
    async def story() -> None:
        turns = Turns()
        await turns.take("eve", 10 * TURN_BYTES)
        after = asyncio.ensure_future(turns.take("eve", 1))
        for _ in range(8):
            await asyncio.sleep(0)
        assert not after.done()
        await settled()
        assert after.done()

    in_loop(story)
