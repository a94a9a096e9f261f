"""Matrix factorisation: embeddings of users and items, whose rows get sparse gradients, with SGD."""

import torch
from quality._common import Samples, job_of, sgd
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from virtual_tasks import Task

NUM_USERS, NUM_ITEMS, RANK = 120, 100, 3
NUM_RATINGS, NUM_HELD_OUT = 8000, 3000
NOISE = 0.3


class Factors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(NUM_USERS, RANK, sparse=True)
        self.items = nn.Embedding(NUM_ITEMS, RANK, sparse=True)
        for one in (self.users, self.items):
            nn.init.normal_(one.weight, std=0.5)

    def forward(self, users_n: Tensor, items_n: Tensor) -> Tensor:
        return (self.users(users_n) * self.items(items_n)).sum(1)


def ratings(seed: int) -> Samples:
    """Users, items and ratings, each pair once."""
    noise = torch.Generator().manual_seed(seed)
    users, items = torch.randn(NUM_USERS, RANK, generator=noise), torch.randn(NUM_ITEMS, RANK, generator=noise)
    chosen = torch.randperm(NUM_USERS * NUM_ITEMS, generator=noise)[: NUM_RATINGS + NUM_HELD_OUT]
    user, item = chosen // NUM_ITEMS, chosen % NUM_ITEMS
    exact = (users[user] * items[item]).sum(1)
    return user, item, exact + NOISE * torch.randn(len(exact), generator=noise)


def loss(model: nn.Module, batch: Samples) -> Tensor:
    return mse_loss(model(batch[0], batch[1]), batch[2])


TASK = Task(
    title="matrix factorisation, sparse rows",
    rate=4.0,
    job=job_of(ratings, NUM_HELD_OUT, model=Factors, optimizer=sgd, loss=loss, batch_size=64, epochs=3),
    rates=(0.5, 0.75, 1.0),
)
