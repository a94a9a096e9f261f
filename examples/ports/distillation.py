"""Like PyTorch's knowledge distillation tutorial: a small student learns from the labels and from a teacher's soft
targets. The teacher is no part of the job's model: each rank makes it once, so that checkpoints have the student
alone. Here it is trained at the start, in a second; with a file, `load_teacher` reads that.
"""

from functools import cache

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax, softmax
from torch.utils.data import TensorDataset

from elche_worker import TrainingJob

TEMPERATURE, SOFT_WEIGHT = 2.0, 0.75


@cache
def load_split() -> list[Tensor]:
    """Training images (N, 1, 8, 8), held-out images, and the labels of both."""
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(digits.target)
    return train_test_split(images, labels, test_size=0.5, stratify=labels, random_state=0)


def build_net(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(width * 16, 10),
    )  # fmt: skip


@cache
def load_teacher(device: torch.device) -> nn.Module:
    """The teacher in eval mode. It leaves the rank's random numbers as they were."""
    images, _, labels, _ = load_split()
    with torch.random.fork_rng(), torch.enable_grad():
        torch.manual_seed(0)
        teacher = build_net(48)
        optimizer = torch.optim.AdamW(teacher.parameters(), lr=3e-3)
        for _ in range(12):
            for part in torch.randperm(len(images)).split(64):
                cross_entropy(teacher(images[part]), labels[part]).backward()
                optimizer.step()
                optimizer.zero_grad()
    return teacher.eval().requires_grad_(False).to(device)


def build_dataset() -> TensorDataset:
    images, _, labels, _ = load_split()
    return TensorDataset(images, labels)


def build_test_set() -> TensorDataset:
    _, images, _, labels = load_split()
    return TensorDataset(images, labels)


def train_step(student: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
    images, labels = batch
    soft_targets = softmax(load_teacher(images.device)(images) / TEMPERATURE, dim=1)
    logits = student(images)
    soft = kl_div(log_softmax(logits / TEMPERATURE, dim=1), soft_targets, reduction="batchmean") * TEMPERATURE**2
    hard = cross_entropy(logits, labels)
    return {"loss": SOFT_WEIGHT * soft + (1 - SOFT_WEIGHT) * hard, "soft": soft, "hard": hard}


def eval_step(student: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
    images, labels = batch
    teacher = load_teacher(images.device)
    return {
        "accuracy": (student(images).argmax(1) == labels).float().mean(),
        "teacher_accuracy": (teacher(images).argmax(1) == labels).float().mean(),
    }


job = TrainingJob(
    model=lambda: build_net(6),
    optimizer=lambda student: torch.optim.Adam(student.parameters(), lr=3e-3),
    dataset=build_dataset,
    train_step=train_step,
    eval_dataset=build_test_set,
    eval_step=eval_step,
    batch_size=32,
    epochs=25,
)
