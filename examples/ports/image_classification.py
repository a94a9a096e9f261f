"""Like torchvision's references/classification/train.py: augmentation, warm-up and cosine, label smoothing, a moving
average of the weights, the best checkpoint. The loop, the samplers and the saving are gone; the rate follows
`Progress` in place of `scheduler.step()`. Handwritten digits stand for ImageNet.
"""

import math
from functools import cache

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.utils.data import TensorDataset

from elche_worker import Progress, TrainingJob

WARM_UP = 0.1


@cache
def load_split() -> list[Tensor]:
    """Training images (N, 1, 8, 8), held-out images, and the labels of both."""
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(digits.target)
    return train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=0)


def build_dataset() -> TensorDataset:
    images, _, labels, _ = load_split()
    return TensorDataset(images, labels)


def build_test_set() -> TensorDataset:
    _, images, _, labels = load_split()
    return TensorDataset(images, labels)


def build_model() -> nn.Module:
    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]

    return nn.Sequential(
        *block(1, 32), *block(32, 32), nn.MaxPool2d(2), *block(32, 64), nn.Flatten(), nn.Linear(64 * 4 * 4, 10)
    )


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, nesterov=True)


def augment(images: Tensor) -> Tensor:
    """Each image shifted by up to one pixel, and a square of two pixels erased in half of them."""
    count = len(images)
    windows = pad(images, (1, 1, 1, 1)).unfold(2, 8, 1).unfold(3, 8, 1)  # (N, 1, 3, 3, 8, 8): every shift
    down, right = torch.randint(3, (2, count), device=images.device)
    shifted = windows[torch.arange(count, device=images.device), :, down, right]
    top, left = torch.randint(7, (2, count, 1, 1, 1), device=images.device)
    rows = torch.arange(8, device=images.device)
    of_square = ((rows.view(8, 1) - top - 0.5).abs() < 1) & ((rows.view(1, 8) - left - 0.5).abs() < 1)
    is_erased = torch.rand(count, 1, 1, 1, device=images.device) < 0.5
    return shifted.masked_fill(of_square & is_erased, 0.0)


def train_step(model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
    images, labels = batch
    logits = model(augment(images))
    accuracy = (logits.argmax(1) == labels).float().mean()
    return {"loss": cross_entropy(logits, labels, label_smoothing=0.1), "train_accuracy": accuracy}


def eval_step(model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
    images, labels = batch
    return {"accuracy": (model(images).argmax(1) == labels).float().mean()}


def schedule(progress: Progress) -> float:
    """A tenth of the training up to the full rate, then a cosine down to 0."""
    done = progress.fraction
    if done < WARM_UP:
        return (done + 0.01) / (WARM_UP + 0.01)
    return 0.5 * (1 + math.cos(math.pi * (done - WARM_UP) / (1 - WARM_UP)))


job = TrainingJob(
    model=build_model,
    optimizer=build_optimizer,
    dataset=build_dataset,
    train_step=train_step,
    schedule=schedule,
    eval_dataset=build_test_set,
    eval_step=eval_step,
    ema=0.98,
    monitor="accuracy",
    mode="max",
    batch_size=64,
    epochs=15,
)
