"""The eight models of reference_report.py: digits and the text of the standard library, as in convergence_jobs.py.

ELCHE_MODEL  one of `MODELS`
ELCHE_FULL   "1": images of 32 by 32, and models as wide as they were published; for GPUs
ELCHE_SCALE  how many times the usual number of batches
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from convergence_jobs import Transformer, build_digits, build_text, evaluate_text, load_fold, train_text
from torch import Tensor, fx, nn
from torch.nn.functional import cross_entropy, interpolate, mse_loss, relu
from torch.utils.data import TensorDataset

from elche_worker import TrainingJob

MODEL = os.environ.get("ELCHE_MODEL", "mlp")
FULL = os.environ.get("ELCHE_FULL") == "1"
SCALE = float(os.environ.get("ELCHE_SCALE", "1"))
SIDE = 32 if FULL else 8
"""Pixels of an image's side."""
WIDTH = 16 if FULL else 6
"""Channels of the first convolution."""


def sized(images: Tensor) -> Tensor:
    """Images are (N, 1, 8, 8), the result is (N, 1, SIDE, SIDE)."""
    return interpolate(images, size=(SIDE, SIDE), mode="bilinear") if FULL else images


def logistic() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, 10))


def mlp() -> nn.Module:
    hidden = 16 * WIDTH
    return nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def lenet() -> nn.Module:
    last = 16 * (SIDE // 4) ** 2
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(last, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def conv_ae() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, WIDTH, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(WIDTH, 2 * WIDTH, 3, stride=2, padding=1), nn.ReLU(),
        nn.ConvTranspose2d(2 * WIDTH, WIDTH, 2, stride=2), nn.ReLU(),
        nn.ConvTranspose2d(WIDTH, 1, 2, stride=2), nn.Sigmoid(),
    )  # fmt: skip


class CharRnn(nn.Module):
    """Predicts each byte by an LSTM over those before it."""

    def __init__(self) -> None:
        super().__init__()
        width = 256 if FULL else 48
        self.embedding = nn.Embedding(256, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.output = nn.Linear(width, 256)

    def forward(self, bytes_nt: Tensor) -> Tensor:
        """Bytes are (N, T), logits (N, T, 256)."""
        logits: Tensor = self.output(self.lstm(self.embedding(bytes_nt))[0])
        return logits


class Block(nn.Module):
    """Two convolutions beside a shortcut (He et al., arXiv 1512.03385, for CIFAR)."""

    def __init__(self, num_in: int, num_out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(num_in, num_out, 3, stride, 1, bias=False), nn.BatchNorm2d(num_out))
        self.second = nn.Sequential(nn.Conv2d(num_out, num_out, 3, 1, 1, bias=False), nn.BatchNorm2d(num_out))
        self.shortcut = nn.Conv2d(num_in, num_out, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        return relu(self.second(relu(self.first(images))) + self.shortcut(images))


def resnet20() -> nn.Module:
    stem = [nn.Conv2d(1, WIDTH, 3, padding=1, bias=False), nn.BatchNorm2d(WIDTH), nn.ReLU()]
    widths = [(WIDTH, WIDTH, 1), (WIDTH, 2 * WIDTH, 2), (2 * WIDTH, 4 * WIDTH, 2)]
    blocks = [
        Block(num_out if at else num_in, num_out, 1 if at else stride)
        for num_in, num_out, stride in widths
        for at in range(3)
    ]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * WIDTH, 10))


def resnet20_graph() -> nn.Module:
    """The same as a graph of its operations."""
    return fx.symbolic_trace(resnet20())


@dataclass(frozen=True, slots=True)
class Kind:
    """What a model trains on, and how it is told how good it is."""

    metric: str
    batch_size: int
    dataset: Callable[[int], TensorDataset]
    """By the number of batches."""
    train_step: Callable[[nn.Module, list[Tensor]], Tensor]
    evaluate: Callable[[nn.Module], dict[str, float]]


def digits(num_batches: int) -> TensorDataset:
    images, labels = build_digits(-(-num_batches * 64 // len(load_fold()[0]))).tensors
    return TensorDataset(sized(images[: num_batches * 64]), labels[: num_batches * 64])


def train_classes(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def evaluate_classes(model: nn.Module) -> dict[str, float]:
    _, _, images, labels = load_fold()
    return {"accuracy": (model(sized(images)).argmax(1) == labels).double().mean().item()}


def train_copies(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return mse_loss(model(batch[0]), batch[0])


def evaluate_copies(model: nn.Module) -> dict[str, float]:
    images = sized(load_fold()[2])
    return {"mse": mse_loss(model(images), images).item()}


def text(num_batches: int) -> TensorDataset:
    return build_text(num_batches * 8)


CLASSES = Kind("accuracy", 64, digits, train_classes, evaluate_classes)
COPIES = Kind("mse", 64, digits, train_copies, evaluate_copies)
TEXT = Kind("nats_per_byte", 8, text, train_text, evaluate_text)
MODELS: dict[str, tuple[Callable[[], nn.Module], Kind, int]] = {
    "logistic": (logistic, CLASSES, 4000),
    "mlp": (mlp, CLASSES, 4000),
    "lenet": (lenet, CLASSES, 3000),
    "conv-ae": (conv_ae, COPIES, 3000),
    "char-rnn": (CharRnn, TEXT, 1000),
    "gpt-nano": (Transformer, TEXT, 1500),
    "resnet-20": (resnet20, CLASSES, 800),
    "resnet-20-graph": (resnet20_graph, CLASSES, 800),
}
"""Model, what it trains on, and batches in all."""
build, kind, num_batches = MODELS[MODEL]
num_batches = round(SCALE * num_batches)


def model() -> nn.Module:
    torch.set_num_threads(1)
    return build()


job = TrainingJob(
    model=model,
    optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=2e-3),
    dataset=lambda: kind.dataset(num_batches),
    train_step=kind.train_step,
    evaluate=kind.evaluate,
    batch_size=kind.batch_size,
    epochs=1,
)
