"""A device that comes and leaves each 10 s beside two steady ones: how much of the devices' time becomes training?

Two ranks train on one agent; another agent with one slot is started, gets SIGTERM after 10 s, and is started again as
soon as it has ended, for two minutes. Device time is counted from a rank's *ready* (its model and optimizer are built;
where others train already, the batch on trial is made, too) to the SIGTERM of its agent, or the end of training. The
work is what was trained in that time: from one batch to the next, or the run's median where that took half as long
again, since something else was done meanwhile. Prints a JSON object, with the accuracy.

    python benchmarks/come_and_go.py                      # three minutes
    python benchmarks/come_and_go.py --cycles 0           # two ranks in peace: the accuracy to compare with
"""

import argparse
import json
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

from fifty_kills import EXAMPLE
from programs import end, spread, start_agent, start_coordinator

from elche_client import Client

STAYS_S = 10.0
JOB = """
import os, time

NOTES = os.environ["COME_NOTES"]

def note(what):
    with open(f"{NOTES}/{os.getpid()}", "a") as notes:
        notes.write(f"{what} {time.monotonic()}\\n")

def slowly(model, batch):
    time.sleep(0.05)
    note("batch")
    return train_step(model, batch)

def built(model):
    optimizer = build_optimizer(model)
    note("ready")
    return optimizer

job = TrainingJob(**{**vars(job), "train_step": slowly, "optimizer": built})
"""
BATCH_S = 0.06
BATCHES_PER_EPOCH = 450


class Life:
    """One process of a rank, from its notes."""

    def __init__(self, path: Path) -> None:
        rows = [line.split() for line in path.read_text().splitlines()]
        self.ready_s = float(rows[0][1])
        self.batches_s = [float(at_s) for what, at_s in rows if what == "batch"]

    def worked_s(self, batch_s: float) -> float:
        gaps_s = [after - before for before, after in pairwise(self.batches_s)]
        return sum(
            (one if one < 1.5 * batch_s else batch_s for one in gaps_s), start=batch_s if self.batches_s else 0.0
        )

    def joined(self) -> None:
        """It was started while others trained: its first batch was on trial."""
        self.ready_s = self.batches_s.pop(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=12)
    options = parser.parse_args()
    seconds = max(options.cycles, 3) * (STAYS_S + 2)
    epochs = max(1, round(seconds * 2.8 / BATCH_S / BATCHES_PER_EPOCH))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        notes = folder / "notes"
        notes.mkdir()
        path = folder / "digits.py"
        path.write_text(EXAMPLE.read_text() + JOB)
        coordinator, address = start_coordinator(folder)
        steady = start_agent(folder, address, "cpu,cpu", name="steady")
        left_s = []
        try:
            handle = Client(address).submit(
                path, num_ranks=3, min_ranks=2, epochs=epochs, environment={"COME_NOTES": str(notes)},
                output_dir=folder / "out",
            )  # fmt: skip
            while len(list(notes.iterdir())) < 2:
                time.sleep(0.1)
            for _ in range(options.cycles):
                coming = start_agent(folder, address, "cpu", name="coming")
                before = set(notes.iterdir())
                while not (new := set(notes.iterdir()) - before):
                    time.sleep(0.02)
                time.sleep(STAYS_S)
                left_s.append((int(next(iter(new)).name), time.monotonic()))
                coming.terminate()
                coming.wait()
            result = handle.result()
        finally:
            end(steady, coordinator)
        lives = {int(one.name): Life(one) for one in notes.iterdir()}
        for pid, _ in left_s:
            lives[pid].joined()
        end_s = max(life.batches_s[-1] for life in lives.values() if life.batches_s)
        until_s = dict.fromkeys(lives, end_s) | dict(left_s)
        batch_s = median(after - before for life in lives.values() for before, after in pairwise(life.batches_s))
        device_s = sum(until_s[pid] - life.ready_s for pid, life in lives.items())
        worked_s = sum(life.worked_s(batch_s) for life in lives.values())
        gaps_s = [
            max(
                after - before
                for other, life in lives.items()
                if other not in dict(left_s)
                for before, after in pairwise(life.batches_s)
                if lives[pid].ready_s < after and before < lives[pid].batches_s[0] + 1
            )
            for pid, _ in left_s
            if lives[pid].batches_s
        ]
        joined_s = [lives[pid].batches_s[0] - lives[pid].ready_s for pid, _ in left_s if lives[pid].batches_s]
        figures = {
            "state": str(result.state),
            "cycles": len(left_s),
            "samples_exact": set(result.committed_samples) == {result.dataset_size},
            "device_s": round(device_s, 1),
            "work_to_device_time": round(worked_s / device_s, 3),
            "ready_to_first_batch": spread(joined_s),
            "longest_gap_of_the_others_meanwhile": spread(gaps_s),
            "median_batch_ms": round(batch_s * 1000, 1),
            "accuracy": result.metrics.get("accuracy"),
        }
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
