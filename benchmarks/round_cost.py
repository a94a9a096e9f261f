"""What an overlapped round costs a rank's training thread: taking the snapshot, and adding the correction.

The other rank is made up, and answers at once: what is measured is this rank's own thread, on one core.

    python benchmarks/round_cost.py     # a few seconds
"""

import statistics
import time

import torch
from torch import nn

from elche_worker.collectives.averaging import Averaging
from elche_worker.collectives.header import AveragingOptions, Row
from elche_worker.collectives.operations import SoloCollectives
from elche_worker.model.layout import Layout

MODELS = {
    "150,000 values in 72 tensors": lambda: nn.Sequential(*[nn.Linear(64, 64) for _ in range(36)]),
    "100 MB in 48 tensors": lambda: nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(24)]),
}
ROUNDS = 10
WARM_UP = 2


class Pair(SoloCollectives):
    """A group of two, in which the other rank has the same values."""

    size = 2

    def all_gather(self, row: torch.Tensor) -> list[torch.Tensor]:
        return [row, row]

    def all_reduce(self, tensor: torch.Tensor) -> None:
        tensor.mul_(2)


def measure(model: nn.Module) -> float:
    """Median over rounds, in ms."""
    layout = Layout(model)
    averaging = Averaging(layout, AveragingOptions(merge="adascale"), wake=lambda: None)
    group, times_ms = Pair(attempt=1, generation=1, device=torch.device("cpu")), []
    for number in range(1, WARM_UP + ROUNDS + 1):
        row = Row(1, 1, number, layout.hash, 1, 1, 0, number, 0, number)
        began_s = time.perf_counter()
        averaging.start(group, row, keeps_snapshot=True)
        spent_s = time.perf_counter() - began_s
        while not averaging.is_done:
            time.sleep(0.001)
        with torch.no_grad():  # newer steps
            for parameter in model.parameters():
                parameter.add_(1e-4)
        began_s = time.perf_counter()
        averaging.complete(has_newer_steps=True)
        times_ms.append(1000 * (spent_s + time.perf_counter() - began_s))
    return statistics.median(times_ms[WARM_UP:])


def main() -> None:
    torch.set_num_threads(1)
    for name, new in MODELS.items():
        print(f"{name}: {measure(new()):.2f} ms a round on the training thread")


if __name__ == "__main__":
    main()
