"""How long a job takes to start on a host whose agent is there: from submission to the first committed round.

python benchmarks/job_start.py

In pairs with what a rank would do first if it were a fresh process: import torch, and what the first optimizer imports.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from programs import end, start_agent, start_coordinator

from elche_client import Client
from elche_client.events import RoundReport

JOB = """
import torch
from elche_worker import TrainingJob

job = TrainingJob(
    model=lambda: torch.nn.Linear(8, 1),
    optimizer=lambda model: torch.optim.AdamW(model.parameters()),
    dataset=lambda: torch.utils.data.TensorDataset(torch.randn(512, 8)),
    train_step=lambda model, batch: model(batch[0]).square().mean(),
    batch_size=16,
    epochs=1,
    anchor=3,
)
"""
FRESH = "import elche_worker.rank.main, torch; torch.optim.SGD([torch.zeros(1)])"


def start(client: Client, path: Path) -> float:
    started_s = time.perf_counter()
    elapsed_s = None
    for event in client.submit(path, num_ranks=2).watch():
        if isinstance(event, RoundReport) and elapsed_s is None:
            elapsed_s = time.perf_counter() - started_s
    assert elapsed_s is not None
    return elapsed_s


def fresh() -> float:
    started_s = time.perf_counter()
    both = [subprocess.Popen([sys.executable, "-c", FRESH]) for _ in range(2)]
    for one in both:
        one.wait()
    return time.perf_counter() - started_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.py"
        path.write_text(JOB, encoding="utf-8")
        coordinator, address = start_coordinator(Path(folder))
        agent = start_agent(Path(folder), address, "cpu,cpu")
        try:
            with Client(address, token="") as client:
                start(client, path)
                pairs = [(start(client, path), fresh()) for _ in range(options.pairs)]
        finally:
            agent.terminate()
            agent.wait()
            end(coordinator)
    starts, imports = zip(*pairs, strict=True)
    print(f"to the first round: {statistics.median(starts):.2f} s ({min(starts):.2f} to {max(starts):.2f})")
    print(f"only the imports of two fresh processes: {statistics.median(imports):.2f} s, {len(pairs)} pairs")


if __name__ == "__main__":
    main()
