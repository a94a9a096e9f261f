"""What `gpu.py` trains: a perceptron, a GPT of 124 million parameters, and a ResNet-50, on random data."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import TensorDataset


@dataclass(frozen=True, slots=True)
class Workload:
    """A model, its data and the size of a batch."""

    model: Callable[[], nn.Module]
    samples: Callable[[int, torch.Generator], tuple[torch.Tensor, torch.Tensor]]
    """So many inputs and labels."""
    batch_size: int
    num_batches: int
    """Of an epoch."""

    def dataset(self) -> TensorDataset:
        """One epoch's samples, the same in each process."""
        return TensorDataset(*self.samples(self.num_batches * self.batch_size, torch.Generator().manual_seed(0)))


def train_step(model: nn.Module, batch: Any) -> torch.Tensor:
    """The loss of logits for each sample, or for each token of each."""
    inputs, labels = batch
    return cross_entropy(model(inputs).flatten(0, -2), labels.flatten())


def mlp(*, is_small: bool) -> Workload:
    num_inputs, width, depth = (16, 64, 2) if is_small else (2048, 4096, 6)

    def model() -> nn.Module:
        layers: list[nn.Module] = [nn.Linear(num_inputs, width), nn.ReLU()]
        for _ in range(depth - 1):
            layers += [nn.Linear(width, width), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(width, 10))

    def samples(number: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.rand(number, num_inputs, generator=generator), torch.randint(10, (number,), generator=generator)

    return Workload(model, samples, *((32, 50) if is_small else (512, 100)))


class Block(nn.Module):
    """A layer of GPT-2."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.to_heads, self.from_heads = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.to_heads(self.first(x)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.from_heads(seen.transpose(1, 2).flatten(-2))
        fed: torch.Tensor = x + self.feed(self.second(x))
        return fed


class GPT(nn.Module):
    """GPT-2 without dropout, whose output layer shares the embedding's weight."""

    def __init__(self, *, vocabulary: int, context: int, width: int, depth: int, num_heads: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        logits: torch.Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def gpt(*, is_small: bool) -> Workload:
    vocabulary, context = (256, 16) if is_small else (50257, 512)
    width, depth, num_heads = (32, 2, 2) if is_small else (768, 12, 12)

    def model() -> nn.Module:
        return GPT(vocabulary=vocabulary, context=context, width=width, depth=depth, num_heads=num_heads)

    def samples(number: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        texts = torch.randint(vocabulary, (number, context + 1), generator=generator)
        return texts[:, :-1].contiguous(), texts[:, 1:].contiguous()

    return Workload(model, samples, *((4, 20) if is_small else (16, 60)))


class Bottleneck(nn.Module):
    """Three convolutions beside a shortcut."""

    def __init__(self, num_in: int, width: int, stride: int) -> None:
        super().__init__()
        num_out = 4 * width
        self.convolutions = nn.Sequential(
            *convolution(num_in, width, 1), nn.ReLU(inplace=True),
            *convolution(width, width, 3, stride), nn.ReLU(inplace=True),
            *convolution(width, num_out, 1),
        )  # fmt: skip
        is_same = num_in == num_out and stride == 1
        self.shortcut = nn.Identity() if is_same else nn.Sequential(*convolution(num_in, num_out, 1, stride))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.convolutions(x) + self.shortcut(x))


def convolution(num_in: int, num_out: int, size: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(num_in, num_out, size, stride, size // 2, bias=False), nn.BatchNorm2d(num_out)


def resnet50(*, is_small: bool) -> Workload:
    side = 32 if is_small else 224
    blocks, base = ((1, 1, 1, 1), 4) if is_small else ((3, 4, 6, 3), 64)

    def model() -> nn.Module:
        layers = [*convolution(3, base, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
        num_in = base
        for stage, number in enumerate(blocks):
            for index in range(number):
                width = base << stage
                layers.append(Bottleneck(num_in, width, 2 if stage and not index else 1))
                num_in = 4 * width
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(num_in, 1000))

    def samples(number: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.randint(1000, (number,), generator=generator)
        return torch.rand(number, 3, side, side, generator=generator), labels

    return Workload(model, samples, *((4, 20) if is_small else (64, 60)))


WORKLOADS: dict[str, Callable[..., Workload]] = {"mlp": mlp, "gpt": gpt, "resnet50": resnet50}
