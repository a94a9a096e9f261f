"""A small job with everything that dashboards show."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from elche_worker import TrainingJob


def dataset():
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(6_000, 20, generator=generator), torch.randint(3, (6_000,), generator=generator))


def train_step(model, batch):
    inputs, labels = batch
    return cross_entropy(model(inputs), labels)


def evaluate(model):
    return {"accuracy": 0.5}


job = TrainingJob(
    model=lambda: nn.Linear(20, 3),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    dataset=dataset,
    train_step=train_step,
    evaluate=evaluate,
    batch_size=16,
    epochs=100_000,
    max_grad_norm=1.0,
    max_batch_diff=50,
    checkpoint_every_epochs=1,
)
