"""A loop of one's own: `Trainer.step()` beside PyTorch's DistributedDataParallel, in alternating blocks of one run.

python benchmarks/own_loop.py                 # equal devices: what a step costs more than DDP's
python benchmarks/own_loop.py --slow 2.3      # rank 1 slowed: how much faster than DDP

Equal: two CPU ranks compute for real. Slowed: a device is a wait of as long as its samples take (10 ms for 32 on the
fast one), beside a small real model, so that two cores do not stand in each other's way.
"""

import argparse
import json
import os
import statistics
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from elche_worker.trainer import Trainer, TrainerConfig

SAMPLE_MS = 10 / 32


def new_model(width: int) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(nn.Linear(32, width), *layers, nn.Linear(width, 10))


def step_cost(rank: int, options: argparse.Namespace) -> None:
    begin(rank, options)
    ours, theirs = new_model(options.width), DistributedDataParallel(new_model(options.width))
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.01)
    trainer = Trainer.setup(ours, torch.optim.SGD(ours.parameters(), lr=0.01), TrainerConfig(max_anchor=0))
    inputs, labels = torch.randn(options.batch, 32), torch.randint(0, 10, (options.batch,))

    def block(is_ours: bool) -> float:
        dist.barrier()
        started_s = time.perf_counter()
        for _ in range(options.steps):
            if is_ours:
                cross_entropy(ours(inputs), labels).backward()
                trainer.step()
            else:
                cross_entropy(theirs(inputs), labels).backward()
                optimizer.step()
                optimizer.zero_grad()
        return (time.perf_counter() - started_s) / options.steps * 1000

    block(True), block(False)
    pairs = [
        (block(True), block(False)) if one % 2 else (block(False), block(True))[::-1] for one in range(options.pairs)
    ]
    if rank == 0:
        differences = [(one - other) / other * 100 for one, other in pairs]
        report = {
            "ours_ms": round(statistics.median(one for one, _ in pairs), 3),
            "ddp_ms": round(statistics.median(other for _, other in pairs), 3),
            "overhead_percent": round(statistics.median(differences), 2),
            "pairs_percent": [round(one, 1) for one in differences],
            "parameters": sum(one.numel() for one in ours.parameters()),
        }
        print(json.dumps(report), flush=True)


def unequal(rank: int, options: argparse.Namespace) -> None:
    begin(rank, options)
    factor = options.slow if rank == 1 else 1.0
    dataset = TensorDataset(torch.randn(64 * options.steps, 32), torch.randint(0, 10, (64 * options.steps,)))
    times: dict[str, float] = {}

    def compute(size: int) -> None:
        time.sleep(size * SAMPLE_MS * factor / 1000)

    theirs = DistributedDataParallel(new_model(32))
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.01)
    loader = DataLoader(dataset, batch_size=32, sampler=DistributedSampler(dataset))
    for _ in range(2):
        dist.barrier()
        started_s = time.perf_counter()
        for inputs, labels in loader:
            compute(len(inputs))
            cross_entropy(theirs(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        times["ddp"] = time.perf_counter() - started_s
    for name, config, batch_size in (
        ("shards", TrainerConfig(max_anchor=0), 64),
        ("el_che", TrainerConfig(max_anchor=10), 32),
    ):
        model = new_model(32)
        trainer = Trainer.setup(model, torch.optim.SGD(model.parameters(), lr=0.01), config)
        trainer.set_data_loader(
            DataLoader(dataset, batch_size=batch_size), forward_input="inputs", names=("inputs", "labels")
        )
        trainer.set_loss_fn(lambda context: cross_entropy(context.output, context.batch["labels"]))
        for epoch in range(2):
            dist.barrier()
            started_s = time.perf_counter()
            for batch in trainer.epoch(epoch):
                compute(batch.size)
                trainer.forward_batch(batch)
                trainer.step()
            times[name] = time.perf_counter() - started_s
        trainer.close()
    if rank == 0:
        rate = 1000 / SAMPLE_MS
        bound = len(dataset) / (rate + rate / options.slow)
        report = {
            "seconds": {name: round(value, 2) for name, value in times.items()},
            "no_communication_bound_s": round(bound, 2),
            "of_bound_percent": {name: round(bound / value * 100, 1) for name, value in times.items()},
            "times_faster_than_ddp": {name: round(times["ddp"] / times[name], 2) for name in ("shards", "el_che")},
        }
        print(json.dumps(report), flush=True)


def begin(rank: int, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(options.port))
    dist.init_process_group("gloo", rank=rank, world_size=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slow", type=float, default=0.0, help="how many times slower rank 1 is (default: equal)")
    parser.add_argument("--width", type=int, default=512, help="of the layers, for equal devices (default 512)")
    parser.add_argument("--batch", type=int, default=128, help="samples per rank, for equal devices (default 128)")
    parser.add_argument("--steps", type=int, default=60, help="per block (default 60)")
    parser.add_argument("--pairs", type=int, default=12, help="of blocks (default 12)")
    parser.add_argument("--port", type=int, default=29511, help="for the processes to meet (default 29511)")
    options = parser.parse_args()
    mp.spawn(unequal if options.slow else step_cost, (options,), nprocs=2)


if __name__ == "__main__":
    main()
