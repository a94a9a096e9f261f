"""Shards that are sorted by label: each rank reads one label at a time."""

from functools import partial

import torch
from quality._common import Samples, job_of, sgd
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from virtual_ranks import InShards
from virtual_tasks import Task

from elche_worker import TrainingJob

NUM_LABELS, NUM_INPUTS, SPREAD = 6, 10, 1.2
SHARD_SIZE, NUM_SHARDS = 64, 96
NUM_HELD_OUT = 4000


def samples(seed: int) -> Samples:
    """Points around one centre of each label; those to train on are sorted in shards."""
    noise = torch.Generator().manual_seed(seed)
    centres = torch.randn(NUM_LABELS, NUM_INPUTS, generator=noise)
    sorted_labels = (torch.arange(SHARD_SIZE * NUM_SHARDS) // SHARD_SIZE) % NUM_LABELS
    labels = torch.cat([sorted_labels, torch.randint(NUM_LABELS, (NUM_HELD_OUT,), generator=noise)])
    return centres[labels] + SPREAD * torch.randn(len(labels), NUM_INPUTS, generator=noise), labels


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(NUM_INPUTS, 32), nn.ReLU(), nn.Linear(32, NUM_LABELS))


def loss(model: nn.Module, batch: Samples) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def job(rate: float, seed: int, length: float) -> TrainingJob:
    num_shards = round(NUM_SHARDS * length)
    dataset = partial(InShards, [SHARD_SIZE] * num_shards)
    of_shards = job_of(
        samples, NUM_HELD_OUT, model=build_model, optimizer=sgd, loss=loss, dataset=dataset, batch_size=16
    )
    return of_shards(rate, seed, num_shards / NUM_SHARDS)


TASK = Task(title="label-sorted shards", rate=0.1, job=job)
