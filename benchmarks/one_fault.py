"""One fault after the other in a run of three ranks, SIGKILL of one, or SIGSTOP and later SIGCONT: what does it cost?

A batch is a sleep (noted.py). Prints a JSON object with median and worst of: the longest gap
between two batches of a survivor, when the rank was lost or left out, when the next round was committed, and when the
rank trained again, after its death or after SIGCONT.

    python benchmarks/one_fault.py                # five kills: a minute
    python benchmarks/one_fault.py --fault stop
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import noted
from programs import spread

RANKS = 3
BATCH_S = 0.025
BATCHES_PER_EPOCH = 200
EVERY_S = 8.0
"""Between two faults."""
STOPPED_S = 4.0
SETTLED_S = 1.0
"""How long after the rank's return a gap of the others still counts."""


class Run:
    """The run, whose events come with the time at which they were read."""

    def __init__(self, folder: Path, seconds: float, backend: str) -> None:
        epochs = max(1, round(seconds * RANKS / BATCH_S / BATCHES_PER_EPOCH))
        command = [
            sys.executable,
            "-m",
            "elche_client",
            "run",
            noted.__file__,
            "--events",
            "--out",
            str(folder / "out"),
        ]
        command += ["--ranks", str(RANKS), "--device", "cpu", "--no-logs", "--backend", backend]
        command += ["--epochs", str(epochs)]
        for name, value in noted.environment(folder, BATCH_S, BATCHES_PER_EPOCH).items():
            command += ["--env", f"{name}={value}"]
        self.folder = folder
        self.events: list[tuple[float, dict[str, Any]]] = []
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self._reading = threading.Thread(target=self._read)
        self._reading.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.append((time.monotonic(), json.loads(line)))

    def wait(self) -> dict[str, Any]:
        self.process.wait()
        self._reading.join()
        return self.events[-1][1]

    def first_after(self, kind: str, at_s: float) -> float | None:
        """Seconds from a moment to the first event of a kind."""
        later = [event_s for event_s, event in self.events if event["event"] == kind and event_s > at_s]
        return later[0] - at_s if later else None


def strike(run: Run, fault: str, rank: int) -> tuple[int, float]:
    """The process that is hit, and when."""
    pid = noted.batches(run.folder, rank)[-1][0]
    at_s = time.monotonic()
    os.kill(pid, signal.SIGSTOP if fault == "stop" else signal.SIGKILL)
    if fault == "stop":
        time.sleep(STOPPED_S)
        os.kill(pid, signal.SIGCONT)
    return pid, at_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", choices=["kill", "stop"], default="kill")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    dice = random.Random(options.seed)
    every_s = EVERY_S + (STOPPED_S if options.fault == "stop" else 0.0)
    with tempfile.TemporaryDirectory() as name:
        run = Run(Path(name), (options.times + 0.5) * every_s, options.backend)
        while any(len(noted.batches(run.folder, rank)) < 100 for rank in range(RANKS)):
            time.sleep(0.1)
        faults = []
        for _ in range(options.times):
            rank = dice.randrange(RANKS)
            faults.append((rank, *strike(run, options.fault, rank)))
            time.sleep(max(0.0, faults[-1][2] + every_s * dice.uniform(0.9, 1.1) - time.monotonic()))
        result = run.wait()
        back, gaps = [], []
        for rank, pid, at_s in faults:
            later = [batch_s for one, batch_s in noted.batches(run.folder, rank) if batch_s > at_s and one != pid]
            from_s = at_s + (STOPPED_S if options.fault == "stop" else 0.0)
            back.append(later[0] - from_s if later else None)
            others, until_s = set(range(RANKS)) - {rank}, from_s + (back[-1] or 0.0) + SETTLED_S
            gaps.append(noted.longest_gap_s(run.folder, others, pid, at_s, until_s))
        figures = {
            "state": result["state"],
            "faults": len(faults),
            "samples_exact": set(result["committed_samples"]) == {BATCHES_PER_EPOCH * noted.BATCH_SIZE},
            "longest_gap_of_survivors": spread(gaps),
            "left_out_or_lost_after": spread([run.first_after("membership", at_s) for _, _, at_s in faults]),
            "next_round_committed_after": spread([run.first_after("round", at_s) for _, _, at_s in faults]),
            "trains_again_after": spread(back),
        }
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
