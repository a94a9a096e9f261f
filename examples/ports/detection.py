"""Like torchvision's references/detection/train.py: images with any number of boxes, batches that its `collate_fn`
makes as lists, and a model that returns a dict of losses. The loop is gone, and its `MultiStepLR` is `schedule`; the
detector is a small CenterNet, and images of bright rectangles, drawn from their number, stand for COCO.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, l1_loss, max_pool2d
from torch.utils.data import Dataset

from elche_worker import TrainingJob

SIZE, STRIDE = 32, 4
CELLS = SIZE // STRIDE
Target = dict[str, Tensor]


class Rectangles(Dataset[tuple[Tensor, Target]]):
    """Images (1, 32, 32) with one to three rectangles, which do not overlap, and their boxes (M, 4): x, y, x, y."""

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Target]:
        source = torch.Generator().manual_seed(self.first + index)
        image, boxes = 0.3 * torch.rand(1, SIZE, SIZE, generator=source), []
        quarters = torch.randperm(4, generator=source)[: int(torch.randint(1, 4, (), generator=source))]
        for quarter in quarters.tolist():
            width, height = torch.randint(6, 13, (2,), generator=source).tolist()
            left = 16 * (quarter % 2) + int(torch.randint(16 - width, (), generator=source))
            top = 16 * (quarter // 2) + int(torch.randint(16 - height, (), generator=source))
            image[0, top : top + height, left : left + width] += 0.5
            boxes.append([left, top, left + width, top + height])
        return image, {"boxes": torch.tensor(boxes, dtype=torch.float32)}


def collate_fn(samples: list[tuple[Tensor, Target]]) -> tuple[list[Tensor], list[Target]]:
    images, targets = zip(*samples, strict=True)
    return list(images), list(targets)


class Detector(nn.Module):
    """A heat map of centres, and at each cell the distances of its box's sides from the cell's middle."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs, stride in ((1, width, 2), (width, width, 2), (width, 2 * width, 1), (2 * width, width, 1)):
            layers += [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        self.body = nn.Sequential(*layers, nn.Conv2d(width, 5, 1))
        nn.init.constant_(self.body[-1].bias, -2.0)
        middles = STRIDE * (torch.arange(CELLS) + 0.5)
        ys, xs = torch.meshgrid(middles, middles, indexing="ij")
        self.register_buffer("middles", torch.stack([xs, ys], dim=2), persistent=False)  # (8, 8, 2)

    def forward(self, images: list[Tensor], targets: list[Target] | None = None) -> dict[str, Tensor] | list[Tensor]:
        """Losses with targets; without, for each image the boxes that were found."""
        output = self.body(torch.stack(images))
        heat, sides = output[:, 0], output[:, 1:].exp().permute(0, 2, 3, 1)  # (N, 8, 8), (N, 8, 8, 4)
        boxes = torch.cat([self.middles - sides[..., :2], self.middles + sides[..., 2:]], dim=3)
        if targets is None:
            is_peak = (heat == max_pool2d(heat, 3, 1, 1)) & (heat > 0)
            return [found[peaks] for found, peaks in zip(boxes, is_peak, strict=True)]
        wanted, which, cells = torch.zeros_like(heat), [], []
        for index, target in enumerate(targets):
            cell = ((target["boxes"][:, :2] + target["boxes"][:, 2:]) / 2 / STRIDE).long()
            wanted[index, cell[:, 1], cell[:, 0]] = 1.0
            which += [index] * len(cell)
            cells.append(cell)
        x, y = torch.cat(cells).unbind(1)
        centres = binary_cross_entropy_with_logits(heat, wanted, pos_weight=torch.tensor(4.0, device=heat.device))
        return {
            "loss_centres": 5 * centres,
            "loss_boxes": 0.2 * l1_loss(boxes[which, y, x], torch.cat([target["boxes"] for target in targets])),
        }


def train_step(model: Detector, batch: tuple[list[Tensor], list[Target]]) -> dict[str, Tensor]:
    losses = model(*batch)
    return {"loss": sum(losses.values()), **losses}


def eval_step(model: Detector, batch: tuple[list[Tensor], list[Target]]) -> dict[str, Tensor]:
    """Counts, (3,): boxes found with an IoU above a half, boxes predicted, boxes there are."""
    counts = torch.zeros(3, dtype=torch.long)
    for found, target in zip(model(batch[0]), batch[1], strict=True):
        there = target["boxes"]
        sides = (
            torch.minimum(found[:, None, 2:], there[:, 2:]) - torch.maximum(found[:, None, :2], there[:, :2])
        ).clamp(0)
        of_found, of_there = ((one[:, 2:] - one[:, :2]).prod(1) for one in (found, there))
        common = sides.prod(2)
        hits = (common / (of_found[:, None] + of_there - common) > 0.5).any(0).sum()
        counts += torch.tensor([int(hits), len(found), len(there)])
    return {"counts": counts}


def eval_metrics(sums: dict[str, Tensor]) -> dict[str, Tensor]:
    hits, found, there = sums["counts"].double()
    return {"f1": 2 * hits / (found + there).clamp(min=1)}


job = TrainingJob(
    model=Detector,
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),
    dataset=lambda: Rectangles(0, 1600),
    train_step=train_step,
    eval_dataset=lambda: Rectangles(1_000_000, 200),
    eval_step=eval_step,
    eval_metrics=eval_metrics,
    collate_fn=collate_fn,
    schedule=lambda progress: 0.1 ** sum(progress.fraction >= epoch / 26 for epoch in (16, 22)),
    monitor="f1",
    mode="max",
    batch_size=16,
    epochs=8,
)
