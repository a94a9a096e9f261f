"""Handwritten digits by a small net with BatchNorm, whose statistics are averaged; a fifth of them is held out."""

from typing import Any

import convergence_jobs as jobs
import torch
from quality._common import adam, fall
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from virtual_tasks import NUM_FOLDS, Task

from elche_worker import TrainingJob

NUM_COPIES, WIDTH = 8, 8


def build_model() -> nn.Module:
    torch.set_num_threads(1)
    layers: list[nn.Module] = []
    for num_inputs in (1, WIDTH):
        layers += [nn.Conv2d(num_inputs, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * WIDTH, 10))


def evaluate(model: nn.Module) -> dict[str, float]:
    _, _, images, labels = jobs.load_fold()
    return {"loss": cross_entropy(model(images), labels).item()}


def train_step(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def job(rate: float, seed: int, length: float, **fields: Any) -> TrainingJob:
    jobs.FOLD = seed % NUM_FOLDS
    jobs.load_fold.cache_clear()
    return TrainingJob(
        model=build_model,
        optimizer=adam(rate),
        dataset=lambda: jobs.build_digits(round(NUM_COPIES * length) or 1),
        train_step=train_step,
        evaluate=evaluate,
        schedule=fall,
        batch_size=32,
        epochs=1,
        **fields,
    )


TASK = Task(title="digits, BatchNorm averaged", rate=2e-2, job=job)
