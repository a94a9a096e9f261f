"""Like microsoft/LoRA: adapters of low rank beside frozen weights of a language model. `save_frozen=False` stands for
`lora.lora_state_dict`: checkpoints and the model have the adapters alone, and `build_model` makes the same base each
time. The base is trained in some seconds on one part of Python's library, and adapted to another.
"""

import sysconfig
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from elche_worker import TrainingJob

LENGTH, WIDTH, RANK, ALPHA = 32, 64, 4, 8
GENERAL, SPECIAL = ("argparse", "ast", "typing"), ("colorsys", "fractions", "statistics", "decimal", "_pydecimal")


class LoRALinear(nn.Module):
    """A frozen linear layer, and what two small matrices add to it: nothing at first."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.lora_a = nn.Parameter(torch.randn(RANK, base.in_features) / base.in_features**0.5)
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x)
        return out + ALPHA / RANK * (x @ self.lora_a.T @ self.lora_b.T)


class ByteModel(nn.Module):
    """Bytes (N, T) to logits of each next one (N, T, 256): a recurrent network between two embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.hidden: nn.Module = nn.Linear(WIDTH, 2 * WIDTH)
        self.head: nn.Module = nn.Linear(2 * WIDTH, 256)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.relu(self.hidden(self.rnn(self.embedding(x))[0])))
        return logits


@cache
def load_windows(modules: tuple[str, ...]) -> Tensor:
    """Windows of 33 bytes of these modules, (N, 33)."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"".join((folder / f"{module}.py").read_bytes() for module in modules)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, LENGTH + 1, LENGTH)


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    windows = windows.long()
    return cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


@cache
def base_state() -> dict[str, Tensor]:
    """Stands for `torch.load("base.pt")`. It leaves the rank's random numbers as they were."""
    windows = load_windows(GENERAL)
    with torch.random.fork_rng(), torch.enable_grad():
        torch.manual_seed(0)
        model = ByteModel()
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        for part in torch.randperm(len(windows))[:9600].split(32):
            loss_of(model, windows[part]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


def build_model() -> ByteModel:
    model = ByteModel()
    model.load_state_dict(base_state())
    model.requires_grad_(False)
    model.hidden, model.head = LoRALinear(model.hidden), LoRALinear(model.head)
    return model


job = TrainingJob(
    model=build_model,
    optimizer=lambda model: torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=5e-3),
    dataset=lambda: TensorDataset(load_windows(SPECIAL)[::2]),
    train_step=lambda model, batch: loss_of(model, batch[0]),
    eval_dataset=lambda: TensorDataset(load_windows(SPECIAL)[1::8]),
    eval_step=lambda model, batch: {"nats_per_byte": loss_of(model, batch[0])},
    save_frozen=False,
    batch_size=32,
    epochs=5,
)
