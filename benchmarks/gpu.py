"""What elche costs and gives on one GPU: a table as JSON (stdout, last line) and markdown (above it).

Each figure is of processes of its own, one after the other; what is compared is run in turns.

    make bench-gpu                                       # all of it, some ten minutes
    python benchmarks/gpu.py --only loop,precision
    python benchmarks/gpu.py --device cpu --small        # to see that it works
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_models import WORKLOADS, train_step
from programs import elche_run
from torch import nn
from torch.utils.data import TensorDataset

from elche_worker import TrainingJob

IS_SMALL = os.environ.get("ELCHE_BENCH_SMALL") == "1"
MODEL = os.environ.get("ELCHE_BENCH_MODEL", "mlp")
WORKLOAD = WORKLOADS[MODEL](is_small=IS_SMALL)
BATCH_SIZE = WORKLOAD.batch_size
EPOCHS = 2 if IS_SMALL else 10 if MODEL == "mlp" else 5
OWN_HOSTS = Path(__file__).resolve().parents[1] / "tests" / "gpu" / "own_hosts"
KIND = os.environ.get("ELCHE_BENCH_KIND", "resident")
"""Of the data set: kept on the device, or fetched from the host batch by batch."""


class Fetched(torch.utils.data.Dataset[int]):
    """Samples in the host's memory, of which `collate` takes a batch at once."""

    def __init__(self, whole: TensorDataset) -> None:
        self.whole = whole

    def __len__(self) -> int:
        return len(self.whole)

    def __getitem__(self, index: int) -> int:
        return index


def build_dataset() -> Any:
    whole = WORKLOAD.dataset()
    return whole if KIND == "resident" else FETCHED.setdefault("whole", Fetched(whole))


FETCHED: dict[str, Fetched] = {}


def collate(indices: list[int]) -> list[torch.Tensor]:
    return [tensor[indices] for tensor in FETCHED["whole"].whole.tensors]


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)


def peak(model: nn.Module) -> dict[str, float]:
    parameters = sum(one.nbytes for one in model.parameters())
    used = torch.cuda.max_memory_allocated() if next(model.parameters()).is_cuda else 0
    return {"peak_p": used / parameters, "p_mb": parameters / 1e6}


job = TrainingJob(
    model=WORKLOAD.model,
    optimizer=build_optimizer,
    dataset=build_dataset,
    collate_fn=collate if KIND == "fetched" else None,
    train_step=train_step,
    evaluate=peak if os.environ.get("ELCHE_BENCH_MEMORY") == "1" else None,
    batch_size=BATCH_SIZE,
    epochs=EPOCHS,
    checkpoint_every_minutes=None,
)


# In processes of their own


def bare(device: torch.device, how: str) -> float:
    """Milliseconds per batch of a plain loop whose data are on the device: the least that training can take. `how` has
    the words bf16 and compiled, or not.
    """
    torch.manual_seed(0)
    model = WORKLOAD.model().to(device)
    called: Any = torch.compile(model) if "compiled" in how else model
    inputs, labels = (tensor.to(device) for tensor in build_dataset().tensors)
    optimizer = build_optimizer(model)
    times_s = []
    for _ in range(EPOCHS):
        started_s = time.perf_counter()
        order = torch.randperm(len(inputs), device=device)
        for part in order.split(BATCH_SIZE):
            with torch.autocast(device.type, torch.bfloat16, enabled="bf16" in how):
                loss = train_step(called, [inputs[part], labels[part]])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times_s.append(time.perf_counter() - started_s)
    return batch_ms(times_s)


def batch_ms(epochs_s: list[float], num_batches: int = WORKLOAD.num_batches) -> float:
    """Milliseconds per batch in epochs after the first, which warms up."""
    return statistics.mean(epochs_s[1:]) * 1000 / num_batches


def alone(device: str, *, prefetches: bool) -> float:
    """Milliseconds per batch of `job.run()`, without its first epoch."""
    from dataclasses import replace

    from elche_worker.data import prefetch

    if not prefetches:
        prefetch.MAX_DEPTH = 0
    times: list[float] = []
    told = replace(job, metrics_fn=lambda metrics: times.append(metrics.duration_s))
    told.run(device=device)
    return batch_ms(times)


# What is measured


class Bench:
    """Runs processes on a device, and keeps the figures."""

    def __init__(self, device: str, num_pairs: int) -> None:
        self.device = device
        self.num_pairs = num_pairs
        self.rows: list[dict[str, Any]] = []

    def add(self, what: str, **figures: float | None) -> None:
        rounded = {name: round(value, 4) if value is not None else None for name, value in figures.items()}
        self.rows.append({"what": what, **rounded})
        print(self.rows[-1], file=sys.stderr, flush=True)

    def child(self, *arguments: str, kind: str = "resident", **env: str) -> float:
        command = [sys.executable, __file__, *arguments, "--device", self.device]
        done = subprocess.run(command, capture_output=True, text=True, env=_environment(kind, **env), check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
        return float(done.stdout.splitlines()[-1])

    def job(self, *more: str, ranks: int = 1, **env: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The result, and the rounds after the second, of a job on the device."""
        options = ["--ranks", str(ranks), "--device", self.device, *more]
        result, record = elche_run(__file__, *options, environment=_environment("resident", **env))
        result["epochs_s"] = [one["duration_s"] for one in record["epoch_reports"]]
        return result, record["round_reports"][2:]


def _environment(kind: str, **more: str) -> dict[str, str]:
    small = "1" if IS_SMALL else "0"
    return {**os.environ, "ELCHE_BENCH_KIND": kind, "ELCHE_BENCH_SMALL": small, "OMP_NUM_THREADS": "1", **more}


def measure_loop(bench: Bench) -> None:
    add_pairs(bench, "one rank beside a bare loop", "fp32", [])


def measure_models(bench: Bench) -> None:
    """Models as people train them, in bf16, as they are and compiled."""
    for model in ("gpt", "resnet50"):
        for how, options in (("bf16", []), ("bf16 compiled", ["--compile", "true"])):
            given = ["--precision", "bf16", *options]
            add_pairs(bench, f"one rank beside a bare loop, {model}, {how}", how, given, model=model)


def add_pairs(bench: Bench, what: str, how: str, options: list[str], *, model: str = MODEL) -> None:
    pairs = []
    num_batches = WORKLOADS[model](is_small=IS_SMALL).num_batches
    for _ in range(bench.num_pairs):
        without = bench.child("--bare", how, ELCHE_BENCH_MODEL=model)
        result, _ = bench.job(*options, ELCHE_BENCH_MODEL=model)
        pairs.append((without, batch_ms(result["epochs_s"], num_batches)))
    costs = [ours / without - 1 for without, ours in pairs]
    bench.add(
        what,
        bare_ms=statistics.median(one for one, _ in pairs),
        elche_ms=statistics.median(one for _, one in pairs),
        cost=statistics.median(costs),
        least_cost=min(costs),
        most_cost=max(costs),
    )


def measure_rounds(bench: Bench) -> None:
    """An outer optimizer makes one rank's rounds whole: without, it averages nothing."""
    add_rounds(bench, "one rank", *bench.job())
    for averaging in ("blocking", "overlapped"):
        whole = bench.job("--averaging", averaging, "--outer-optimizer", "nesterov")
        add_rounds(bench, f"one rank, outer optimizer, {averaging}", *whole)


def measure_nccl(bench: Bench) -> None:
    """Two ranks on one device, each as if on a host of its own: NCCL goes through sockets (tests/gpu/own_hosts)."""
    apart = {"PYTHONPATH": f"{OWN_HOSTS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    backend = "nccl" if bench.device.startswith("cuda") else "gloo"
    for averaging in ("blocking", "overlapped"):
        options = ["--averaging", averaging, "--slow", "1=2.3", "--backend", backend]
        add_rounds(
            bench, f"two ranks, one 2.3 times slower, over NCCL by sockets, {averaging}",
            *bench.job(*options, ranks=2, **apart),
        )  # fmt: skip


def measure_memory(bench: Bench) -> None:
    """What the peak of a rank's memory is, in parameters of float32."""
    for memory in ("device", "host"):
        for what in ("blocking", "overlapped"):
            options = ["--averaging", what, "--memory", memory, "--outer-optimizer", "nesterov"]
            result, _ = bench.job(*options, ELCHE_BENCH_MEMORY="1")
            bench.add(f"memory={memory}, outer optimizer, {what}", **result["metrics"])
    result, _ = bench.job(ELCHE_BENCH_MEMORY="1")
    bench.add("memory, one rank", **result["metrics"])


def measure_unequal(bench: Bench) -> None:
    for averaging in ("blocking", "overlapped"):
        result, rounds = bench.job("--averaging", averaging, "--slow", "1=2.3", "--backend", "gloo", ranks=2)
        add_rounds(bench, f"two ranks, one 2.3 times slower, on one device over gloo, {averaging}", result, rounds)


def add_rounds(bench: Bench, what: str, result: dict[str, Any], rounds: list[dict[str, Any]]) -> None:
    waited = [max(one["rank_waited_ms"]) for one in rounds if one["rank_waited_ms"]]
    bench.add(
        what,
        batch_ms=batch_ms(result["epochs_s"]),
        first_epoch_s=result["epochs_s"][0],
        samples_per_s=result["samples_per_s"],
        bound_fraction=result["bound_fraction"],
        rounds=result["rounds"],
        averaging_ms=statistics.median(one["sync_ms"] for one in rounds) if rounds else None,
        waited_ms=statistics.median(waited) if waited else None,
    )


def measure_checkpoints(bench: Bench) -> None:
    pairs, kept = [], []
    for _ in range(bench.num_pairs):
        without, _ = bench.job()
        with_some, _ = bench.job("--checkpoint-every-minutes", "0.03")
        pairs.append((without["samples_per_s"], with_some["samples_per_s"]))
        kept += with_some["checkpoints"]
    bench.add(
        "checkpoints, one every 1.8 s",
        samples_per_s_without=statistics.median(one for one, _ in pairs),
        samples_per_s_with=statistics.median(one for _, one in pairs),
        cost=statistics.median(1 - one / other for other, one in pairs),
        write_s=statistics.median(one["duration_s"] for one in kept) if kept else None,
        size_mb=kept[-1]["size_bytes"] / 1e6 if kept else None,
    )


def measure_prefetch(bench: Bench) -> None:
    pairs = [
        (bench.child("--alone", "off", kind="fetched"), bench.child("--alone", "on", kind="fetched"))
        for _ in range(bench.num_pairs)
    ]
    bench.add(
        "prefetch, batches fetched from the host",
        off_ms=statistics.median(one for one, _ in pairs),
        on_ms=statistics.median(one for _, one in pairs),
        gain=statistics.median(1 - on / off for off, on in pairs),
    )


def measure_precision(bench: Bench) -> None:
    for precision in ("fp32", "bf16", "fp16"):
        result, _ = bench.job("--precision", precision)
        bench.add(f"precision {precision}", batch_ms=batch_ms(result["epochs_s"]))
    result, _ = bench.job("--precision", "bf16", "--compile", "true")
    bench.add("precision bf16, compiled", batch_ms=batch_ms(result["epochs_s"]))


PARTS: dict[str, Callable[[Bench], None]] = {
    "loop": measure_loop,
    "models": measure_models,
    "rounds": measure_rounds,
    "nccl": measure_nccl,
    "memory": measure_memory,
    "unequal": measure_unequal,
    "checkpoints": measure_checkpoints,
    "prefetch": measure_prefetch,
    "precision": measure_precision,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0", help="such as cuda:0 (the default) or cpu")
    parser.add_argument("--pairs", type=int, default=3, help="how many pairs of what is compared (default 3)")
    parser.add_argument("--only", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--small", action="store_true", help="little of everything, to see that it works")
    parser.add_argument("--bare", help=argparse.SUPPRESS)
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.small:
        os.environ["ELCHE_BENCH_SMALL"] = "1"
        os.execv(sys.executable, [sys.executable, __file__, *(one for one in sys.argv[1:] if one != "--small")])
    if options.bare:
        print(bare(torch.device(options.device), options.bare))
        return
    if options.alone:
        print(alone(options.device, prefetches=options.alone == "on"))
        return
    started_s, bench = time.perf_counter(), Bench(options.device, 1 if IS_SMALL else options.pairs)
    for name in options.only.split(","):
        PARTS[name](bench)
    is_cuda = options.device.startswith("cuda")
    name = torch.cuda.get_device_name(options.device) if is_cuda else "CPU"
    print(f"{name}, torch {torch.__version__}, {time.perf_counter() - started_s:.0f} s\n\n| | |\n|---|---|")
    for row in bench.rows:
        figures = ", ".join(f"{key} {value}" for key, value in row.items() if key != "what" and value is not None)
        print(f"| {row['what']} | {figures} |")
    print(json.dumps({"device": name, "torch": torch.__version__, "rows": bench.rows}))


if __name__ == "__main__":
    main()
