"""Your own training loop on one device or many: classifies handwritten digits, in seconds and without a GPU.

    python examples/own_loop.py
    torchrun --standalone --nproc-per-node 2 examples/own_loop.py
    elche run examples/own_loop.py --ranks 2

elche needs four calls: `Trainer.setup`, `set_data_loader`, `epoch` and `step`; `epochs` and `report` are for watching
and for resuming from a checkpoint. Every process prints one line of JSON at its end; the digest of the
parameters is the same in all of them.
"""

import argparse
import hashlib
import json
import math

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from elche_worker import Trainer, TrainerConfig

LEARNING_RATE = 3e-3


def load_split() -> tuple[TensorDataset, TensorDataset]:
    """Digits to train and held-out ones; images are (1, 8, 8) from 0 to 1."""
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(digits.target)
    parts = train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=0)
    return TensorDataset(parts[0], parts[2]), TensorDataset(parts[1], parts[3])


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 2 * 2, 10),
    )


def train_one_epoch(trainer: Trainer, epoch: int) -> float:
    """The mean loss of this process's samples."""
    trainer.model.train()
    total, num_samples = 0.0, 0
    for batch in trainer.epoch(epoch):
        logits = trainer.forward_batch(batch)
        loss = cross_entropy(logits, batch["label"])
        loss.backward()
        trainer.step()
        total += loss.item() * batch.size
        num_samples += batch.size
    return total / max(num_samples, 1)


@torch.no_grad()
def evaluate(trainer: Trainer, held_out: TensorDataset) -> float:
    """The part of held-out images that are read right. Each process reads some of them, all know the result."""
    trainer.model.eval()
    images, labels = held_out[trainer.rank :: trainer.world_size]
    num_right = (trainer(images).argmax(1) == labels.to(trainer.device)).sum()
    if trainer.is_distributed:
        dist.all_reduce(num_right)
    return num_right.item() / len(held_out)


def digest(model: nn.Module) -> str:
    """Of all parameters and buffers: one bit more or less makes another one."""
    state = hashlib.sha256()
    for tensor in model.state_dict().values():
        state.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return state.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32, help="shared by all processes; under El Che each one's")
    parser.add_argument("--el-che", type=int, metavar="BATCHES", help="batches of the slowest device between two steps")
    options = parser.parse_args()

    torch.manual_seed(0)
    train_set, held_out = load_split()
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    config = TrainerConfig(anchor=options.el_che, max_anchor=options.el_che) if options.el_che else None
    with Trainer.setup(model, optimizer, config) as trainer:
        loader = DataLoader(train_set, batch_size=options.batch_size, shuffle=True)
        trainer.set_data_loader(loader, forward_input="image", names=("image", "label"))
        accuracy = 0.0
        for epoch in trainer.epochs(options.epochs):
            trainer.set_lr(LEARNING_RATE * (1 + math.cos(math.pi * epoch / options.epochs)) / 2)
            loss = train_one_epoch(trainer, epoch)
            accuracy = evaluate(trainer, held_out)
            trainer.report(accuracy=accuracy)
            if trainer.rank == 0:
                print(f"epoch {epoch + 1}: loss {loss:.3f}, accuracy {accuracy:.3f}", flush=True)
        result = {"rank": trainer.rank, "ranks": trainer.world_size, "steps": trainer.num_steps, "accuracy": accuracy}
        print(json.dumps({**result, "digest": digest(model)}), flush=True)


if __name__ == "__main__":
    main()
