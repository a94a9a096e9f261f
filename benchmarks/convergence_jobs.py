"""Jobs of virtual_convergence.py, which `elche run` takes too: handwritten digits, and Python's standard library as
text, byte by byte, by a causal convolution ("text") and by a small transformer.

ELCHE_TASK   "digits", "text", "transformer", or "muon", which is the transformer with that optimizer
ELCHE_RATE   factor on the learning rate, by default 1
"""

import math
import os
import sysconfig
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import StratifiedKFold
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.utils.data import TensorDataset

from elche_worker import Progress, TrainingJob

TASK = os.environ.get("ELCHE_TASK", "digits")
FOLD = 0
"""The fifth of the digits that is held out, from 0 to 4."""
RATE = float(os.environ.get("ELCHE_RATE", "1"))

NUM_COPIES = 20
DIGITS_WIDTH = 24
DIGITS_EPOCHS = 2
DIGITS_BATCH_SIZE = 64

CONTEXT = 8
"""Bytes that the text model sees, the last one included."""
WINDOW = 64
TEXT_EMBEDDING = 24
TEXT_WIDTH = 128
TEXT_BATCH_SIZE = 8
TEXT_BATCHES = 4000
NUM_HELD_OUT = 2000
"""Windows of the held-out files that are evaluated."""

WIDTH = 64
NUM_HEADS = 4
NUM_LAYERS = 2
TRANSFORMER_BATCH_SIZE = 8
TRANSFORMER_BATCHES = 2000


@cache
def load_fold() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images and labels, held-out images and labels; images are (N, 1, 8, 8) from 0 to 1."""
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(digits.target)
    folds = StratifiedKFold(5, shuffle=True, random_state=0).split(digits.images, digits.target)
    train, held_out = map(torch.from_numpy, list(folds)[FOLD])
    return images[train], labels[train], images[held_out], labels[held_out]


def build_digits(num_copies: int = NUM_COPIES) -> TensorDataset:
    """Copies of every training image, each moved by up to one pixel; how far depends on its index alone."""
    images, labels, _, _ = load_fold()
    windows = pad(images, (1, 1, 1, 1)).unfold(2, 8, 1).unfold(3, 8, 1)  # (N, 1, 3, 3, 8, 8): every shift
    source = torch.arange(len(images)).repeat(num_copies)
    down, right = torch.randint(3, (2, len(source)), generator=torch.Generator().manual_seed(0))
    return TensorDataset(windows[source, :, down, right], labels[source])


def build_digits_model() -> nn.Module:
    torch.set_num_threads(1)
    return nn.Sequential(
        nn.Conv2d(1, DIGITS_WIDTH, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(DIGITS_WIDTH, DIGITS_WIDTH, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(DIGITS_WIDTH, 2 * DIGITS_WIDTH, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * DIGITS_WIDTH * 4 * 4, 10),
    )


def train_digits(model: nn.Module, batch: list[Tensor]) -> Tensor:
    images, labels = batch
    return cross_entropy(model(images), labels)


def evaluate_digits(model: nn.Module) -> dict[str, float]:
    _, _, images, labels = load_fold()
    return {"accuracy": (model(images).argmax(1) == labels).double().mean().item()}


class TextModel(nn.Module):
    """Predicts each byte from the `CONTEXT` bytes before it: one hidden layer over their embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, TEXT_EMBEDDING)
        self.hidden = nn.Conv1d(TEXT_EMBEDDING, TEXT_WIDTH, CONTEXT)
        self.output = nn.Linear(TEXT_WIDTH, 256)

    def forward(self, bytes_nt: Tensor) -> Tensor:
        """Bytes are (N, T), logits (N, T, 256)."""
        embedded_net = pad(self.embedding(bytes_nt).transpose(1, 2), (CONTEXT - 1, 0))
        logits: Tensor = self.output(torch.relu(self.hidden(embedded_net)).transpose(1, 2))
        return logits


def load_windows(*, is_held_out: bool) -> Tensor:
    """Windows of `WINDOW` + 1 bytes, (N, T + 1): every tenth file of the standard library is held out."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    chosen = [file for number, file in enumerate(files) if (number % 10 == 5) == is_held_out]
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in chosen)), dtype=torch.uint8)
    num_windows = len(text) // (WINDOW + 1)
    return text[: num_windows * (WINDOW + 1)].view(num_windows, WINDOW + 1)


def build_text(num_windows: int) -> TensorDataset:
    windows = load_windows(is_held_out=False)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))
    return TensorDataset(windows[order[:num_windows]])


def build_text_model() -> nn.Module:
    torch.set_num_threads(1)
    return TextModel()


def train_text(model: nn.Module, batch: list[Tensor]) -> Tensor:
    bytes_nt = batch[0].long()
    return cross_entropy(model(bytes_nt[:, :-1]).flatten(0, 1), bytes_nt[:, 1:].flatten())


def evaluate_text(model: nn.Module) -> dict[str, float]:
    windows = load_windows(is_held_out=True)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))
    parts = windows[order[:NUM_HELD_OUT]].split(250)
    return {"nats_per_byte": sum(train_text(model, [part]).item() * len(part) for part in parts) / NUM_HELD_OUT}


class Transformer(nn.Module):
    """Predicts each byte from all those before it in a window: pre-norm blocks, learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(WINDOW, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, NUM_HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, NUM_LAYERS, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.output = nn.Linear(WIDTH, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(WINDOW), persistent=False)

    def forward(self, bytes_nt: Tensor) -> Tensor:
        """Bytes are (N, T), logits (N, T, 256)."""
        hidden_ntc = self.blocks(self.embedding(bytes_nt) + self.positions, mask=self.mask, is_causal=True)
        logits: Tensor = self.output(hidden_ntc)
        return logits


def build_transformer() -> nn.Module:
    torch.set_num_threads(1)
    return Transformer()


def build_optimizer(learning_rate: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.AdamW(model.parameters(), lr=RATE * learning_rate)


def build_muon(learning_rate: float) -> Callable[[nn.Module], list[torch.optim.Optimizer]]:
    """Muon for the matrices in a transformer's blocks, with steps as long as AdamW's, and AdamW for all else."""

    def build(model: nn.Module) -> list[torch.optim.Optimizer]:
        assert isinstance(model, Transformer)
        matrices = [one for one in model.blocks.parameters() if one.dim() == 2]
        known, rate = set(matrices), RATE * learning_rate
        others = [one for one in model.parameters() if one not in known]
        muon = torch.optim.Muon(matrices, lr=rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
        return [muon, torch.optim.AdamW(others, lr=rate)]

    return build


def warm_up_and_decay(num_batches: int) -> Callable[[Progress], float]:
    """Up over the first 2 %, then down to 0 in a straight line."""
    return lambda now: min(1.0, (now.step + 1) / (0.02 * num_batches), max(0.0, 1 - now.step / num_batches))


def digits_job(length: float = 1.0) -> TrainingJob:
    """`length`: how many times the usual number of samples."""
    num_copies = round(NUM_COPIES * length)
    num_batches = DIGITS_EPOCHS * math.ceil(len(load_fold()[0]) * num_copies / DIGITS_BATCH_SIZE)
    return TrainingJob(
        model=build_digits_model,
        optimizer=build_optimizer(3e-3),
        dataset=lambda: build_digits(num_copies),
        train_step=train_digits,
        evaluate=evaluate_digits,
        schedule=warm_up_and_decay(num_batches),
        batch_size=DIGITS_BATCH_SIZE,
        epochs=DIGITS_EPOCHS,
    )


def _of_text(model: Callable[[], nn.Module], rate: float, batch_size: int, num_batches: int) -> TrainingJob:
    return TrainingJob(
        model=model,
        optimizer=build_optimizer(rate),
        dataset=lambda: build_text(num_batches * batch_size),
        train_step=train_text,
        evaluate=evaluate_text,
        schedule=warm_up_and_decay(num_batches),
        max_grad_norm=1.0,
        batch_size=batch_size,
        epochs=1,
    )


def text_job(length: float = 1.0) -> TrainingJob:
    """`length`: how many times the usual number of samples."""
    return _of_text(build_text_model, 1.5e-2, TEXT_BATCH_SIZE, round(TEXT_BATCHES * length))


def transformer_job(length: float = 1.0) -> TrainingJob:
    """`length`: how many times the usual number of samples."""
    return _of_text(build_transformer, 3e-3, TRANSFORMER_BATCH_SIZE, round(TRANSFORMER_BATCHES * length))


def muon_job(length: float = 1.0) -> TrainingJob:
    """The transformer with Muon inside."""
    return replace(transformer_job(length), optimizer=build_muon(3e-3))


JOBS = {"digits": digits_job, "text": text_job, "transformer": transformer_job, "muon": muon_job}
job = JOBS[TASK]()
