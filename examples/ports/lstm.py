"""Like pytorch/examples word_language_model/main.py: `batchify` lays the text out in columns, and the hidden state
goes from each piece of them to the next. Ranks have columns of their own, as their hidden states belong to these, so
the loop takes no loader of elche's; the hidden state is registered. The bytes of Python's library stand for
WikiText-2.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from elche_worker import Trainer, TrainerConfig

BPTT, WIDTH = 32, 96


class Stream:
    """This rank's columns of the text (T, N), where in them it is, and the hidden state there. An iterator: so a
    checkpoint has the position at the end of a step, and not with the next piece taken.
    """

    def __init__(self, columns: Tensor, device: torch.device) -> None:
        self.columns, self.device = columns, device
        self.position = 0
        self.hidden: list[Tensor] = []

    def state_dict(self) -> dict[str, int | list[Tensor]]:
        return {"position": self.position, "hidden": self.hidden}

    def load_state_dict(self, state: dict[str, int | list[Tensor]]) -> None:
        """The hidden state is dropped, as at the text's start, when it is of another number of columns."""
        self.position, hidden = state["position"], list(state["hidden"])
        self.hidden = [one.to(self.device) for one in hidden if one.shape[1] == self.columns.shape[1]]

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        """The next piece and its targets, (32, N); at the text's end the first one, without a hidden state."""
        if self.position + BPTT + 1 > len(self.columns):
            self.position, self.hidden = 0, []
        piece = self.columns[self.position : self.position + BPTT + 1].long().to(self.device)
        self.position += BPTT
        return piece[:-1], piece[1:]


class RNNModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Embedding(256, WIDTH)
        self.rnn = nn.LSTM(WIDTH, WIDTH)
        self.decoder = nn.Linear(WIDTH, 256)

    def forward(self, text: Tensor, hidden: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        output, following = self.rnn(self.encoder(text), tuple(hidden) or None)
        return self.decoder(output), [one.detach() for one in following]


def batchify(name: str, num_columns: int) -> Tensor:
    """The modules' bytes in columns, (T, N)."""
    names = {"train": ("argparse", "ast", "inspect"), "val": ("dataclasses",)}
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"".join((folder / f"{module}.py").read_bytes() for module in names[name])
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return data[: len(data) // num_columns * num_columns].view(num_columns, -1).T


@torch.no_grad()
def evaluate(trainer: Trainer, columns: Tensor) -> float:
    """Nats per byte of the held-out text; every rank reads all of it."""
    trainer.model.eval()
    stream, losses = Stream(columns, trainer.device), []
    for _ in range((len(columns) - 1) // BPTT):
        text, targets = next(stream)
        output, stream.hidden = trainer.model(text, stream.hidden)
        losses.append(cross_entropy(output.flatten(0, 1), targets.flatten()).item())
    trainer.model.train()
    return sum(losses) / len(losses)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch-size", type=int, default=16, help="columns of all ranks together")
    parser.add_argument("--seed", type=int, default=1111)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    model, held_out = RNNModel(), batchify("val", 10)
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    with Trainer.setup(model, optimizer, TrainerConfig(max_grad_norm=0.25)) as trainer:
        columns = batchify("train", options.batch_size)[:, trainer.rank :: trainer.world_size]
        stream = Stream(columns, trainer.device)
        trainer.register_state(stream=stream)
        while trainer.num_steps < options.steps:
            text, targets = next(stream)
            output, stream.hidden = model(text, stream.hidden)
            cross_entropy(output.flatten(0, 1), targets.flatten()).backward()
            trainer.step(samples=columns.shape[1])
            if trainer.num_steps % 100 == 0 or trainer.num_steps == options.steps:
                val_loss = evaluate(trainer, held_out)
                trainer.report(val_loss=val_loss)
                if trainer.rank == 0:
                    print(f"step {trainer.num_steps}: val_loss {val_loss:.3f}", flush=True)
        if trainer.rank == 0:
            torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
