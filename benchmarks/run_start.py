"""What `elche run` of a small job costs beside its training: its stations by the clock, and the time of processors.

python benchmarks/run_start.py [--pairs 5] [--other /path/to/another/bin/elche] [-- --device cpu]

With another `elche` the runs of both alternate. In pairs, too, with the one import of torch that no run can do without.
"""

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

JOB = """
import torch
from elche_worker import TrainingJob

job = TrainingJob(
    model=lambda: torch.nn.Linear(8, 1),
    optimizer=lambda model: torch.optim.AdamW(model.parameters()),
    dataset=lambda: torch.utils.data.TensorDataset(torch.randn(1600, 8)),
    train_step=lambda model, batch: model(batch[0]).square().mean(),
    batch_size=16,
    epochs=1,
)
"""
PR_SET_CHILD_SUBREAPER = 36


def cost(words: list[str]) -> tuple[dict[str, float], float]:
    """When each station was reached, in seconds from the start, and the processor time of all processes."""
    before, started_s = os.times(), time.perf_counter()
    stations: dict[str, float] = {}
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            event = json.loads(line)
            name = event.get("state", event["event"]) if event["event"] == "view" else event["event"]
            stations.setdefault(name, time.perf_counter() - started_s)
    stations["end"] = time.perf_counter() - started_s
    with suppress(ChildProcessError):
        while True:
            os.wait()
    after = os.times()
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    return stations, cpu_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--other", help="the command of another installation")
    parser.add_argument("rest", nargs="*", default=["--device", "cpu"])
    options = parser.parse_args()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    commands = {"this": str(Path(sys.executable).with_name("elche"))}
    if options.other:
        commands["other"] = options.other
    found: dict[str, list[tuple[dict[str, float], float]]] = {name: [] for name in commands}
    imports = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.py"
        path.write_text(JOB, encoding="utf-8")
        for number in range(options.pairs):
            for name, command in commands.items():
                out = f"{folder}/{name}-{number}"
                found[name].append(cost([command, "run", str(path), "--out", out, "--events", *options.rest]))
            started_s = time.perf_counter()
            subprocess.run([sys.executable, "-c", "import torch"], check=True)
            imports.append(time.perf_counter() - started_s)
    for name, runs in found.items():
        median = {
            station: statistics.median(one[station] for one, _ in runs if station in one) for station in runs[0][0]
        }
        times = ", ".join(f"{station} {at_s:.2f}" for station, at_s in median.items())
        print(f"{name}: {times}; processors {statistics.median(cpu for _, cpu in runs):.2f} s")
    print(f"import torch alone: {statistics.median(imports):.2f} s; {options.pairs} pairs")


if __name__ == "__main__":
    main()
