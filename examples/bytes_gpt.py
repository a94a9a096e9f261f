"""A small GPT that writes Python, trained byte by byte on Python's standard library, without a download.

    elche run examples/bytes_gpt.py
    ELCHE_EXAMPLE_SIZE=medium elche run examples/bytes_gpt.py --ranks 2
    ELCHE_EXAMPLE_SIZE=medium ELCHE_EXAMPLE_OPTIMIZER=muon elche run examples/bytes_gpt.py --ranks 2

ELCHE_EXAMPLE_SIZE is "full" (3.3 million parameters, meant for GPUs) unless it says "medium" (0.6 million, minutes on a
CPU) or "small" (seconds). The second command, on two CPU cores with Python 3.11.7, ended after 6 minutes with 2.21 bits
per byte on the held-out files; predicting each byte from its frequency alone gives 4.6. The text comes from the Python
that runs the ranks, so all hosts need the same release of it.

ELCHE_EXAMPLE_OPTIMIZER is "adamw" unless it says "muon": then Muon steps the blocks' matrices, and AdamW all else.
"""

import math
import os
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.optim import AdamW, Optimizer
from torch.utils.data import TensorDataset

from elche_worker import InvalidJob, TrainingJob


@dataclass(frozen=True, kw_only=True)
class Size:
    """A size of model and training."""

    width: int
    num_blocks: int
    context: int
    """Length of the context, in bytes."""
    every: int
    """Trains every such window of the text: 1 all of them, 16 a sixteenth."""
    batch_size: int
    learning_rate: float
    epochs: int
    precision: str = "fp32"


SIZES = {
    "small": Size(width=64, num_blocks=2, context=64, every=16, batch_size=8, learning_rate=2e-3, epochs=2),
    "medium": Size(width=128, num_blocks=3, context=128, every=1, batch_size=8, learning_rate=1e-3, epochs=2),
    "full": Size(
        width=256, num_blocks=4, context=256, every=1, batch_size=32, learning_rate=5e-4, epochs=10, precision="bf16"
    ),
}
SIZE_NAME = os.environ.get("ELCHE_EXAMPLE_SIZE", "full")
if SIZE_NAME not in SIZES:
    raise InvalidJob(f"ELCHE_EXAMPLE_SIZE must be one of {', '.join(SIZES)}, not {SIZE_NAME!r}")
SIZE = SIZES[SIZE_NAME]
HEAD_WIDTH = 32
OPTIMIZER = os.environ.get("ELCHE_EXAMPLE_OPTIMIZER", "adamw")
if OPTIMIZER not in ("adamw", "muon"):
    raise InvalidJob(f"ELCHE_EXAMPLE_OPTIMIZER must be adamw or muon, not {OPTIMIZER!r}")


class Block(nn.Module):
    """Attention to earlier bytes, then two layers for each byte alone, each added to what came in.

    Shapes: N sequences, T bytes, H heads, D numbers per head, C = H * D.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x_ntc: Tensor) -> Tensor:
        projected = self.queries_keys_values(self.norm_1(x_ntc)).unflatten(2, (3, -1, HEAD_WIDTH))
        queries, keys, values = projected.permute(2, 0, 3, 1, 4)  # each (N, H, T, D)
        attended_nhtd = scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x_ntc = x_ntc + self.attended(attended_nhtd.transpose(1, 2).flatten(2))
        mapped_ntc: Tensor = self.mlp(self.norm_2(x_ntc))
        return x_ntc + mapped_ntc


class GPT(nn.Module):
    """Predicts at each byte the next one: bytes (N, T) to logits (N, T, 256)."""

    def __init__(self, width: int, num_blocks: int, context: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.positions = nn.Parameter(torch.empty(context, width))
        self.blocks = nn.Sequential(*(Block(width) for _ in range(num_blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.embedding.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=width**-0.5)

    def forward(self, bytes_nt: Tensor) -> Tensor:
        x_ntc = self.embedding(bytes_nt) + self.positions[: bytes_nt.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x_ntc)))
        return logits


@cache
def load_windows(*, is_held_out: bool) -> Tensor:
    """Windows of context + 1 bytes, (N, T + 1), so that each byte is predicted once; every tenth file is held out."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    chosen = [file for number, file in enumerate(files) if (number % 10 == 5) == is_held_out]
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in chosen)), dtype=torch.uint8)
    return text.unfold(0, SIZE.context + 1, SIZE.context)[:: SIZE.every]


def build_dataset() -> TensorDataset:
    return TensorDataset(load_windows(is_held_out=False))


def build_model() -> nn.Module:
    return GPT(SIZE.width, SIZE.num_blocks, SIZE.context)


def build_optimizer(model: GPT) -> list[Optimizer]:
    """AdamW; or Muon (torch 2.9 and later) for the blocks' matrices, with steps as long as AdamW's, beside it."""
    if OPTIMIZER == "adamw":
        return [AdamW(model.parameters(), lr=SIZE.learning_rate)]
    matrices = [one for one in model.blocks.parameters() if one.dim() == 2]
    known = set(matrices)
    others = [one for one in model.parameters() if one not in known]
    muon = torch.optim.Muon(matrices, lr=SIZE.learning_rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    return [muon, AdamW(others, lr=SIZE.learning_rate)]


def nats_per_byte(model: nn.Module, windows: Tensor) -> Tensor:
    bytes_nt = windows.long()
    return cross_entropy(model(bytes_nt[:, :-1]).flatten(0, 1), bytes_nt[:, 1:].flatten())


def train_step(model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
    loss = nats_per_byte(model, batch[0])
    return {"loss": loss, "bits_per_byte": loss / math.log(2)}


def evaluate(model: nn.Module) -> dict[str, float]:
    device = next(model.parameters()).device
    windows = load_windows(is_held_out=True)
    parts = torch.split(windows, SIZE.batch_size)
    nats = sum(nats_per_byte(model, part.to(device)).item() * len(part) for part in parts) / len(windows)
    return {"bits_per_byte": nats / math.log(2)}


job = TrainingJob(
    model=build_model,
    optimizer=build_optimizer,
    dataset=build_dataset,
    train_step=train_step,
    evaluate=evaluate,
    batch_size=SIZE.batch_size,
    epochs=SIZE.epochs,
    precision=SIZE.precision,
    max_grad_norm=1.0,
)
