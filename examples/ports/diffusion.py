"""Like tanelp/tiny-diffusion ddpm.py: a network learns the noise that was added to points of the plane. The loop and
its progress bar are gone, and `ema` has the samples drawn from a moving average, as larger diffusion scripts do.
"""

from functools import cache

import torch
from sklearn.datasets import make_moons
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from elche_worker import TrainingJob

TIMESTEPS = 50
BETAS = torch.linspace(1e-4, 0.1, TIMESTEPS)
ALPHAS_CUMPROD = (1 - BETAS).cumprod(0)


class Denoiser(nn.Module):
    """Noisy points (N, 2) at timesteps (N,) to the noise in them."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.time = nn.Embedding(TIMESTEPS, width)
        self.points = nn.Linear(2, width)
        self.layers = nn.Sequential(
            nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 2)
        )

    def forward(self, noisy: Tensor, timesteps: Tensor) -> Tensor:
        noise: Tensor = self.layers(self.points(noisy) + self.time(timesteps))
        return noise


@cache
def load_points(seed: int, num_points: int) -> Tensor:
    """Points of two half moons, with mean about 0 and a spread of about 1."""
    points, _ = make_moons(num_points, noise=0.05, random_state=seed)
    return torch.tensor(points - [0.5, 0.25], dtype=torch.float32) * 1.5


def train_step(model: Denoiser, batch: list[Tensor]) -> Tensor:
    (points,) = batch
    timesteps = torch.randint(TIMESTEPS, (len(points),), device=points.device)
    noise = torch.randn_like(points)
    kept = ALPHAS_CUMPROD.to(points.device)[timesteps].unsqueeze(1)
    return mse_loss(model(kept.sqrt() * points + (1 - kept).sqrt() * noise, timesteps), noise)


def sample(model: Denoiser, num_samples: int, generator: torch.Generator) -> Tensor:
    """Points drawn from the model, step by step from pure noise, on the CPU."""
    device = next(model.parameters()).device
    points = torch.randn(num_samples, 2, generator=generator)
    for step in reversed(range(TIMESTEPS)):
        timesteps = torch.full((num_samples,), step, device=device)
        noise = model(points.to(device), timesteps).cpu()
        points = (points - BETAS[step] / (1 - ALPHAS_CUMPROD[step]).sqrt() * noise) / (1 - BETAS[step]).sqrt()
        if step:
            points = points + BETAS[step].sqrt() * torch.randn(num_samples, 2, generator=generator)
    return points


def evaluate(model: Denoiser) -> dict[str, float]:
    """Energy distance of 1000 samples to held-out points: 0 for the same distribution."""
    sampled, real = sample(model, 1000, torch.Generator().manual_seed(0)), load_points(1, 1000)
    distance = 2 * torch.cdist(sampled, real).mean() - torch.cdist(sampled, sampled).mean()
    return {"energy_distance": (distance - torch.cdist(real, real).mean()).item()}


job = TrainingJob(
    model=Denoiser,
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=2e-3),
    dataset=lambda: TensorDataset(load_points(0, 8000)),
    train_step=train_step,
    evaluate=evaluate,
    ema=0.99,
    max_grad_norm=1.0,
    batch_size=64,
    epochs=20,
)
