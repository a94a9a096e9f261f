"""ResNet-20 on CIFAR-10, as in "Deep Residual Learning for Image Recognition" (He et al. 2015), section 4.2.

    curl -O https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz
    tar -xzf cifar-10-binary.tar.gz
    elche run examples/resnet20_cifar10.py

CIFAR10_DIR names the folder of the data set where it is not ./cifar-10-batches-bin. As in the paper, the learning rate
is divided by 10 after half and after three quarters of 164 epochs; one device reaches 91.25 % there. The epoch with
the best accuracy stays as a checkpoint. ELCHE_EXAMPLE_SIZE=small, for tests, takes files of 40 images.
"""

import os
from functools import cache
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad, relu
from torch.utils.data import TensorDataset

from elche_worker import InvalidJob, Progress, TrainingJob, record_scalar

FOLDER = Path(os.environ.get("CIFAR10_DIR", "cifar-10-batches-bin"))
IS_SMALL = os.environ.get("ELCHE_EXAMPLE_SIZE") == "small"
TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILES = ("test_batch.bin",)
IMAGES_PER_FILE = 40 if IS_SMALL else 10_000
RECORD_BYTES = 1 + 3 * 32 * 32
"""A label from 0 to 9, then all red, all green and all blue values, row by row."""
HOW_TO_GET_IT = (
    'Get "CIFAR-10 binary version" from https://www.cs.toronto.edu/~kriz/cifar.html, unpack it with '
    "`tar -xzf cifar-10-binary.tar.gz`, and let CIFAR10_DIR name the folder cifar-10-batches-bin"
)
MEAN = torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1)
DEVIATION = torch.tensor([0.2470, 0.2435, 0.2616]).view(3, 1, 1)
MAX_SHIFT = 4


def check_files() -> None:
    """Raises `InvalidJob` for a file that is not there or not whole."""
    expected = IMAGES_PER_FILE * RECORD_BYTES
    for path in (FOLDER / name for name in TRAIN_FILES + TEST_FILES):
        if not path.is_file():
            raise InvalidJob(f"there is no file {path}. {HOW_TO_GET_IT}")
        if (size := path.stat().st_size) != expected:
            raise InvalidJob(f"{path} has {size:,} bytes instead of {expected:,}. {HOW_TO_GET_IT}")


@cache
def load_images(names: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    """Images (N, 3, 32, 32) as bytes, and labels (N,)."""
    content = bytearray(b"".join((FOLDER / name).read_bytes() for name in names))
    records = torch.frombuffer(content, dtype=torch.uint8).view(-1, RECORD_BYTES)
    return records[:, 1:].view(-1, 3, 32, 32), records[:, 0].long()


def build_dataset() -> TensorDataset:
    check_files()
    return TensorDataset(*load_images(TRAIN_FILES))


def build_test_set() -> TensorDataset:
    return TensorDataset(*load_images(TEST_FILES))


class Block(nn.Module):
    """Two convolutions, added to what came in; one that has more channels than that sees every other pixel."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.stride = 1 if num_in == num_out else 2
        self.num_new = num_out - num_in
        self.conv_1 = nn.Conv2d(num_in, num_out, 3, stride=self.stride, padding=1, bias=False)
        self.norm_1 = nn.BatchNorm2d(num_out)
        self.conv_2 = nn.Conv2d(num_out, num_out, 3, padding=1, bias=False)
        self.norm_2 = nn.BatchNorm2d(num_out)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.num_new))  # the paper's option A
        return relu(shortcut + self.norm_2(self.conv_2(relu(self.norm_1(self.conv_1(x))))))


def build_model() -> nn.Module:
    widths = [16, 16, 16, 16, 32, 32, 32, 64, 64, 64]
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        *(Block(num_in, num_out) for num_in, num_out in pairwise(widths)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    return model


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)


def normalise(images: Tensor) -> Tensor:
    return (images / 255 - MEAN.to(images.device)) / DEVIATION.to(images.device)


def augment(images: Tensor) -> Tensor:
    """Each image moved by up to four pixels both ways, and one in two mirrored."""
    num_images, device = len(images), images.device
    windows = pad(images, (MAX_SHIFT,) * 4).unfold(2, 32, 1).unfold(3, 32, 1)  # (N, 3, 9, 9, 32, 32): every shift
    down, right = torch.randint(2 * MAX_SHIFT + 1, (2, num_images), device=device)
    moved = windows[torch.arange(num_images, device=device), :, down, right]
    is_mirrored = torch.rand(num_images, 1, 1, 1, device=device) < 0.5
    return torch.where(is_mirrored, moved.flip(3), moved)


def train_step(model: nn.Module, batch: list[Tensor]) -> Tensor:
    images, labels = batch
    logits = model(augment(normalise(images)))
    record_scalar("accuracy", (logits.argmax(1) == labels).float().mean())
    return cross_entropy(logits, labels)


def eval_step(model: nn.Module, batch: list[Tensor]) -> dict[str, float]:
    images, labels = batch
    return {"accuracy": (model(normalise(images)).argmax(1) == labels).float().mean().item()}


def schedule(progress: Progress) -> float:
    return 0.1 ** sum(progress.fraction >= part for part in (0.5, 0.75))


job = TrainingJob(
    model=build_model,
    optimizer=build_optimizer,
    dataset=build_dataset,
    train_step=train_step,
    schedule=schedule,
    eval_dataset=build_test_set,
    eval_step=eval_step,
    monitor="accuracy",
    mode="max",
    batch_size=20 if IS_SMALL else 128,
    epochs=7 if IS_SMALL else 164,
)
