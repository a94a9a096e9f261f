"""What live ranks of one job cost the coordinator, in virtual time: the same whatever else the machine does.

The ranks of `live_ranks.py` converse with the coordinator's own services in one process: messages are encoded, parsed,
validated, decided on, written to a database and answered, and only gRPC and its sockets are left out. Time passes only
by doing what is next. So a thousand ranks need no machine of their own, and what is counted is processor time: that of
the event loop without the ranks' own, and that of the thread that writes.

    python benchmarks/live_ranks_cost.py 10 100 300 1000               # two minutes
    python benchmarks/live_ranks_cost.py 300 --profile                 # and where the time goes
"""

import argparse
import asyncio
import cProfile
import json
import pstats
import selectors
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from math import nan
from pathlib import Path
from typing import Any

from live_ranks import BATCH_SIZE, FASTEST_S, SLOWEST_S, settings_of
from played_ranks import Converse, Course, Metadata, World, play

from elche.v1 import agent_pb2, rank_pb2
from elche_coordinator import collector
from elche_coordinator.core.coordinator import Coordinator
from elche_coordinator.core.messages.events import JobSubmitted
from elche_coordinator.core.messages.ids import JobId
from elche_coordinator.core.messages.spec import JobSpec
from elche_coordinator.driver import Driver
from elche_coordinator.services.rank_service import RankServicer
from elche_coordinator.services.sessions import attend
from elche_coordinator.services.validation import _parse as parse
from elche_coordinator.storage.sql.store import SqlStore
from elche_coordinator.telemetry.timelines import Timelines


class Jumping:
    """A selector that lets no time pass while it waits, unless a thread has something to do."""

    def __init__(self, selector: selectors.BaseSelector, loop: "VirtualLoop") -> None:
        self._selector = selector
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        return getattr(self._selector, name)

    def select(self, timeout: float | None = None) -> Any:
        found = self._selector.select(0)
        if found or timeout == 0:
            return found
        if timeout is None or self._loop.is_writing():
            return self._selector.select(timeout)
        self._loop.now_s += timeout
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock goes on when there is nothing to do."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.is_writing: Callable[[], bool] = lambda: False
        self._selector = Jumping(self._selector, self)  # type: ignore[has-type]

    def time(self) -> float:
        return self.now_s


class Caller:
    """In place of a call's context."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata

    def invocation_metadata(self) -> Metadata:
        return self._metadata


def in_process(servicer: RankServicer) -> Converse:
    """Sessions with the service itself; what is said is bytes, as on the wire."""

    async def parsed(requests: AsyncIterator[bytes]) -> AsyncIterator[rank_pb2.ConverseRequest]:
        async for data in requests:
            yield parse(rank_pb2.ConverseRequest.FromString, data)

    async def converse(metadata: Metadata, requests: AsyncIterator[bytes]) -> AsyncIterator[rank_pb2.ConverseResponse]:
        caller: Any = Caller(metadata)
        async for response in servicer.Converse(parsed(requests), caller):
            response.SerializeToString()
            yield response

    return converse


async def started(driver: Driver, num_ranks: int) -> AsyncIterator[agent_pb2.StartRank]:
    """Offers devices, submits the job, and yields its ranks."""
    hello = agent_pb2.AgentHello(host="played", slots=[agent_pb2.Slot(device="cpu")] * num_ranks)
    _, _, queue = attend(driver, hello)
    spec = JobSpec(name="played", source_hash="", file_name="job.py", num_ranks=num_ranks)
    driver.handle(JobSubmitted(job_id=JobId("played"), spec=spec, submitted_at=0.0))
    async for order in queue:
        message = driver.order_message(order)
        if message is not None and message.HasField("start_rank"):
            yield message.start_rank


class Measured:
    """The figures of one number of ranks."""

    def __init__(self, loop: VirtualLoop, seconds: float, profile: cProfile.Profile | None) -> None:
        self._loop, self._seconds, self._profile = loop, seconds, profile
        self.row: dict[str, object] = {}

    async def measure(self, world: World) -> None:
        began_s, begun_s = self._loop.time(), time.process_time()
        await world.is_warm.wait()
        start_s, start_cpu_s = self._loop.time() - began_s, time.process_time() - begun_s
        world.figures.reset()
        figures, rounds = world.figures, world.committed
        began_s, thread_s, process_s = self._loop.time(), time.thread_time(), time.process_time()
        if self._profile is not None:
            self._profile.enable()
        await asyncio.sleep(self._seconds)
        if self._profile is not None:
            self._profile.disable()
        elapsed_s, thread_s = self._loop.time() - began_s, time.thread_time() - thread_s
        process_s = time.process_time() - process_s
        rank_seconds = world.num_ranks * elapsed_s
        self.row = {
            "ranks": world.num_ranks,
            "loop_ms_per_rank_s": round(1000 * (thread_s - figures.played_s) / rank_seconds, 3),
            "writer_ms_per_rank_s": round(1000 * (process_s - thread_s) / rank_seconds, 3),
            "cores": round((process_s - figures.played_s) / elapsed_s, 3),
            "work_fraction": round(figures.trained_s / rank_seconds, 4),
            "rounds": world.committed - rounds,
            "announced_cpu_ms": round(1000 * max(figures.announced_cpu_s, default=nan), 1),
            "sent_per_rank_s": round(sum(figures.sent.values()) / rank_seconds, 2),
            "received_per_rank_s": round(sum(figures.received.values()) / rank_seconds, 2),
            "sent_bytes_per_rank_s": round(figures.sent_bytes / rank_seconds),
            "start_s": round(start_s, 1),
            "start_cpu_s": round(start_cpu_s, 1),
            "sent": {name: round(count / rank_seconds, 3) for name, count in figures.sent.items()},
            "received": {name: round(count / rank_seconds, 3) for name, count in figures.received.items()},
        }


async def run(loop: VirtualLoop, world: World, measured: Measured, folder: Path) -> None:
    collector.settle()
    driver = Driver(Coordinator(), SqlStore.in_file(folder / "elche.sqlite"))
    given = 0
    write = driver.writer.write

    def counted(batch: Any) -> None:
        nonlocal given
        given = batch.last
        write(batch)

    driver.writer.write = counted  # type: ignore[method-assign]
    loop.is_writing = lambda: driver._num_written < given
    servicer = RankServicer(driver, Timelines(folder / "timelines", driver))
    try:
        await play(world, started(driver, world.num_ranks), in_process(servicer), measured.measure)
    finally:
        driver.stop()


def measure(num_ranks: int, seconds: float, *, overlaps: bool, profile: cProfile.Profile | None) -> dict[str, object]:
    step = (SLOWEST_S - FASTEST_S) / max(1, num_ranks - 1)
    batch_s = [FASTEST_S + step * rank for rank in range(num_ranks)]
    course = Course(batch_s=batch_s, jitter=0.05, sync_s=0.05, batch_size=BATCH_SIZE, overlaps=overlaps)
    loop = VirtualLoop()
    measured = Measured(loop, seconds, profile)
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(run(loop, World(course, settings_of(overlaps)), measured, Path(folder)))
    return measured.row


SHOWN = (
    "ranks", "loop_ms_per_rank_s", "writer_ms_per_rank_s", "cores", "work_fraction", "rounds", "announced_cpu_ms",
    "sent_per_rank_s", "received_per_rank_s", "sent_bytes_per_rank_s", "start_cpu_s",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ranks", type=int, nargs="*", default=[10, 100, 300, 1000])
    parser.add_argument("--seconds", type=float, default=10.0, help="how much virtual time is measured")
    parser.add_argument("--blocking", action="store_true", help="ranks wait for averages, rounds are ten batches long")
    parser.add_argument("--profile", action="store_true", help="show the functions that take longest")
    given = parser.parse_args()
    print("| " + " | ".join(SHOWN) + " |\n|" + "---|" * len(SHOWN))
    rows = []
    for num_ranks in given.ranks:
        profile = cProfile.Profile() if given.profile else None
        row = measure(num_ranks, given.seconds, overlaps=not given.blocking, profile=profile)
        print("| " + " | ".join(str(row.get(name)) for name in SHOWN) + " |", flush=True)
        rows.append(row)
        if profile is not None:
            for order in ("tottime", "cumtime"):
                pstats.Stats(profile).strip_dirs().sort_stats(order).print_stats(45)
    print("\n".join(map(json.dumps, rows)))


if __name__ == "__main__":
    main()
