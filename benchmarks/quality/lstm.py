"""An LSTM that predicts the next symbol of a chain with a memory of two."""

import torch
from quality._common import Samples, adam, job_of
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from virtual_tasks import Task

NUM_SYMBOLS, LENGTH, WIDTH = 8, 12, 32
NUM_SAMPLES, NUM_HELD_OUT = 8000, 1000


class NextSymbol(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_SYMBOLS, 16)
        self.lstm = nn.LSTM(16, WIDTH, batch_first=True)
        self.output = nn.Linear(WIDTH, NUM_SYMBOLS)

    def forward(self, symbols_nt: Tensor) -> Tensor:
        """Symbols are (N, T), logits (N, T, number of symbols)."""
        logits: Tensor = self.output(self.lstm(self.embedding(symbols_nt))[0])
        return logits


def samples(seed: int) -> Samples:
    """Symbols, (N, T), and those that come next."""
    noise = torch.Generator().manual_seed(seed)
    table = torch.softmax(2.0 * torch.randn(NUM_SYMBOLS, NUM_SYMBOLS, NUM_SYMBOLS, generator=noise), -1)
    symbols = [torch.randint(NUM_SYMBOLS, (NUM_SAMPLES + NUM_HELD_OUT,), generator=noise) for _ in range(2)]
    for _ in range(LENGTH - 1):
        symbols.append(torch.multinomial(table[symbols[-2], symbols[-1]], 1, generator=noise).squeeze(1))
    chain = torch.stack(symbols, 1)
    return chain[:, :-1], chain[:, 1:]


def loss(model: nn.Module, batch: Samples) -> Tensor:
    return cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


TASK = Task(
    title="LSTM, symbols of a chain",
    rate=2e-2,
    job=job_of(samples, NUM_HELD_OUT, model=NextSymbol, optimizer=adam, loss=loss, max_grad_norm=1.0, batch_size=16),
)
