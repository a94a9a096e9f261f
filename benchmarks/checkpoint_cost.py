"""What checkpoints cost: a 500 MB model on one rank, a checkpoint every 30 s against none, in pairs.

The device is slept out (20 ms a batch), as beside a GPU: what is measured is what keeps the host from giving it work.

    python benchmarks/checkpoint_cost.py            # two pairs, about six minutes
"""

import argparse
import json
import statistics
import sys
import time

import torch
from programs import elche_run
from torch import nn

from elche_worker import TrainingJob

BATCH_MS = 20.0
NUM_BATCHES = 3600
MODEL_MB = 500


class Large(nn.Module):
    """Mostly weight to carry; the small layer is what is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(MODEL_MB * 250_000))
        self.small = nn.Linear(8, 1)


def train_step(model: Large, batch: torch.Tensor) -> torch.Tensor:
    time.sleep(BATCH_MS / 1000)
    return model.small(batch).square().mean()


job = TrainingJob(
    model=Large,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
    dataset=lambda: torch.utils.data.TensorDataset(torch.randn(NUM_BATCHES * 8, 8)),
    train_step=lambda model, batch: train_step(model, batch[0]),
    batch_size=8,
    epochs=1,
)


def samples_per_s(minutes: str) -> tuple[float, int]:
    """Throughput of one run, and how many checkpoints it kept."""
    result, _ = elche_run(__file__, "--ranks", "1", "--device", "cpu", "--checkpoint-every-minutes", minutes)
    return float(result["samples_per_s"]), len(result["checkpoints"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=2, help="how many pairs (default 2)")
    pairs = []
    for _ in range(parser.parse_args().pairs):
        (without, none), (with_checkpoints, some) = samples_per_s("none"), samples_per_s("0.5")
        assert none == 0
        assert some >= 2
        pairs.append((without, with_checkpoints))
        print(f"without {without:.1f}, with {some} checkpoints {with_checkpoints:.1f} samples/s", file=sys.stderr)
    cost = statistics.median(1 - ours / bare for bare, ours in pairs)
    print(json.dumps({"pairs_samples_per_s": pairs, "cost_fraction": cost}))


if __name__ == "__main__":
    main()
