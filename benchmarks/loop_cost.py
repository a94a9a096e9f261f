"""What the training loop costs over a bare PyTorch loop: one rank, the same model and data, about 20 ms a batch.

Runs pairs, one after the other; prints a JSON object. `cost_fraction` is the median over pairs of elche's time per
batch over the bare loop's, less 1.

    python benchmarks/loop_cost.py             # five pairs, about three minutes
    python benchmarks/loop_cost.py --device    # the same; the host sleeps out the 20 ms, as it does beside a GPU
    python benchmarks/loop_cost.py --timeline  # elche with a timeline against elche without one
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import torch
from padded import wait_until
from programs import elche_run
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from elche_worker import TrainingJob

WIDTH = 2048
BATCH_SIZE = 64
NUM_BATCHES = int(os.environ.get("ELCHE_BATCHES", "400"))
WAITS_MS = float(os.environ.get("ELCHE_WAITS_MS", "0"))
"""How long the host waits for the device in each batch; 0: it computes itself."""


def build_dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    num_samples = NUM_BATCHES * BATCH_SIZE
    inputs = torch.randn(num_samples, 64, generator=generator)
    return TensorDataset(inputs, torch.randint(10, (num_samples,), generator=generator))


def build_model() -> nn.Module:
    torch.set_num_threads(1)
    width = 64 if WAITS_MS else WIDTH
    hidden = [nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)]
    return nn.Sequential(*hidden)


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def train_step(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    end_s = time.perf_counter() + WAITS_MS / 1000
    inputs, labels = batch
    if WAITS_MS:
        wait_until(end_s)
    return nn.functional.cross_entropy(model(inputs), labels)


job = TrainingJob(
    model=build_model,
    optimizer=build_optimizer,
    dataset=build_dataset,
    train_step=train_step,
    batch_size=BATCH_SIZE,
    epochs=1,
)


def bare_ms() -> float:
    """Milliseconds per batch of a loop as one writes it without elche."""
    model, dataset = build_model(), build_dataset()
    optimizer = build_optimizer(model)
    started_s = time.perf_counter()
    for batch in DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True):
        loss = train_step(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
    return (time.perf_counter() - started_s) / NUM_BATCHES * 1000


def elche_ms(*more: str) -> float:
    """Milliseconds per batch of one rank, rounds and reports included."""
    result, _ = elche_run(__file__, "--ranks", "1", "--device", "cpu", *more)
    return float(result["duration_s"]) / NUM_BATCHES * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5, help="how many pairs (default 5)")
    parser.add_argument("--device", action="store_true", help="the host waits for 20 ms instead of computing")
    parser.add_argument("--timeline", action="store_true", help="what recording a timeline costs")
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.bare:
        print(bare_ms())
        return
    if arguments.device:
        os.environ["ELCHE_WAITS_MS"] = "20"
    pairs = []
    for _ in range(arguments.pairs):
        if arguments.timeline:
            pairs.append((elche_ms(), elche_ms("--timeline", "true")))
        else:
            bare = subprocess.run([sys.executable, __file__, "--bare"], stdout=subprocess.PIPE, check=True)
            pairs.append((float(bare.stdout), elche_ms()))
        print(f"without {pairs[-1][0]:.3f} ms, with {pairs[-1][1]:.3f} ms", file=sys.stderr)
    cost = statistics.median(ours / bare - 1 for bare, ours in pairs)
    print(json.dumps({"pairs_ms": pairs, "cost_fraction": cost}))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
