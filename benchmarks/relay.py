"""Averaging through the coordinator: its memory, and how long other jobs' messages wait meanwhile.

Four ranks with a model of 100 MB average through the coordinator (backend "cpu"), again and again, while two ranks of
another job train with a round after every batch. Prints a JSON object: the coordinator's resident memory before and its
peak during the averaging, in models; how long each round took; and the time from a rank's asking the coordinator to
its answer, as a rank of a third job would see it, before and during.

    python benchmarks/relay.py
"""

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path

from programs import end, start_agent, start_coordinator

from elche_client import Client
from elche_client.events import RoundReport

MODEL_MB = 100
LARGE = """
import os, time
import torch
from torch import nn
from elche_worker import TrainingJob

class Large(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.Linear(4, 1)
        self.rest = nn.Parameter(torch.zeros({values}))
    def forward(self, x):
        return self.used(x) + self.rest[0]

def train_step(model, batch):
    time.sleep(0.02)
    return model(batch[0]).square().mean()

job = TrainingJob(
    model=Large,
    optimizer=lambda model: torch.optim.SGD(model.used.parameters(), lr=0.01),
    dataset=lambda: torch.utils.data.TensorDataset(torch.randn(4 * 8 * {batches}, 4)),
    train_step=train_step, batch_size=8, epochs=1, anchor=10, max_anchor=10, divergence_threshold=0, backend="cpu",
)
"""
SMALL = """
import time
import torch
from torch import nn
from elche_worker import TrainingJob

def train_step(model, batch):
    time.sleep(0.02)
    return model(batch[0]).square().mean()

job = TrainingJob(
    model=lambda: nn.Linear(4, 1),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
    dataset=lambda: torch.utils.data.TensorDataset(torch.randn(100_000, 4)),
    train_step=train_step, batch_size=8, epochs=1, policy="sync",
)
"""


class Probe:
    """Asks the coordinator a small question a hundred times a second, and notes how long each answer took."""

    def __init__(self, address: str) -> None:
        self._client = Client(address)
        self._job_id = ""
        self.latencies_ms: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def take(self) -> dict[str, float]:
        """Median, 99th percentile and maximum since the last call."""
        latencies_ms, self.latencies_ms = sorted(self.latencies_ms), []
        at = {"p50_ms": 0.50, "p99_ms": 0.99, "max_ms": 1.0}
        return {name: latencies_ms[min(len(latencies_ms) - 1, int(p * len(latencies_ms)))] for name, p in at.items()}

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.01):
            started_s = time.perf_counter()
            self._client.jobs()
            self.latencies_ms.append((time.perf_counter() - started_s) * 1000)


def memory_mb(pid: int, what: str) -> float:
    """VmRSS or VmHWM of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(float(line.split()[1]) for line in status.splitlines() if line.startswith(what)) / 1024


def measure(folder: Path, num_rounds: int) -> dict[str, object]:
    """Starts everything, and measures."""
    os.environ["OMP_NUM_THREADS"] = "1"
    coordinator, address = start_coordinator(folder)
    agent = start_agent(folder, address, ",".join(["cpu"] * 6))
    try:
        client = Client(address)
        (folder / "small.py").write_text(SMALL)
        values, batches = MODEL_MB * 250_000, 10 * num_rounds
        (folder / "large.py").write_text(LARGE.format(values=values, batches=batches))
        other = client.submit(folder / "small.py", num_ranks=2)
        for event in other.watch():
            if isinstance(event, RoundReport) and event.round > 50:
                break
        idle_mb = memory_mb(coordinator.pid, "VmRSS")
        probe = Probe(address)
        time.sleep(10)
        before = probe.take()
        rounds = []
        for event in client.submit(folder / "large.py", num_ranks=4).watch():
            if isinstance(event, RoundReport):
                if event.round == 1:
                    probe.take()
                rounds.append(event.sync_ms)
        during = probe.take()
        probe.stop()
        peak_mb = memory_mb(coordinator.pid, "VmHWM")
        other.cancel()
    finally:
        agent.terminate()
        agent.wait()
        end(coordinator)
    return {
        "model_mb": MODEL_MB,
        "rounds": len(rounds),
        "round_s": statistics.median(rounds[1:]) / 1000,
        "idle_mb": idle_mb,
        "peak_mb": peak_mb,
        "above_idle_models": (peak_mb - idle_mb) / MODEL_MB,
        "answers_before": before,
        "answers_during": during,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="how many rounds (default 10)")
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(Path(folder), parser.parse_args().rounds), indent=1))


if __name__ == "__main__":
    main()
