"""Gradients that the job's own step adds up over four batches (`manual_optimization`), beside the regression's data: a
round may come between the batches of one step.
"""

from dataclasses import replace

import torch
from quality import regression
from quality._common import Samples
from torch import Tensor, nn
from virtual_tasks import Task

from elche_worker import TrainingJob

EVERY = 4


class Counting(nn.Sequential):
    num_batches = 0


def build_model() -> nn.Module:
    torch.set_num_threads(1)
    return Counting(*regression.build_model())


def train_step(model: nn.Module, batch: Samples, optimizer: torch.optim.Optimizer) -> Tensor:
    assert isinstance(model, Counting)
    loss = regression.loss(model, batch)
    (loss / EVERY).backward()
    model.num_batches += 1
    if model.num_batches % EVERY == 0:
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


def job(rate: float, seed: int, length: float) -> TrainingJob:
    as_it_is = regression.TASK.job(rate, seed, length)
    return replace(as_it_is, model=build_model, train_step=train_step, manual_optimization=True, batch_size=8)


TASK = Task(title="accumulation by hand", rate=3e-2, job=job)
