"""Like tkipf/pygcn: two graph convolutions, trained on a few labelled nodes of one graph. The graph is not a sample,
since each rank has all of it: the data set has the numbers of the labelled nodes, of which each batch has a quarter,
and `train_step` computes the whole graph. A graph with five communities stands for Cora.
"""

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout, relu
from torch.utils.data import TensorDataset

from elche_worker import TrainingJob

NUM_NODES, NUM_CLASSES, NUM_FEATURES, NUM_LABELLED = 1000, 5, 50, 200


@cache
def load_graph(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Features (1000, 50), the normalised adjacency with loops (1000, 1000), sparse, and the nodes' classes."""
    source = torch.Generator().manual_seed(0)
    labels = torch.randint(NUM_CLASSES, (NUM_NODES,), generator=source)
    is_alike = labels.view(-1, 1) == labels
    edges = (torch.rand(NUM_NODES, NUM_NODES, generator=source) < 0.001 + 0.014 * is_alike).triu(1).float()
    adjacency = edges + edges.T + torch.eye(NUM_NODES)
    roots = adjacency.sum(1).rsqrt()
    normalised = (roots.view(-1, 1) * adjacency * roots).to_sparse_csr()
    centres = torch.randn(NUM_CLASSES, NUM_FEATURES, generator=source)
    features = 0.25 * centres[labels] + torch.randn(NUM_NODES, NUM_FEATURES, generator=source)
    return features.to(device), normalised.to(device), labels.to(device)


class GCN(nn.Module):
    """Features of all nodes to logits of all nodes."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.gc1 = nn.Linear(NUM_FEATURES, width)
        self.gc2 = nn.Linear(width, NUM_CLASSES)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        x = dropout(relu(adjacency @ self.gc1(x)), 0.5, self.training)
        return adjacency @ self.gc2(x)


def train_step(model: GCN, batch: list[Tensor]) -> Tensor:
    (nodes,) = batch
    features, adjacency, labels = load_graph(nodes.device)
    return cross_entropy(model(features, adjacency)[nodes], labels[nodes])


def evaluate(model: GCN) -> dict[str, float]:
    features, adjacency, labels = load_graph(next(model.parameters()).device)
    predicted = model(features, adjacency).argmax(1)
    return {"accuracy": (predicted == labels)[NUM_LABELLED:].float().mean().item()}


job = TrainingJob(
    model=GCN,
    optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4),
    dataset=lambda: TensorDataset(torch.arange(NUM_LABELLED)),
    train_step=train_step,
    evaluate=evaluate,
    batch_size=NUM_LABELLED // 4,
    epochs=60,
)
