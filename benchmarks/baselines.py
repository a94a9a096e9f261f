"""What plain torch.distributed makes of two unequal ranks: the figures that elche is held against.

Each rank's batch is padded to its own duration, as in `padded.py`. Three ways to train are compared by what
they reach of the bound without communication: the sum of what each rank makes alone, in the same run.

    ddp     gradients all-reduced after every batch
    equal   local SGD, parameters averaged every 10 batches of each rank
    static  local SGD, as many batches between averagings as suit each rank's speed, set by hand

With --swap the durations change places half way, and only what follows is measured: 3 rounds are left out,
then at least 10 are timed.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from padded import BATCH_SIZE, NUM_CLASSES, NUM_FEATURES, build_model, build_optimizer, wait_until
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

NUM_ALONE_BATCHES = 100
NUM_SETTLING_ROUNDS = 3
MIN_TIMED_ROUNDS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What was asked for on the command line; tuples hold one value per rank."""

    seconds: float
    pad_ms: tuple[float, ...]
    static_steps: tuple[int, ...]
    swap: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A way to train: each rank's batches per round, then parameters averaged; or gradients shared."""

    name: str
    steps: tuple[int, ...]
    shares_gradients: bool = False


class PaddedRank:
    """One rank's model and its padded batches."""

    def __init__(self, rank: int, pad_ms: tuple[float, ...]) -> None:
        torch.manual_seed(0)
        self.rank = rank
        self.pad_ms = pad_ms
        self.model = build_model()
        self.optimizer = build_optimizer(self.model)
        self.inputs = torch.randn(BATCH_SIZE, NUM_FEATURES)
        self.labels = torch.randint(NUM_CLASSES, (BATCH_SIZE,))

    def step(self, before_update: Callable[[], None] | None = None) -> None:
        """Trains one batch; only the forward pass is padded, backward and update come on top."""
        end_s = time.perf_counter() + self.pad_ms[self.rank] / 1000
        self.optimizer.zero_grad()
        loss = cross_entropy(self.model(self.inputs), self.labels)
        wait_until(end_s)
        loss.backward()
        if before_update:
            before_update()
        self.optimizer.step()

    def round(self, method: Method) -> None:
        """Trains this rank's batches of one round, and makes the ranks agree."""
        if method.shares_gradients:
            self.step(before_update=self.share_gradients)
            return
        for _ in range(method.steps[self.rank]):
            self.step()
        self.average_parameters(method.steps[self.rank] / sum(method.steps))

    def share_gradients(self) -> None:
        gradients = [parameter.grad for parameter in self.model.parameters()]
        mean = all_reduced(parameters_to_vector(gradients) / len(self.pad_ms))
        vector_to_parameters(mean, gradients)

    @torch.no_grad()
    def average_parameters(self, weight_fraction: float) -> None:
        parameters = list(self.model.parameters())
        vector_to_parameters(all_reduced(parameters_to_vector(parameters) * weight_fraction), parameters)


def all_reduced(values: Tensor) -> Tensor:
    dist.all_reduce(values)
    return values


def batch_ms_alone(rank: int, options: Options) -> list[float]:
    """Mean duration of a batch of each rank when it never communicates."""
    padded = PaddedRank(rank, options.pad_ms)
    padded.step()
    dist.barrier()
    start_s = time.perf_counter()
    for _ in range(NUM_ALONE_BATCHES):
        padded.step()
    by_rank = torch.zeros(len(options.pad_ms), dtype=torch.float64)
    by_rank[rank] = 1000 * (time.perf_counter() - start_s) / NUM_ALONE_BATCHES
    return all_reduced(by_rank).tolist()


def samples_per_s(rank: int, method: Method, options: Options) -> float:
    """Samples of all ranks per second of the timed rounds."""
    padded = PaddedRank(rank, options.pad_ms)
    padded.round(method)
    dist.barrier()
    if options.swap:
        for _ in range(num_rounds(method, options.pad_ms, options.seconds / 2)):
            padded.round(method)
        padded.pad_ms = options.pad_ms[::-1]
        for _ in range(NUM_SETTLING_ROUNDS):
            padded.round(method)
    timed_s = options.seconds / 2 if options.swap else options.seconds
    num_timed = max(MIN_TIMED_ROUNDS, num_rounds(method, padded.pad_ms, timed_s))
    start_s = time.perf_counter()
    for _ in range(num_timed):
        padded.round(method)
    return num_timed * sum(method.steps) * BATCH_SIZE / (time.perf_counter() - start_s)


def num_rounds(method: Method, pad_ms: tuple[float, ...], seconds: float) -> int:
    """Rounds that fit: each lasts as long as its last rank. Counted, not timed, so that all ranks agree."""
    round_ms = max(steps * ms for steps, ms in zip(method.steps, pad_ms, strict=True))
    return int(1000 * seconds / round_ms)


def compare(rank: int, store_path: str, options: Options) -> None:
    """One rank's process: runs every method; rank 0 prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store_path}", rank=rank, world_size=len(options.pad_ms))
    alone_ms = batch_ms_alone(rank, options)
    bound = sum(1000 * BATCH_SIZE / ms for ms in alone_ms)
    say = print if rank == 0 else lambda *_, **__: None
    say(f"alone   {bound:7.1f} samples/s   {' and '.join(f'{ms:.2f}' for ms in alone_ms)} ms per batch")
    methods = {}
    for method in (
        Method(name="ddp", steps=(1,) * len(options.pad_ms), shares_gradients=True),
        Method(name="equal", steps=(10,) * len(options.pad_ms)),
        Method(name="static", steps=options.static_steps),
    ):
        speed = samples_per_s(rank, method, options)
        methods[method.name] = {"samples_per_s": round(speed, 1), "bound_fraction": round(speed / bound, 4)}
        say(f"{method.name:7} {speed:7.1f} samples/s   {speed / bound:.1%} of the bound", flush=True)
    say(json.dumps({"swap": options.swap, "batch_ms_alone": alone_ms, "bound": bound, "methods": methods}))
    dist.destroy_process_group()


def parse_options() -> Options:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--seconds", type=float, default=20, help="duration of each method (20)")
    parser.add_argument("--pad-ms", type=float, nargs=2, default=(25, 57.5), help="of a batch (25 57.5)")
    parser.add_argument("--static-steps", type=int, nargs=2, default=(23, 10), help="per round (23 10)")
    parser.add_argument("--swap", action="store_true", help="swap the durations half way")
    given = parser.parse_args()
    return Options(
        seconds=given.seconds,
        pad_ms=tuple(given.pad_ms),
        static_steps=tuple(given.static_steps),
        swap=given.swap,
    )


def main() -> None:
    options = parse_options()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(compare, (f"{folder}/store", options), nprocs=len(options.pad_ms))


if __name__ == "__main__":
    main()
