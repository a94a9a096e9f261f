"""A linear classifier with a margin (hinge loss, SGD) on separable data: late batches mostly have no gradient."""

import torch
from quality._common import Samples, job_of, sgd
from torch import Tensor, nn
from virtual_tasks import Task

NUM_INPUTS, MARGIN = 30, 1.0
NUM_SAMPLES, NUM_HELD_OUT = 4800, 8000


def samples(seed: int) -> Samples:
    noise = torch.Generator().manual_seed(seed)
    x = torch.randn(24_000, NUM_INPUTS, generator=noise)
    score = (x @ torch.randn(NUM_INPUTS, 1, generator=noise)).squeeze(1)
    is_far = score.abs() > MARGIN
    num = NUM_SAMPLES + NUM_HELD_OUT
    return x[is_far][:num], score[is_far][:num].sign()


def loss(model: nn.Module, batch: Samples) -> Tensor:
    return torch.relu(1 - batch[1] * model(batch[0]).squeeze(1)).mean()


TASK = Task(
    title="hinge loss, separable",
    rate=1.0,
    job=job_of(samples, NUM_HELD_OUT, model=lambda: nn.Linear(NUM_INPUTS, 1), optimizer=sgd, loss=loss, batch_size=8),
    is_share=True,
)
