"""Kills the leading coordinator of a job that trains, beside one that stands by, and measures what that costs.

The job is that of outage.py: a batch is a sleep, 20 ms, and two ranks, 2.3:1. Prints a JSON object for each run:
seconds until the other one serves; the longest time from one batch of a rank to its next, in batches of that rank, in
the 5 s before and after the kill; batches made in the 5 s after it, as a fraction of those made in the 5 s before;
ranks that were started again; and whether every sample was committed exactly once.

    python benchmarks/standby.py --store postgresql://elche@db1/elche --times 10       # 6 minutes
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from statistics import median

import noted
import outage
from programs import free_port, start_agent

from elche_client import Client

WINDOW_S = 5.0
SERVES = "elche-coordinator listening on"


def start(folder: Path, name: str, port: int, store: str) -> "subprocess.Popen[bytes]":
    """A coordinator, which leads or stands by."""
    listen = ["--listen", f"127.0.0.1:{port}", "--http", "off", "--data", str(folder / name)]
    with (folder / f"{name}.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "elche_coordinator", *listen],
            stdout=log,
            stderr=log,
            env=os.environ | {"ELCHE_STORE": store},
        )


def await_text(path: Path, text: str) -> float:
    """Waits until the file has the text. The time then, in s."""
    while text not in path.read_text():
        time.sleep(0.005)
    return time.monotonic()


def longest(made: Sequence[tuple[int, float]], since_s: float, until_s: float) -> float:
    """The longest time between two batches of a rank, in that rank's usual time for one."""
    found = 0.0
    for pid in {pid for pid, _ in made}:
        times = sorted(at_s for one, at_s in made if one == pid)
        usual = median(later - earlier for earlier, later in pairwise(times))
        within = [later - earlier for earlier, later in pairwise(times) if later >= since_s and earlier <= until_s]
        found = max([found, *(step / usual for step in within)])
    return found


def measure(folder: Path, store: str) -> dict[str, object]:
    """One run with one kill."""
    notes = folder / "notes"
    notes.mkdir()
    rate = (1 + 1 / outage.SLOW) / outage.BATCH_S
    num_batches = round(rate * (4 * WINDOW_S + 6))
    ports = {"a": free_port(), "b": free_port()}
    addresses = ",".join(f"127.0.0.1:{port}" for port in ports.values())
    with ExitStack() as stack:
        leader = start(folder, "a", ports["a"], store)
        stack.callback(leader.kill)
        await_text(folder / "a.log", SERVES)
        stack.callback(start(folder, "b", ports["b"], store).kill)
        await_text(folder / "b.log", "waiting to take over")
        agent = start_agent(folder, addresses, "cpu,cpu")
        stack.callback(agent.wait)
        stack.callback(agent.kill)
        client = Client(addresses, reconnect_s=60)
        handle = client.submit(
            noted.__file__,
            num_ranks=2,
            slow_factors={1: outage.SLOW},
            environment=noted.environment(notes, outage.BATCH_S, num_batches),
        )
        while len(noted.all_batches(notes)) < (WINDOW_S + 3) * rate:
            time.sleep(0.1)
        killed_s = time.monotonic()
        leader.send_signal(signal.SIGKILL)
        serves_s = await_text(folder / "b.log", SERVES)
        result = client.job(handle.id).result()
    made = noted.all_batches(notes)
    before = sum(killed_s - WINDOW_S <= at_s < killed_s for _, at_s in made)
    after = sum(killed_s <= at_s < killed_s + WINDOW_S for _, at_s in made)
    return {
        "takeover_s": round(serves_s - killed_s, 3),
        "longest_before": round(longest(made, killed_s - WINDOW_S, killed_s), 2),
        "longest_after": round(longest(made, killed_s, killed_s + WINDOW_S), 2),
        "throughput_fraction": round(after / before, 4),
        "ranks_started_again": len({pid for pid, _ in made}) - 2,
        "exact": result.committed_samples == (num_batches * noted.BATCH_SIZE,) and len(made) == num_batches,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", required=True, help="URL of a PostgreSQL database")
    parser.add_argument("--times", type=int, default=1)
    options = parser.parse_args()
    for _ in range(options.times):
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measure(Path(folder), options.store)), flush=True)


if __name__ == "__main__":
    main()
