"""How much may wait for a receiver that does not read."""

import asyncio

from elche.v1 import job_pb2
from elche_coordinator.loop_health import LoopHealth
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
        for _ in range(100):
            queue.put(BIG)
        assert queue.is_closed, "it begins anew, with a view of the job as it is then"
        assert await rest_of(queue) == MAX_WATCHED_BYTES // BIG.ByteSize()

    asyncio.run(story())


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
