"""What queued jobs cost a coordinator: bytes on disk and in memory, processor time per submission, of a list of all and
while nothing happens, and the time of a restart.

Nobody offers devices, so all jobs wait. The coordinator is killed and started again on the same folder; the restart is
over when a client's first question is answered. Prints a JSON object for each number of jobs.

    python benchmarks/many_jobs.py --jobs 10 10000      # two minutes
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

from programs import end, processor_s, resident_bytes, start_coordinator

from elche_client import Client

IDLE_S = 10.0
"""Seconds for which the coordinator has nothing to do but to look at its jobs."""
SOURCE = "# {number}\nprint()\n" + "# a line of the user's file\n" * 300


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def measure(num_jobs: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "job.py"
        coordinator, address = start_coordinator(folder)
        client = Client(address)
        before_s, before_bytes = processor_s(coordinator.pid), resident_bytes(coordinator.pid)
        for number in range(num_jobs):
            path.write_text(SOURCE.format(number=number % 100))  # a hundred files, each submitted again and again
            client.submit(path, num_ranks=1)
        spent_s = processor_s(coordinator.pid) - before_s
        time.sleep(2.0)  # by then the page's recorder has seen all
        idle_from_s = processor_s(coordinator.pid)
        time.sleep(IDLE_S)
        idle_s = processor_s(coordinator.pid) - idle_from_s
        client.jobs()
        list_s = processor_s(coordinator.pid) - idle_from_s - idle_s
        memory_bytes = resident_bytes(coordinator.pid) - before_bytes
        end(coordinator)
        killed_bytes, began_s = size_of(folder / "data"), time.perf_counter()
        coordinator, address = start_coordinator(folder)
        num_known = len(Client(address).jobs())
        restart_s = time.perf_counter() - began_s
        restart_processor_s = processor_s(coordinator.pid)
        coordinator.terminate()
        coordinator.wait()
        assert num_known == num_jobs
        return {
            "jobs": num_jobs,
            "bytes": killed_bytes,
            "bytes_per_job": round(killed_bytes / num_jobs),
            "submission_ms": round(1000 * spent_s / num_jobs, 2),
            "idle_fraction": round(idle_s / IDLE_S, 3),
            "list_ms": round(1000 * list_s),
            "memory_bytes_per_job": round(memory_bytes / num_jobs),
            "restart_s": round(restart_s, 2),
            "restart_processor_s": round(restart_processor_s, 2),
            "bytes_after_restart": size_of(folder / "data"),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, nargs="+", default=[10, 10_000])
    for num_jobs in parser.parse_args().jobs:
        print(json.dumps(measure(num_jobs)), flush=True)


if __name__ == "__main__":
    main()
