"""What compressed averages cost: processor time, and time on a link, of two ranks' average of a model.

The other rank is an echo of this one; its link is a sleep for the bytes that it would take, and for the latency.
Prints a line for each kind of compression. "At once" encodes whole chunks instead of what fits a core's cache.

    python benchmarks/compression.py --mb 100 --rate-mbit 50 --latency-ms 20
"""

import argparse
import time

import torch

from elche_worker.collectives import compression
from elche_worker.collectives.codecs import CODECS
from elche_worker.collectives.operations import SoloCollectives

NUM_RUNS = 3


class Echo(SoloCollectives):
    """A group of two whose other rank sends what this one does."""

    size = 2

    def __init__(self, bytes_per_s: float, latency_s: float) -> None:
        super().__init__(attempt=1, generation=1, device=torch.device("cpu"))
        self._bytes_per_s, self._latency_s = bytes_per_s, latency_s

    def _send(self, row: torch.Tensor) -> None:
        if self._bytes_per_s:
            time.sleep(row.numel() / self._bytes_per_s + self._latency_s)

    def all_to_all(self, rows: torch.Tensor) -> torch.Tensor:
        self._send(rows[0])
        return rows[:1].repeat(2, 1)

    def all_gather(self, row: torch.Tensor) -> list[torch.Tensor]:
        self._send(row)
        return [row, row.clone()]


def measured(codec: str, length: int, group: Echo) -> tuple[float, float]:
    """The least seconds of processor and on the wall of an average."""
    compressed, costs = compression.Compression(length, group), []
    for _ in range(NUM_RUNS):
        change = torch.randn(length)
        began_s, worked_s = time.perf_counter(), time.process_time()
        compressed.average(change, [0.5, 0.5], group, codec=CODECS[codec]())
        costs.append((time.process_time() - worked_s, time.perf_counter() - began_s))
    return min(worked for worked, _ in costs), min(wall for _, wall in costs)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mb", type=float, default=100.0, help="megabytes of float32")
    parser.add_argument("--rate-mbit", type=float, default=50.0)
    parser.add_argument("--latency-ms", type=float, default=20.0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    length, cached = int(arguments.mb * 1e6) // 4, compression.CACHED
    link = Echo(arguments.rate_mbit * 1e6 / 8, arguments.latency_ms / 1000)
    for codec in CODECS:
        compression.CACHED = length
        at_once, _ = measured(codec, length, Echo(0.0, 0.0))
        compression.CACHED = cached
        worked, _ = measured(codec, length, Echo(0.0, 0.0))
        _, wall = measured(codec, length, link)
        print(f"{codec}: {worked:.2f} s of processor ({at_once:.2f} at once), {wall:.2f} s with the link", flush=True)


if __name__ == "__main__":
    main()
