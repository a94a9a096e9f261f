"""Two classes, one of which has 2 % of the samples: most batches have none of it, and then long steps."""

import torch
from quality._common import Samples, job_of, sgd
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from virtual_tasks import Task

from elche_worker import TrainingJob

NUM_INPUTS, SHARE = 12, 0.02
NUM_SAMPLES, NUM_HELD_OUT = 6400, 10_000


def samples(seed: int) -> Samples:
    noise = torch.Generator().manual_seed(seed)
    rare = (torch.rand(NUM_SAMPLES + NUM_HELD_OUT, generator=noise) < SHARE).float()
    x = torch.randn(len(rare), NUM_INPUTS, generator=noise)
    direction = torch.randn(NUM_INPUTS, generator=noise)
    return x + 2.5 * rare[:, None] * direction / direction.norm(), rare


def loss(model: nn.Module, batch: Samples) -> Tensor:
    return binary_cross_entropy_with_logits(model(batch[0]).squeeze(1), batch[1])


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(NUM_INPUTS, 24), nn.ReLU(), nn.Linear(24, 1))


def job(rate: float, seed: int, length: float) -> TrainingJob:
    return job_of(
        samples(seed),
        num_held_out=NUM_HELD_OUT,
        length=length,
        model=build_model,
        optimizer=sgd(rate, momentum=0.9),
        loss=loss,
        batch_size=16,
    )


TASK = Task(title="unbalanced classes", metric="loss", rate=0.1, job=job, grows=True)
