"""Like torchvision's references/segmentation/train.py. Its confusion matrix and the reduction over processes became
`eval_step`, whose tensors are summed over all ranks, and `eval_metrics`, which makes the mean IoU of the sums; its
polynomial rate is `schedule`. Drawn discs and squares on noise stand for COCO.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate
from torch.utils.data import Dataset

from elche_worker import Progress, TrainingJob

SIZE, NUM_CLASSES = 32, 3


class Shapes(Dataset[tuple[Tensor, Tensor]]):
    """Images (1, 32, 32) and the class of each pixel (32, 32): 0 for the background, 1 in a disc, 2 in a square."""

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        source = torch.Generator().manual_seed(self.first + index)
        rows = torch.arange(SIZE)
        classes = torch.zeros(SIZE, SIZE, dtype=torch.long)
        for kind in (1, 2):
            y, x = torch.randint(6, SIZE - 6, (2,), generator=source)
            radius = torch.randint(4, 8, (), generator=source)
            down, right = (rows - y).abs().view(SIZE, 1), (rows - x).abs().view(1, SIZE)
            is_inside = down**2 + right**2 <= radius**2 if kind == 1 else torch.maximum(down, right) <= radius
            classes[is_inside] = kind
        image = 0.5 * (classes > 0) + 0.5 * torch.rand(SIZE, SIZE, generator=source)
        return image.unsqueeze(0), classes


class Net(nn.Module):
    """A fully convolutional network with one way around its coarse part: images to logits (N, 3, 32, 32)."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()

        def block(inputs: int, outputs: int, stride: int = 1) -> nn.Module:
            convolution = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
            return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())

        self.fine = block(1, width)
        self.coarse = nn.Sequential(
            block(width, 2 * width, 2), block(2 * width, 4 * width, 2), block(4 * width, 2 * width)
        )
        self.head = nn.Sequential(block(3 * width, width), nn.Conv2d(width, NUM_CLASSES, 1))

    def forward(self, images: Tensor) -> Tensor:
        fine = self.fine(images)
        coarse = interpolate(self.coarse(fine), size=images.shape[2:], mode="bilinear")
        logits: Tensor = self.head(torch.cat([fine, coarse], dim=1))
        return logits


def train_step(model: Net, batch: list[Tensor]) -> Tensor:
    images, classes = batch
    return cross_entropy(model(images), classes)


def eval_step(model: Net, batch: list[Tensor]) -> dict[str, Tensor]:
    """Pixels by their class (rows) and what was predicted (columns)."""
    images, classes = batch
    pairs = NUM_CLASSES * classes + model(images).argmax(1)
    return {"confusion": torch.bincount(pairs.flatten(), minlength=NUM_CLASSES**2).reshape(NUM_CLASSES, NUM_CLASSES)}


def eval_metrics(sums: dict[str, Tensor]) -> dict[str, Tensor]:
    confusion = sums["confusion"].double()
    hits = confusion.diagonal()
    iou = hits / (confusion.sum(0) + confusion.sum(1) - hits).clamp(min=1)
    return {"mean_iou": iou.mean(), "pixel_accuracy": hits.sum() / confusion.sum()}


def schedule(progress: Progress) -> float:
    return (1 - progress.fraction) ** 0.9


job = TrainingJob(
    model=Net,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4),
    dataset=lambda: Shapes(0, 1000),
    train_step=train_step,
    schedule=schedule,
    eval_dataset=lambda: Shapes(1_000_000, 200),
    eval_step=eval_step,
    eval_metrics=eval_metrics,
    monitor="mean_iou",
    mode="max",
    batch_size=16,
    epochs=6,
)
