"""A job whose batches last as long as its host is told, with a model as large as it is told: what `slow_link.py` runs.

ELCHE_PAD_MS       duration of a batch on this host
ELCHE_NUM_BATCHES  batches in the one epoch
ELCHE_MODEL_MB     parameters, in 10^6 bytes
ELCHE_AVERAGING    "blocking" or "overlapped"
ELCHE_COMPRESS     as `compress`, or empty
"""

import os
import time

import torch
from padded import build_optimizer, wait_until
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from elche_worker import TrainingJob

BATCH_SIZE = 64
NUM_FEATURES = 64
NUM_CLASSES = 10

PAD_S = float(os.environ.get("ELCHE_PAD_MS", "25")) / 1000
NUM_SAMPLES = int(os.environ.get("ELCHE_NUM_BATCHES", "1200")) * BATCH_SIZE
NUM_ROWS = round(float(os.environ.get("ELCHE_MODEL_MB", "2.5")) * 1e6 / 4 / NUM_FEATURES)
"""Of the embedding, which has nearly all parameters: large, and cheap to train."""


def build_dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(NUM_ROWS, (NUM_SAMPLES,), generator=generator)
    return TensorDataset(words, torch.randint(NUM_CLASSES, (NUM_SAMPLES,), generator=generator))


def build_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(NUM_ROWS, NUM_FEATURES), nn.Linear(NUM_FEATURES, NUM_CLASSES))


def train_step(model: nn.Module, batch: list[Tensor]) -> Tensor:
    end_s = time.perf_counter() + PAD_S
    words, labels = batch
    loss = cross_entropy(model(words), labels)
    wait_until(end_s)
    return loss


job = TrainingJob(
    model=build_model,
    optimizer=build_optimizer,
    dataset=build_dataset,
    train_step=train_step,
    batch_size=BATCH_SIZE,
    epochs=1,
    averaging=os.environ.get("ELCHE_AVERAGING", "blocking"),
    compress=os.environ.get("ELCHE_COMPRESS") or None,
)
