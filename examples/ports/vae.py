"""Like pytorch/examples vae/main.py. Model and loss are the original's, but for the mean over samples in place of the
sum, so that the rate does not depend on the batch size; its loops are gone. Digits stand for MNIST.
"""

from functools import cache

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy, relu
from torch.utils.data import TensorDataset

from elche_worker import TrainingJob


class VAE(nn.Module):
    """Images (N, 64) to reconstructions, means and log variances."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(64, 128)
        self.fc21 = nn.Linear(128, 8)
        self.fc22 = nn.Linear(128, 8)
        self.fc3 = nn.Linear(8, 128)
        self.fc4 = nn.Linear(128, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = relu(self.fc1(x))
        mu, logvar = self.fc21(hidden), self.fc22(hidden)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar) if self.training else mu
        return torch.sigmoid(self.fc4(relu(self.fc3(z)))), mu, logvar


@cache
def load_images(*, is_held_out: bool) -> Tensor:
    """Digits, (N, 64), from 0 to 1; every fifth is held out."""
    images = torch.tensor(load_digits().data / 16, dtype=torch.float32)
    return images[(torch.arange(len(images)) % 5 == 4) == is_held_out]


def losses(output: tuple[Tensor, Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Reconstruction and Kullback-Leibler divergence per image, in nats."""
    reconstructed, mu, logvar = output
    bce = binary_cross_entropy(reconstructed, x, reduction="sum") / len(x)
    kld = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum() / len(x)
    return bce, kld


def train_step(model: VAE, batch: list[Tensor]) -> dict[str, Tensor]:
    (x,) = batch
    bce, kld = losses(model(x), x)
    return {"loss": bce + kld, "bce": bce, "kld": kld}


def eval_step(model: VAE, batch: list[Tensor]) -> dict[str, Tensor]:
    (x,) = batch
    bce, kld = losses(model(x), x)
    return {"negative_elbo": bce + kld}


job = TrainingJob(
    model=VAE,
    optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=1e-3),
    dataset=lambda: TensorDataset(load_images(is_held_out=False)),
    train_step=train_step,
    eval_dataset=lambda: TensorDataset(load_images(is_held_out=True)),
    eval_step=eval_step,
    batch_size=32,
    epochs=40,
)
