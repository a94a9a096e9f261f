"""Like pytorch/examples dcgan/main.py. The two optimizers are returned by name, and `train_step` is the body of the
original's loop, with its three backward passes and two steps; the loop around it is gone. Digits stand for CelebA.
"""

from functools import cache

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.optim import Adam
from torch.utils.data import TensorDataset

from elche_worker import TrainingJob

NOISE = 16
WIDTH = 32


class GAN(nn.Module):
    """Both networks: one model, so that both are averaged and saved."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(NOISE, 2 * WIDTH, 2, bias=False), nn.BatchNorm2d(2 * WIDTH), nn.ReLU(),
            nn.ConvTranspose2d(2 * WIDTH, WIDTH, 4, 2, 1, bias=False), nn.BatchNorm2d(WIDTH), nn.ReLU(),
            nn.ConvTranspose2d(WIDTH, 1, 4, 2, 1), nn.Tanh(),
        )  # fmt: skip
        self.discriminator = nn.Sequential(
            nn.Conv2d(1, WIDTH, 4, 2, 1), nn.LeakyReLU(0.2),
            nn.Conv2d(WIDTH, 2 * WIDTH, 4, 2, 1, bias=False), nn.BatchNorm2d(2 * WIDTH), nn.LeakyReLU(0.2),
            nn.Conv2d(2 * WIDTH, 1, 2), nn.Flatten(0),
        )  # fmt: skip
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
                nn.init.normal_(module.weight, 0.0, 0.05)


@cache
def load_images() -> Tensor:
    """All digits, (N, 1, 8, 8), from -1 to 1."""
    return torch.tensor(load_digits().images / 8 - 1, dtype=torch.float32).unsqueeze(1)


def build_optimizers(model: GAN) -> dict[str, Adam]:
    return {
        "discriminator": Adam(model.discriminator.parameters(), lr=5e-4, betas=(0.5, 0.999)),
        "generator": Adam(model.generator.parameters(), lr=5e-4, betas=(0.5, 0.999)),
    }


def train_step(model: GAN, batch: list[Tensor], optimizers: dict[str, Adam]) -> dict[str, Tensor]:
    (real,) = batch
    ones, zeros = torch.ones(len(real), device=real.device), torch.zeros(len(real), device=real.device)

    optimizers["discriminator"].zero_grad()
    loss_real = binary_cross_entropy_with_logits(model.discriminator(real), ones)
    loss_real.backward()
    fake = model.generator(torch.randn(len(real), NOISE, 1, 1, device=real.device))
    loss_fake = binary_cross_entropy_with_logits(model.discriminator(fake.detach()), zeros)
    loss_fake.backward()
    optimizers["discriminator"].step()

    optimizers["generator"].zero_grad()
    loss = binary_cross_entropy_with_logits(model.discriminator(fake), ones)
    loss.backward()
    optimizers["generator"].step()
    return {"loss": loss.detach(), "loss_d": (loss_real + loss_fake).detach()}


def evaluate(model: GAN) -> dict[str, float]:
    """Frechet distance of the pixels of as many generated images; two halves of them have 0.31."""
    images = load_images()
    noise = torch.randn(len(images), NOISE, 1, 1, generator=torch.Generator().manual_seed(0))
    device = next(model.parameters()).device
    real, fake = images.flatten(1).double(), model.generator(noise.to(device)).cpu().flatten(1).double()
    of_real, of_fake = real.T.cov(), fake.T.cov()
    roots = torch.linalg.eigvals(of_real @ of_fake).real.clamp(min=0).sqrt()
    distance = (real.mean(0) - fake.mean(0)).square().sum() + of_real.trace() + of_fake.trace() - 2 * roots.sum()
    return {"frechet": distance.item()}


job = TrainingJob(
    model=GAN,
    optimizer=build_optimizers,
    dataset=lambda: TensorDataset(load_images()),
    train_step=train_step,
    manual_optimization=True,
    evaluate=evaluate,
    batch_size=32,
    epochs=14,
)
