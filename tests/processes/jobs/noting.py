"""A linear regression whose ranks note what they are given; tests add lines at its end, which replace parts of it."""

# ruff: noqa: F401 - what is imported here and not used is for the lines that tests add
import dataclasses
import json
import math
import os
import time
from pathlib import Path

import torch
from torch import nn

from elche_worker import Shards, TrainingJob, record_scalar

NUM_SAMPLES, BATCH_SIZE, EPOCHS, LR = 200, 16, 4, 0.1
OPTIMIZERS = []


def note(kind, *values):
    with Path(__file__).with_suffix(f".rank-{os.environ.get('ELCHE_RANK', '0')}").open("a") as notes:
        notes.write(json.dumps([kind, *values]) + "\n")


def weights(model):
    return {name: tensor.flatten().tolist() for name, tensor in model.state_dict().items()}


class Points(torch.utils.data.Dataset):
    def __init__(self, seed=1, size=None):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(size or NUM_SAMPLES, 4, generator=generator)
        self.y = self.x.sum(dim=1, keepdim=True)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index], index


def optimizer(model):
    OPTIMIZERS.append(torch.optim.SGD(model.parameters(), lr=LR))
    return OPTIMIZERS[-1]


def train_step(model, batch):
    x, y, indices = batch
    note("batch", indices.tolist(), OPTIMIZERS[-1].param_groups[0]["lr"] if OPTIMIZERS else None)
    time.sleep(0.002)
    return nn.functional.mse_loss(model(x), y)


job = TrainingJob(
    model=lambda: nn.Linear(4, 1),
    optimizer=optimizer,
    dataset=Points,
    train_step=train_step,
    batch_size=BATCH_SIZE,
    epochs=EPOCHS,
    anchor=2,
)
