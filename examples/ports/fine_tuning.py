"""Like PyTorch's transfer learning tutorial, with fastai's discriminative rates and gradual unfreezing. What a job
trains is fixed when it begins, so a layer that is frozen at first has a rate of 0 until then: one function of the
step per group of parameters. The backbone is pretrained on the digits 0 to 4, in a second, and tuned for 5 to 9, of
which few are there.
"""

from functools import cache

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

from elche_worker import TrainingJob

NUM_TRAINED, BATCH_SIZE, EPOCHS = 192, 16, 30
STEPS_PER_EPOCH = NUM_TRAINED // BATCH_SIZE
UNFREEZE_UPPER, UNFREEZE_LOWER = 5 * STEPS_PER_EPOCH, 10 * STEPS_PER_EPOCH


class Net(nn.Module):
    """A backbone of two parts, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.lower = nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.upper = nn.Sequential(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(64 * 16, 5)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.upper(self.lower(images)))
        return logits


@cache
def load_samples(*, is_new: bool) -> tuple[Tensor, Tensor]:
    """Images (N, 1, 8, 8) and labels from 0 to 4, of the digits from 5 on or of those below."""
    digits = load_digits()
    chosen = (digits.target >= 5) == is_new
    images = torch.tensor(digits.images[chosen] / 16, dtype=torch.float32).unsqueeze(1)
    return images, torch.tensor(digits.target[chosen] % 5)


@cache
def pretrained_state() -> dict[str, Tensor]:
    """Stands for `torch.load("pretrained.pt")`. It leaves the rank's random numbers as they were."""
    images, labels = load_samples(is_new=False)
    with torch.random.fork_rng(), torch.enable_grad():
        torch.manual_seed(0)
        net = Net()
        optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
        for _ in range(5):
            for part in torch.randperm(len(images)).split(64):
                cross_entropy(net(images[part]), labels[part]).backward()
                optimizer.step()
                optimizer.zero_grad()
    return net.state_dict()


def build_model() -> Net:
    net = Net()
    net.load_state_dict(pretrained_state())
    net.head = nn.Linear(64 * 16, 5)  # for the new classes
    return net


def build_optimizer(net: Net) -> Optimizer:
    """The lower a layer, the lower its rate."""
    groups = [
        {"params": net.head.parameters(), "lr": 2e-3},
        {"params": net.upper.parameters(), "lr": 5e-4},
        {"params": net.lower.parameters(), "lr": 1e-4},
    ]
    return torch.optim.AdamW(groups)


def build_scheduler(optimizer: Optimizer) -> LambdaLR:
    """Steps are batches of all ranks, so that layers are unfrozen in the same epoch with any number of them."""
    of_groups = [
        lambda step: 1.0,
        lambda step: float(step >= UNFREEZE_UPPER),
        lambda step: float(step >= UNFREEZE_LOWER),
    ]
    return LambdaLR(optimizer, of_groups)


def train_step(net: Net, batch: list[Tensor]) -> Tensor:
    images, labels = batch
    return cross_entropy(net(images), labels)


def eval_step(net: Net, batch: list[Tensor]) -> dict[str, Tensor]:
    images, labels = batch
    return {"accuracy": (net(images).argmax(1) == labels).float().mean()}


job = TrainingJob(
    model=build_model,
    optimizer=build_optimizer,
    scheduler=build_scheduler,
    dataset=lambda: TensorDataset(*(one[:NUM_TRAINED] for one in load_samples(is_new=True))),
    train_step=train_step,
    eval_dataset=lambda: TensorDataset(*(one[NUM_TRAINED:] for one in load_samples(is_new=True))),
    eval_step=eval_step,
    batch_size=BATCH_SIZE,
    epochs=EPOCHS,
)
