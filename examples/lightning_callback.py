"""PyTorch Lightning on several devices: a callback averages gradients, while Lightning runs with one device.

    python examples/lightning_callback.py --batch-size 64
    torchrun --standalone --nproc-per-node 2 examples/lightning_callback.py --batch-size 32

Both end with the same parameters up to rounding: two times 32 samples are 64. It needs `pip install
'elche[lightning]'`; with the package `lightning`, import `lightning.pytorch` in place of `pytorch_lightning`.
"""

import argparse
import hashlib
import json
import os
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.environments import LightningEnvironment
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from elche_worker.integrations.lightning import ElcheCallback

RANK, LOCAL_RANK = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))


class Digits(pl.LightningModule):
    """Classifies handwritten digits."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return cross_entropy(self.net(images), labels)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.log("accuracy", (self.net(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def build_loaders(batch_size: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """This process's equal part of the digits to train; and all held-out ones, which every process reads."""
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32).flatten(1)
    dataset = TensorDataset(images, torch.tensor(digits.target))
    train_set, held_out = torch.utils.data.random_split(dataset, [1408, 389], torch.Generator().manual_seed(0))
    sampler = DistributedSampler(train_set, num_replicas=WORLD_SIZE, rank=RANK, seed=0)
    return DataLoader(train_set, batch_size=batch_size, sampler=sampler), DataLoader(held_out, batch_size=len(held_out))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="of each process")
    parser.add_argument("--accumulate", type=int, default=1, help="batches whose gradients are added up for a step")
    parser.add_argument("--save", help="file for the parameters")
    options = parser.parse_args()

    pl.seed_everything(0, verbose=False)
    model = Digits()
    train_loader, held_out_loader = build_loaders(options.batch_size)
    trainer = pl.Trainer(
        devices=[LOCAL_RANK] if torch.cuda.is_available() else 1,
        plugins=[LightningEnvironment()],  # whatever torchrun says
        callbacks=[ElcheCallback()],
        max_epochs=options.epochs,
        accumulate_grad_batches=options.accumulate,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, train_loader, held_out_loader)

    values = torch.cat([one.detach().cpu().reshape(-1) for one in model.parameters()])
    result = {"rank": RANK, "ranks": WORLD_SIZE, "lightning_ranks": trainer.world_size, "steps": trainer.global_step}
    accuracy = trainer.callback_metrics["accuracy"].item()
    digest = hashlib.sha256(values.numpy()).hexdigest()[:16]
    print(json.dumps({**result, "accuracy": accuracy, "digest": digest}), flush=True)
    if options.save and RANK == 0:
        torch.save(model.state_dict(), options.save)


if __name__ == "__main__":
    main()
