"""Classifies handwritten digits with a small convolutional network: trains in seconds, without a GPU."""

from functools import cache

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.utils.data import TensorDataset

from elche_worker import TrainingJob, record_scalar

NUM_COPIES = 20
WIDTH = 48


@cache
def load_split() -> list[Tensor]:
    """Training images, held-out images, and the labels of both; images are (N, 1, 8, 8) from 0 to 1."""
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(digits.target)
    return train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=0)


def build_dataset() -> TensorDataset:
    """Copies of every training image, each shifted by up to one pixel, by an amount that depends on its index alone."""
    images, _, labels, _ = load_split()
    windows = pad(images, (1, 1, 1, 1)).unfold(2, 8, 1).unfold(3, 8, 1)  # (N, 1, 3, 3, 8, 8): every shift
    source = torch.arange(len(images)).repeat(NUM_COPIES)
    down, right = torch.randint(3, (2, len(source)), generator=torch.Generator().manual_seed(0))
    return TensorDataset(windows[source, :, down, right], labels[source])


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, WIDTH, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(WIDTH, WIDTH, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(WIDTH, 2 * WIDTH, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * WIDTH * 4 * 4, 10),
    )


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def train_step(model: nn.Module, batch: list[Tensor]) -> Tensor:
    images, labels = batch
    logits = model(images)
    record_scalar("accuracy", (logits.argmax(1) == labels).float().mean())
    return cross_entropy(logits, labels)


def evaluate(model: nn.Module) -> dict[str, float]:
    _, images, _, labels = load_split()
    device = next(model.parameters()).device
    predicted = model(images.to(device)).argmax(1).cpu()
    return {"accuracy": (predicted == labels).float().mean().item()}


job = TrainingJob(
    model=build_model,
    optimizer=build_optimizer,
    dataset=build_dataset,
    train_step=train_step,
    evaluate=evaluate,
    batch_size=64,
    epochs=5,
)
