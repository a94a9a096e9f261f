"""A job whose batches last as long as they are told to, per rank: what is left over is the cost of averaging.

ELCHE_PAD_MS      duration of a batch on each rank, by default "25,57.5"
ELCHE_NUM_BATCHES batches in the one epoch, by default 1200
ELCHE_SWAP_FILE   a path; once a file is there, the ranks' durations are reversed
ELCHE_SWAP_AT_S   seconds from the file's last change until then, by default 0
ELCHE_AVERAGING   "blocking" (the default) or "overlapped"
"""

import os
import time

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from elche_worker import TrainingJob

BATCH_SIZE = 64
NUM_FEATURES = 32
NUM_CLASSES = 10
SPIN_S = 0.0003
"""The end of a wait that is not slept, because the kernel wakes a sleeper late."""

NUM_BATCHES = int(os.environ.get("ELCHE_NUM_BATCHES", "1200"))
PAD_MS = [float(pad_ms) for pad_ms in os.environ.get("ELCHE_PAD_MS", "25,57.5").split(",")]
SWAP_FILE = os.environ.get("ELCHE_SWAP_FILE")
SWAP_AT_S = float(os.environ.get("ELCHE_SWAP_AT_S", "0"))


def build_dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    num_samples = NUM_BATCHES * BATCH_SIZE
    inputs = torch.randn(num_samples, NUM_FEATURES, generator=generator)
    return TensorDataset(inputs, torch.randint(NUM_CLASSES, (num_samples,), generator=generator))


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(NUM_FEATURES, 64), nn.ReLU(), nn.Linear(64, NUM_CLASSES))


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def train_step(model: nn.Module, batch: list[Tensor]) -> Tensor:
    end_s = time.perf_counter() + _pad_ms() / 1000
    inputs, labels = batch
    loss = cross_entropy(model(inputs), labels)
    wait_until(end_s)
    return loss


def wait_until(end_s: float) -> None:
    """Returns at `end_s` of `time.perf_counter`, to a few microseconds."""
    time.sleep(max(0.0, end_s - SPIN_S - time.perf_counter()))
    while time.perf_counter() < end_s:
        pass


def _pad_ms() -> float:
    by_rank = PAD_MS[::-1] if _swapped() else PAD_MS
    return by_rank[int(os.environ.get("ELCHE_RANK", "0")) % len(by_rank)]


def _swapped() -> bool:
    if SWAP_FILE is None or not os.path.exists(SWAP_FILE):
        return False
    return time.time() >= os.path.getmtime(SWAP_FILE) + SWAP_AT_S


job = TrainingJob(
    model=build_model,
    optimizer=build_optimizer,
    dataset=build_dataset,
    train_step=train_step,
    batch_size=BATCH_SIZE,
    epochs=1,
    averaging=os.environ.get("ELCHE_AVERAGING", "blocking"),
)
