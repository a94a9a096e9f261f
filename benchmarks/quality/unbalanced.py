"""Two classes, one of which has 2 % of the samples: most batches have none of it, and then long steps."""

import torch
from quality._common import Samples, job_of, momentum_sgd
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from virtual_tasks import Task

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


TASK = Task(
    title="unbalanced classes",
    rate=0.1,
    job=job_of(samples, NUM_HELD_OUT, model=build_model, optimizer=momentum_sgd, loss=loss, batch_size=16),
)
