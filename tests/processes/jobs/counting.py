"""A model whose parameters count: each time a sample is trained, its own parameter grows by one."""

import os
import time

import torch
from torch import nn
from torch.utils.data import IterableDataset

from elche_worker import Shards, TrainingJob

NUM_SAMPLES = 1003
KIND = os.environ.get("KIND", "map")
SIZES = [40, 100, 7, 256, 300, 100, 200]


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(NUM_SAMPLES))


class Stream(IterableDataset):
    """One shard, which says how long it is only by ending."""

    def __init__(self, start: int, size: int) -> None:
        self.start, self.size = start, size

    def __iter__(self):
        return iter(range(self.start, self.start + self.size))


def dataset():
    starts = [sum(SIZES[:index]) for index in range(len(SIZES))]
    if KIND == "shards":
        return Shards(SIZES, lambda index: range(starts[index], starts[index] + SIZES[index]))
    if KIND == "streams":
        return [Stream(start, size) for start, size in zip(starts, SIZES, strict=True)]
    return list(range(NUM_SAMPLES))


def train_step(model: Counts, batch: torch.Tensor) -> torch.Tensor:
    time.sleep(0.02)
    return -model.counts[batch].sum()


job = TrainingJob(
    model=Counts,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
    dataset=dataset,
    train_step=train_step,
    batch_size=16,
    epochs=5,
    anchor=3,
    merge="mean",
    drop_last=KIND == "drop_last",
    checkpoint_every_minutes=0.005,
)
