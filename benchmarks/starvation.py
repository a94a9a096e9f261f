"""How long a device waits for data: fetching a batch takes half of its computing, by one worker process.

The device is slept out (20 ms a batch). Runs `elche run`; prints a JSON object: the part of the time, after the first
round, that was neither computing nor averaging.

    python benchmarks/starvation.py                # about a minute
"""

import json
import os
import time

import torch
from programs import elche_run
from torch import nn

from elche_worker import TrainingJob

BATCH_MS = 20.0
FETCH_FRACTION = float(os.environ.get("ELCHE_FETCH_FRACTION", "0.5"))
BATCH_SIZE = 16
NUM_BATCHES = 2000


class Slow(torch.utils.data.Dataset[torch.Tensor]):
    """Each sample takes its part of half a batch's time to fetch."""

    def __len__(self) -> int:
        return NUM_BATCHES * BATCH_SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(FETCH_FRACTION * BATCH_MS / 1000 / BATCH_SIZE)
        return torch.full((8,), float(index % 7))


def train_step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    time.sleep(BATCH_MS / 1000)
    return model(batch).square().mean()


job = TrainingJob(
    model=lambda: nn.Linear(8, 1),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.001),
    dataset=Slow,
    train_step=train_step,
    batch_size=BATCH_SIZE,
    epochs=1,
    num_workers=1,
)


def main() -> None:
    result, record = elche_run(__file__, "--ranks", "1", "--device", "cpu")
    (rank,) = result["ranks"]
    first = next(report for report in record["round_reports"] if report["samples"])
    busy_s = (rank["ms_per_batch"] * rank["batches"] - first["rank_compute_ms"][0]) / 1000 + rank["waited_s"]
    total_s = result["duration_s"] - first["duration_s"]
    print(json.dumps({"batches": rank["batches"], "total_s": total_s, "starved_fraction": 1 - busy_s / total_s}))


if __name__ == "__main__":
    main()
