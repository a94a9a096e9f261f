"""Contrastive learning with a queue of negatives and an encoder that follows slowly (as in MoCo). The queue is a
buffer, and the parameters of the slow encoder are frozen, so that both come from one rank in each round.
"""

import copy

import torch
from quality._common import Samples, job_of, momentum_sgd
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from virtual_tasks import Task

NUM_INPUTS, NUM_LATENT, NUM_FEATURES = 24, 4, 8
QUEUE, FOLLOWS, TEMPERATURE = 256, 0.97, 0.2
BATCH_SIZE = 16
NUM_SAMPLES, NUM_HELD_OUT = 6400, 512


class Contrast(nn.Module):
    queue: Tensor
    next_place: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(NUM_INPUTS, 48), nn.ReLU(), nn.Linear(48, NUM_FEATURES))
        self.slow_encoder = copy.deepcopy(self.encoder).requires_grad_(False)
        self.register_buffer("queue", normalize(torch.randn(QUEUE, NUM_FEATURES), dim=1))
        self.register_buffer("next_place", torch.zeros((), dtype=torch.long))

    @torch.no_grad()
    def follow(self) -> None:
        for slow, fast in zip(self.slow_encoder.parameters(), self.encoder.parameters(), strict=True):
            slow.lerp_(fast, 1 - FOLLOWS)

    @torch.no_grad()
    def enqueue(self, keys_nc: Tensor) -> None:
        places = (int(self.next_place) + torch.arange(len(keys_nc))) % QUEUE
        self.queue[places] = keys_nc
        self.next_place.add_(len(keys_nc)).remainder_(QUEUE)


def samples(seed: int) -> Samples:
    """Two views of the same few latent numbers, among noise that differs."""
    noise = torch.Generator().manual_seed(seed)
    num = NUM_SAMPLES + NUM_HELD_OUT
    latent = torch.randn(num, NUM_LATENT, generator=noise)
    mixing = torch.randn(NUM_LATENT, NUM_INPUTS, generator=noise)
    first, second = (torch.tanh(latent @ mixing) + 0.5 * torch.randn(num, NUM_INPUTS, generator=noise) for _ in "ab")
    return first, second


def loss(model: nn.Module, batch: Samples) -> Tensor:
    assert isinstance(model, Contrast)
    model.follow()
    queries = normalize(model.encoder(batch[0]), dim=1)
    with torch.no_grad():
        keys = normalize(model.slow_encoder(batch[1]), dim=1)
    logits = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ model.queue.clone().T], 1) / TEMPERATURE
    model.enqueue(keys)
    return cross_entropy(logits, torch.zeros(len(queries), dtype=torch.long))


def held_out_loss(model: nn.Module, batch: Samples) -> Tensor:
    """Of finding each sample's other view among all."""
    assert isinstance(model, Contrast)
    features = [normalize(model.encoder(view), dim=1) for view in batch]
    return cross_entropy(features[0] @ features[1].T / TEMPERATURE, torch.arange(len(batch[0])))


TASK = Task(
    title="contrastive, with a queue",
    rate=0.03,
    job=job_of(
        samples,
        NUM_HELD_OUT,
        model=Contrast,
        optimizer=momentum_sgd,
        loss=loss,
        metric=held_out_loss,
        batch_size=BATCH_SIZE,
    ),
)
