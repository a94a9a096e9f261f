"""What live ranks of one job cost the coordinator, and what they wait for it, by their number.

The ranks speak the real protocol, each over a connection of its own, and train by sleeping: batches of 250 ms to 1 s,
and an averaging of 50 ms. One process plays them all. From the third committed round on it is measured for a while: the
coordinator's processor time by rank and second, messages by rank and second, the time from a round's commit to the last
rank's `SyncNow` of the next one, that of `/healthz`, the coordinator's memory by rank, and the work done, as a part of
what devices that never wait would do. Prints a table, and a JSON object for each number of ranks.

    python benchmarks/live_ranks.py 10 100 300 1000                     # four minutes
    python benchmarks/live_ranks.py 300 --profile live.prof            # the coordinator under cProfile
    python benchmarks/live_ranks.py 1000 --deaths --restart            # ranks die, then the coordinator is killed

Processor time counts what the coordinator has done, whatever else the machine does; times by the clock are those of a
quiet machine only there. The ranks themselves take up to a core.
"""

import argparse
import asyncio
import json
import multiprocessing
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from multiprocessing.synchronize import Event
from pathlib import Path

from played_ranks import Course, World, attended, over_the_wire, play
from programs import processor_s, resident_bytes

from elche.settings import BLOCKING_ANCHOR, OVERLAPPED_ANCHOR, AgreedSettings
from elche_client import Client

BATCH_SIZE = 64
FASTEST_S, SLOWEST_S = 0.25, 1.0
PROBE_EVERY_S = 0.05
START_LIMIT_S = 300.0
DEATHS_PER_MINUTE = 0.01
"""Of each rank."""


def percentile(values: list[float], fraction: float) -> float:
    """In ms; NaN of nothing."""
    ordered = sorted(values)
    return round(1000 * ordered[min(len(ordered) - 1, int(fraction * len(ordered)))], 1) if ordered else float("nan")


def probe(url: str, over: Event, results: "multiprocessing.Queue[list[float]]") -> None:
    """Asks a page again and again, and puts how long each answer took."""
    times = []
    while not over.is_set():
        began_s = time.perf_counter()
        urllib.request.urlopen(url, timeout=60).read()
        times.append(time.perf_counter() - began_s)
        over.wait(PROBE_EVERY_S)
    results.put(times)


class Coordinator:
    """A coordinator's process on a folder, which can be killed and started again at its address."""

    def __init__(self, folder: Path, profile: str) -> None:
        profiled = ["-m", "cProfile", "-o", profile] if profile else []
        self._command = [sys.executable, *profiled, "-m", "elche_coordinator", "--exit-with-stdin"]
        self._folder = folder
        self.address = "127.0.0.1:0"
        self.start()

    def start(self) -> None:
        """Starts it, and waits until it listens."""
        log = self._folder / "log"
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [*self._command, "--listen", self.address, "--http", "127.0.0.1:0", "--data", self._folder / "data"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().split()[-1]
        self.page = next(line for line in log.read_text().splitlines() if "page and metrics on" in line).split()[-1]

    def end(self, number: int) -> None:
        """Sends it the signal, and waits for its end."""
        self.process.send_signal(number)
        self.process.wait()

    @property
    def processor_s(self) -> float:
        """User and system time so far."""
        return processor_s(self.process.pid)

    @property
    def resident_bytes(self) -> int:
        return resident_bytes(self.process.pid)


def settings_of(overlaps: bool) -> AgreedSettings:
    return AgreedSettings(
        epochs=1,
        batch_size=BATCH_SIZE,
        dataset_size=10**11,
        averaging="overlapped" if overlaps else "blocking",
        anchor=OVERLAPPED_ANCHOR if overlaps else BLOCKING_ANCHOR,
        divergence_threshold=0,
    )


class Measured:
    """The figures of one number of ranks."""

    def __init__(self, coordinator: Coordinator, seconds: float, *, dies: bool, restarts: bool) -> None:
        self._coordinator, self._seconds = coordinator, seconds
        self._dies, self._restarts = dies, restarts
        self.row: dict[str, object] = {}

    async def measure(self, world: World) -> None:
        """Waits until the ranks train, and counts for a while."""
        coordinator = self._coordinator
        began_s, idle_bytes, start_processor_s = (
            time.perf_counter(),
            coordinator.resident_bytes,
            coordinator.processor_s,
        )
        await asyncio.wait([asyncio.ensure_future(world.is_warm.wait())], timeout=START_LIMIT_S)
        started = {"start_s": time.perf_counter() - began_s, "start_cpu_s": coordinator.processor_s - start_processor_s}
        spawned = multiprocessing.get_context("spawn")
        over, results = spawned.Event(), spawned.Queue()
        probing = spawned.Process(target=probe, args=(f"{coordinator.page}/healthz", over, results))
        probing.start()
        world.figures.reset()
        rounds, before_s, began_s = world.committed, coordinator.processor_s, time.perf_counter()
        await asyncio.wait([asyncio.ensure_future(world.is_over.wait())], timeout=self._seconds)
        elapsed_s, spent_s = time.perf_counter() - began_s, coordinator.processor_s - before_s
        over.set()
        probes = await asyncio.to_thread(results.get)
        probing.join()
        figures, num_ranks = world.figures, world.num_ranks
        rank_seconds = num_ranks * elapsed_s
        self.row = {
            "ranks": num_ranks,
            "cores": round(spent_s / elapsed_s, 3),
            "cpu_ms_per_rank_s": round(1000 * spent_s / rank_seconds, 3),
            "work_fraction": round(figures.trained_s / rank_seconds, 4),
            "rounds": world.committed - rounds,
            "sync_now_p50_ms": percentile(figures.announced_s, 0.5),
            "sync_now_p99_ms": percentile(figures.announced_s, 0.99),
            "healthz_p99_ms": percentile(probes, 0.99),
            "kb_per_rank": round((coordinator.resident_bytes - idle_bytes) / num_ranks / 1000, 1),
            "sent_bytes_per_rank_s": round(figures.sent_bytes / rank_seconds),
            "cpu_us_per_message": round(
                1e6 * spent_s / max(1, sum(figures.sent.values()) + sum(figures.received.values())), 1
            ),
            "sent_per_rank_s": {name: round(count / rank_seconds, 3) for name, count in figures.sent.items()},
            "received_per_rank_s": {name: round(count / rank_seconds, 3) for name, count in figures.received.items()},
            **{name: round(value, 1) for name, value in started.items()},
            "elapsed_s": round(elapsed_s, 1),
        }
        if self._dies:
            self.row |= await self._kill(world)
        if self._restarts:
            self.row |= await self._restart(world)

    async def _kill(self, world: World) -> dict[str, object]:
        """Kills ranks, one in a hundred each minute, for three times as long."""
        coordinator = self._coordinator
        world.figures.reset()
        began_s, before_s, committed = time.perf_counter(), coordinator.processor_s, world.committed
        gaps_s: list[float] = []
        while time.perf_counter() - began_s < 3 * self._seconds:
            world.kill(world.random.choice(list(world.playing)))
            killed_s = time.perf_counter()
            world.has_committed.clear()
            await asyncio.wait([asyncio.ensure_future(world.has_committed.wait())], timeout=START_LIMIT_S)
            gaps_s.append(time.perf_counter() - killed_s)
            pause_s = min(60 / (DEATHS_PER_MINUTE * world.num_ranks), 3 * self._seconds) - gaps_s[-1]
            await asyncio.sleep(max(0.0, pause_s))
        elapsed_s = time.perf_counter() - began_s
        return {
            "deaths": len(gaps_s),
            "death_to_commit_p50_ms": percentile(gaps_s, 0.5),
            "death_to_commit_p99_ms": percentile(gaps_s, 0.99),
            "dying_cores": round((coordinator.processor_s - before_s) / elapsed_s, 3),
            "dying_rounds": world.committed - committed,
            "dying_work_fraction": round(world.figures.trained_s / (world.num_ranks * elapsed_s), 4),
        }

    async def _restart(self, world: World) -> dict[str, object]:
        """Kills the coordinator and starts it again; times are from the new process's start."""
        coordinator = self._coordinator
        await asyncio.to_thread(coordinator.end, signal.SIGKILL)
        world.forget()
        world.figures.reset()
        began_s, committed = time.perf_counter(), world.committed
        await asyncio.to_thread(coordinator.start)
        listens_s = time.perf_counter() - began_s
        await asyncio.wait([asyncio.ensure_future(world.is_complete.wait())], timeout=START_LIMIT_S)
        complete_s = time.perf_counter() - began_s
        await asyncio.wait([asyncio.ensure_future(world.is_announced.wait())], timeout=START_LIMIT_S)
        elapsed_s = time.perf_counter() - began_s
        return {
            "restart_listens_s": round(listens_s, 1),
            "restart_complete_s": round(complete_s, 1),
            "restart_round_s": round(elapsed_s, 1),
            "restart_cpu_s": round(coordinator.processor_s, 1),
            "restart_work_fraction": round(world.figures.trained_s / (world.num_ranks * elapsed_s), 4),
            "restart_rounds_meanwhile": world.committed - committed,
        }


def measure(
    num_ranks: int, seconds: float, *, overlaps: bool, profile: str, dies: bool, restarts: bool
) -> dict[str, object]:
    step = (SLOWEST_S - FASTEST_S) / max(1, num_ranks - 1)
    course = Course(
        batch_s=[FASTEST_S + step * rank for rank in range(num_ranks)],
        jitter=0.05,
        sync_s=0.05,
        batch_size=BATCH_SIZE,
        overlaps=overlaps,
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        coordinator = Coordinator(folder, profile)
        try:
            source = folder / "job.py"
            source.write_text("# ranks that are played load nothing\n")
            address = coordinator.address
            Client(address).submit(source, num_ranks=num_ranks, folder="none")
            measured = Measured(coordinator, seconds, dies=dies, restarts=restarts)
            world = World(course, settings_of(overlaps))
            asyncio.run(play(world, attended(address, world), over_the_wire(address), measured.measure))
            return measured.row
        finally:
            coordinator.end(signal.SIGTERM)


SHOWN = ("ranks", "cores", "cpu_ms_per_rank_s", "work_fraction", "rounds", "sync_now_p50_ms", "sync_now_p99_ms")
SHOWN_TOO = ("healthz_p99_ms", "kb_per_rank", "sent_bytes_per_rank_s")
SHOWN_OF_DEATHS = ("deaths", "death_to_commit_p50_ms", "death_to_commit_p99_ms", "dying_cores", "dying_work_fraction")
SHOWN_OF_RESTART = ("restart_listens_s", "restart_complete_s", "restart_round_s", "restart_cpu_s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ranks", type=int, nargs="*", default=[10, 100, 300, 1000])
    parser.add_argument("--seconds", type=float, default=20.0, help="how long it is measured")
    parser.add_argument("--blocking", action="store_true", help="ranks wait for averages, rounds are ten batches long")
    parser.add_argument("--profile", default="", help="a file for the coordinator's profile")
    parser.add_argument("--deaths", action="store_true", help="then kill 1 %% of the ranks per minute")
    parser.add_argument("--restart", action="store_true", help="then kill the coordinator and start it again")
    given = parser.parse_args()
    names = (
        *SHOWN,
        *SHOWN_TOO,
        *(SHOWN_OF_DEATHS if given.deaths else ()),
        *(SHOWN_OF_RESTART if given.restart else ()),
    )
    print("| " + " | ".join(names) + " |\n|" + "---|" * len(names))
    rows = []
    for num_ranks in given.ranks:
        row = measure(
            num_ranks,
            given.seconds,
            overlaps=not given.blocking,
            profile=given.profile,
            dies=given.deaths,
            restarts=given.restart,
        )
        print("| " + " | ".join(str(row.get(name)) for name in names) + " |", flush=True)
        rows.append(row)
    print("\n".join(map(json.dumps, rows)))


if __name__ == "__main__":
    main()
