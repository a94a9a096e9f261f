"""How much may wait for a receiver that does not read."""

import asyncio

import pytest

from elche.v1 import job_pb2
from elche_coordinator.loop_health import LoopHealth
from elche_coordinator.streams import watchers as module
from elche_coordinator.streams.send_queue import MAX_WATCHED_BYTES, SendQueue
from elche_coordinator.streams.watchers import Watchers

BIG = job_pb2.WatchJobResponse(view=job_pb2.JobView(reason="x" * (1 << 20)))


async def rest_of(queue: SendQueue[job_pb2.WatchJobResponse]) -> int:
    queue.close()
    return len([one async for one in queue])


def test_what_waits_for_a_watcher_is_bounded_in_bytes() -> None:
    """A watcher that did not read had the coordinator keep 1 GB of reports, far fewer than the 10,000 that may wait."""

    async def story() -> None:
        queue = Watchers(LoopHealth()).watch("job")
        assert filled(queue) == MAX_WATCHED_BYTES // BIG.ByteSize()
        assert await rest_of(queue) == 0, "it begins anew, with a view of the job as it is then"

    asyncio.run(story())


def test_what_waits_for_all_watchers_of_a_caller_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """40 unread watches of jobs that reported without end: +689 MB in 25 s, and no end to it."""
    monkeypatch.setattr(module, "MAX_REPORTS_BYTES_OF_CALLER", 20 << 20)
    watchers = Watchers(LoopHealth())
    first, second, of_bob = (watchers.watch(str(n), who) for n, who in enumerate(("eve", "eve", "bob")))
    for _ in range(10):
        first.put(BIG)
    assert filled(second) == 9
    assert not first.is_closed
    assert filled(of_bob) == MAX_WATCHED_BYTES // BIG.ByteSize()
    watchers.unwatch("0", first)
    assert filled(watchers.watch("3", "eve")) == MAX_WATCHED_BYTES // BIG.ByteSize()


def filled(queue: SendQueue[job_pb2.WatchJobResponse]) -> int:
    """Fills a queue until it is ended; how many messages were in it at most."""
    num_put = 0
    while True:
        queue.put(BIG)
        if queue.is_closed:
            return num_put
        num_put += 1


def test_who_reads_is_never_cut_off() -> None:
    async def story() -> None:
        queue = Watchers(LoopHealth()).watch("job")
        for _ in range(100):
            queue.put(BIG)
            assert await queue.get() is BIG
        assert not queue.is_closed

    asyncio.run(story())


def test_what_waits_for_a_rank_is_bounded_in_messages_alone() -> None:
    async def story() -> None:
        queue: SendQueue[job_pb2.WatchJobResponse] = SendQueue(40)
        for _ in range(50):
            queue.put(BIG)
        assert queue.is_closed
        assert await rest_of(queue) == 40

    asyncio.run(story())
