"""Like facebookresearch/dlrm: sparse embeddings of categories, two dense networks, their pairwise dot products.
Tables are stepped by SparseAdam and the networks by Adam, as a list of optimizers; rounds average the tables whole.
Clicks that a hidden model of the same kind draws stand for Criteo's.
"""

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.optim import Adam, Optimizer, SparseAdam
from torch.utils.data import TensorDataset

from elche_worker import TrainingJob

TABLES, DIM, NUM_DENSE = (500, 200, 50), 8, 6


class DLRM(nn.Module):
    """Numbers (N, 6) and categories (N, 3) to logits of a click (N,)."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(size, DIM, mode="sum", sparse=True) for size in TABLES)
        self.bottom = nn.Sequential(nn.Linear(NUM_DENSE, 32), nn.ReLU(), nn.Linear(32, DIM), nn.ReLU())
        num_pairs = (len(TABLES) + 1) * len(TABLES) // 2
        self.top = nn.Sequential(nn.Linear(DIM + num_pairs, 32), nn.ReLU(), nn.Linear(32, 1))
        self.register_buffer("pairs", torch.tril_indices(len(TABLES) + 1, len(TABLES) + 1, -1), persistent=False)

    def forward(self, dense: Tensor, categories: Tensor) -> Tensor:
        x = self.bottom(dense)
        rows = [table(column.unsqueeze(1)) for table, column in zip(self.tables, categories.unbind(1), strict=True)]
        features = torch.stack([x, *rows], dim=1)  # (N, 4, 8)
        products = features @ features.transpose(1, 2)
        interactions = products[:, self.pairs[0], self.pairs[1]]
        logits: Tensor = self.top(torch.cat([x, interactions], dim=1)).squeeze(1)
        return logits


@cache
def load_clicks(seed: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers, categories, few of them frequent, and clicks; what makes people click is the same for each seed."""
    hidden, source = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)
    tastes = [torch.randn(size, generator=hidden) for size in TABLES]
    weights = 0.5 * torch.randn(NUM_DENSE, generator=hidden)
    dense = torch.randn(count, NUM_DENSE, generator=source)
    categories = torch.stack([(torch.rand(count, generator=source) ** 3 * size).long() for size in TABLES], dim=1)
    of_columns = [taste[column] for taste, column in zip(tastes, categories.unbind(1), strict=True)]
    logits = dense @ weights + of_columns[0] + of_columns[1] * of_columns[2]
    return dense, categories, (torch.rand(count, generator=source) < logits.sigmoid()).float()


def build_optimizers(model: DLRM) -> list[Optimizer]:
    networks = [*model.bottom.parameters(), *model.top.parameters()]
    return [SparseAdam(list(model.tables.parameters()), lr=1e-2), Adam(networks, lr=3e-3)]


def train_step(model: DLRM, batch: list[Tensor]) -> Tensor:
    dense, categories, clicks = batch
    return binary_cross_entropy_with_logits(model(dense, categories), clicks)


def eval_step(model: DLRM, batch: list[Tensor]) -> dict[str, Tensor]:
    dense, categories, clicks = batch
    logits = model(dense, categories)
    is_right = ((logits > 0) == (clicks > 0.5)).float()
    return {"log_loss": binary_cross_entropy_with_logits(logits, clicks), "accuracy": is_right.mean()}


job = TrainingJob(
    model=DLRM,
    optimizer=build_optimizers,
    dataset=lambda: TensorDataset(*load_clicks(1, 40_000)),
    train_step=train_step,
    eval_dataset=lambda: TensorDataset(*load_clicks(2, 4_000)),
    eval_step=eval_step,
    batch_size=128,
    epochs=4,
)
