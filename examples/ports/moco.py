"""Like facebookresearch/moco: a query encoder, a key encoder that follows it by momentum, a queue of keys as a
buffer. `buffers="from_source"` has a round take the queue whole from one rank, as DistributedDataParallel does;
gathering keys and shuffling for BatchNorm are gone, since ranks train batches of their own. Digits stand for
ImageNet.
"""

from copy import deepcopy
from functools import cache

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize, pad
from torch.utils.data import TensorDataset

from elche_worker import TrainingJob

DIM, QUEUE, MOMENTUM, TEMPERATURE = 32, 1024, 0.99, 0.2


class MoCo(nn.Module):
    """Two views of images (N, 1, 8, 8) to logits (N, 1 + 1024), of which the first is the positive pair's."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder_q = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU(), nn.Flatten(),
            nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, DIM),
        )  # fmt: skip
        self.encoder_k = deepcopy(self.encoder_q).requires_grad_(False)  # follows by momentum, not by gradient
        self.register_buffer("queue", normalize(torch.randn(QUEUE, DIM), dim=1))
        self.register_buffer("queue_ptr", torch.zeros((), dtype=torch.long))

    @torch.no_grad()
    def momentum_update(self) -> None:
        for of_q, of_k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
            of_k.lerp_(of_q, 1 - MOMENTUM)

    @torch.no_grad()
    def enqueue(self, keys: Tensor) -> None:
        places = (self.queue_ptr + torch.arange(len(keys), device=keys.device)) % QUEUE
        self.queue[places] = keys
        self.queue_ptr.copy_((self.queue_ptr + len(keys)) % QUEUE)

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        q = normalize(self.encoder_q(queries), dim=1)
        with torch.no_grad():
            self.momentum_update()
            k = normalize(self.encoder_k(keys), dim=1)
        positive, negative = (q * k).sum(1, keepdim=True), q @ self.queue.clone().T
        self.enqueue(k)
        return torch.cat([positive, negative], dim=1) / TEMPERATURE


@cache
def load_samples() -> tuple[Tensor, Tensor]:
    digits = load_digits()
    return torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1), torch.tensor(digits.target)


def augment(images: Tensor) -> Tensor:
    """Each image shifted by up to one pixel, with noise and another brightness."""
    windows = pad(images, (1, 1, 1, 1)).unfold(2, 8, 1).unfold(3, 8, 1)  # (N, 1, 3, 3, 8, 8): every shift
    down, right = torch.randint(3, (2, len(images)), device=images.device)
    shifted = windows[torch.arange(len(images), device=images.device), :, down, right]
    brightness = 0.6 + 0.8 * torch.rand(len(images), 1, 1, 1, device=images.device)
    return brightness * shifted + 0.1 * torch.randn_like(images)


def train_step(model: MoCo, batch: list[Tensor]) -> Tensor:
    (images,) = batch
    logits = model(augment(images), augment(images))
    return cross_entropy(logits, torch.zeros(len(images), dtype=torch.long, device=images.device))


def evaluate(model: MoCo) -> dict[str, float]:
    """How many of every fifth digit have the label of the one that is most alike among the others (kNN, k = 1)."""
    images, labels = load_samples()
    device = next(model.parameters()).device
    features = normalize(model.encoder_q[:-2](images.to(device)), dim=1).cpu()
    is_held_out = torch.arange(len(images)) % 5 == 4
    nearest = (features[is_held_out] @ features[~is_held_out].T).argmax(1)
    return {"knn_accuracy": (labels[~is_held_out][nearest] == labels[is_held_out]).float().mean().item()}


job = TrainingJob(
    model=MoCo,
    optimizer=lambda model: torch.optim.SGD(model.encoder_q.parameters(), lr=0.06, momentum=0.9, weight_decay=1e-4),
    dataset=lambda: TensorDataset(load_samples()[0]),
    train_step=train_step,
    evaluate=evaluate,
    buffers="from_source",
    drop_last=True,
    batch_size=64,
    epochs=20,
)
