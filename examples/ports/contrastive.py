"""Like sthalles/SimCLR: two views of each image, NT-Xent over the batch. The loop makes its own batches of the size
that `trainer.shares` gives, and `trainer.step()` stands for `optimizer.step()`. Negatives are those of a rank's own
part, so with more ranks there are fewer of them, as in DistributedDataParallel without gathering. Digits stand for
STL-10.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize, pad
from torch.optim.lr_scheduler import CosineAnnealingLR

from elche_worker import Trainer

TEMPERATURE = 0.2


class SimCLR(nn.Module):
    """Images (N, 1, 8, 8) to unit vectors (N, 32)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Conv2d(32, 64, 3, 2, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
            nn.Flatten(), nn.Linear(64 * 4 * 4, 128), nn.ReLU(),
        )  # fmt: skip
        self.projection = nn.Linear(128, 32)

    def forward(self, images: Tensor) -> Tensor:
        return normalize(self.projection(self.encoder(images)), dim=1)


def augment(images: Tensor) -> Tensor:
    """Each image shifted by up to one pixel, with noise and another brightness."""
    windows = pad(images, (1, 1, 1, 1)).unfold(2, 8, 1).unfold(3, 8, 1)  # (N, 1, 3, 3, 8, 8): every shift
    down, right = torch.randint(3, (2, len(images)))
    brightness = 0.6 + 0.8 * torch.rand(len(images), 1, 1, 1)
    return brightness * windows[torch.arange(len(images)), :, down, right] + 0.1 * torch.randn_like(images)


def info_nce_loss(features: Tensor) -> Tensor:
    """Of the features of N first and then N second views: the other view of an image among all others."""
    count = len(features) // 2
    similarity = features @ features.T / TEMPERATURE
    similarity.fill_diagonal_(float("-inf"))
    other = torch.arange(2 * count, device=features.device).roll(count)
    return cross_entropy(similarity, other)


@torch.no_grad()
def knn_accuracy(trainer: Trainer, images: Tensor, labels: Tensor) -> float:
    """How many of every fifth digit have the label of the one that is most alike among the others."""
    trainer.model.eval()
    features = normalize(trainer.model.encoder(images.to(trainer.device)), dim=1).cpu()
    trainer.model.train()
    is_held_out = torch.arange(len(images)) % 5 == 4
    nearest = (features[is_held_out] @ features[~is_held_out].T).argmax(1)
    return (labels[~is_held_out][nearest] == labels[is_held_out]).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=128, help="shared by all ranks")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    digits = load_digits()
    images, labels = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1), torch.tensor(digits.target)
    torch.manual_seed(options.seed)
    model = SimCLR()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, weight_decay=1e-4)
    scheduler = CosineAnnealingLR(optimizer, T_max=options.steps)
    with Trainer.setup(model, optimizer) as trainer:
        trainer.register_state(scheduler=scheduler)  # checkpoints have it
        torch.manual_seed(options.seed + trainer.rank)  # each rank draws other images
        for batch_size in trainer.shares(options.batch_size, num_steps=options.steps):
            chosen = images[torch.randint(len(images), (batch_size,))]
            views = torch.cat([augment(chosen), augment(chosen)])
            loss = info_nce_loss(trainer(views))
            loss.backward()
            trainer.step()
            scheduler.step()
            if trainer.num_steps % 100 == 0 or trainer.num_steps == options.steps:
                accuracy = knn_accuracy(trainer, images, labels)
                trainer.report(knn_accuracy=accuracy)
                if trainer.rank == 0:
                    print(f"step {trainer.num_steps}: loss {loss.item():.3f}, knn_accuracy {accuracy:.3f}", flush=True)
        if trainer.rank == 0:
            torch.save(model.state_dict(), "simclr.pt")


if __name__ == "__main__":
    main()
