"""Kills ranks, agents and the coordinator at random while a model trains: 50 times in three minutes.

Four ranks on two agents train `examples/digits.py`, with batches that sleep. What is killed, with SIGKILL, is started
again after a second, as a service manager would do; ranks are started again by elche. An agent takes its ranks with it,
so a job may go back to its newest checkpoint, of which it makes one each 20 s by default. Prints a JSON object.

    python benchmarks/fifty_kills.py                # about five minutes
    python benchmarks/fifty_kills.py --kills 0      # in peace: the accuracy to compare with
    python benchmarks/fifty_kills.py --group-size 2 # three ranks, each two processes that share one model
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

from elche_client import Client
from elche_client.events import Event, JobResult, MembershipReport

EXAMPLE = Path(__file__).parents[1] / "examples" / "digits.py"
JOB = """
import time

def slowly(model, batch):
    time.sleep(0.05)
    return train_step(model, batch)

job = TrainingJob(**{**vars(job), "train_step": slowly})
"""
BATCH_S = 0.06
BATCHES_PER_EPOCH = 450
RANKS = 4
DOWN_S = 1.0
KINDS = ("rank", "rank", "rank", "agent", "coordinator")
"""What is killed, by how often."""


class Service:
    """A process that is started again after it was killed."""

    def __init__(self, name: str, folder: Path, *arguments: str) -> None:
        self._name, self._folder, self._arguments = name, folder, arguments
        self.start()

    def start(self) -> None:
        with (self._folder / f"{self._name}.log").open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *self._arguments], stdout=subprocess.PIPE, stderr=log, text=True
            )

    def restart(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()
        time.sleep(DOWN_S)
        self.start()


def rank_processes() -> list[int]:
    """The processes of ranks, by their titles."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and (folder / "cmdline").read_bytes().startswith(b"elche rank"):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=180.0, help="in which they fall (default: 180)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint-s", type=float, default=20.0, help="seconds between checkpoints (default: 20)")
    parser.add_argument("--group-size", type=int, default=1, help="processes of a rank (default: 1)")
    options = parser.parse_args()
    num_ranks = RANKS if options.group_size == 1 else 3
    devices = ",".join(["cpu"] * 2 * options.group_size)
    shared = {"group_size": options.group_size, "shard": "full_shard"} if options.group_size > 1 else {}
    dice, counts = random.Random(options.seed), Counter[str]()
    epochs = max(1, round(options.seconds / (BATCHES_PER_EPOCH * BATCH_S / num_ranks)))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "digits.py"
        path.write_text(EXAMPLE.read_text() + JOB)
        data = ["--http", "127.0.0.1:0", "--data", str(folder / "data")]
        coordinator = Service("coordinator", folder, "elche_coordinator", "--listen", "127.0.0.1:0", *data)
        assert coordinator.process.stdout is not None
        address = coordinator.process.stdout.readline().split()[-1]
        coordinator._arguments = ("elche_coordinator", "--listen", address, *data)
        work = ["--coordinator", address, "--devices", devices, "--work-dir", str(folder / "work")]
        agents = [Service(f"agent-{index}", folder, "elche_worker.agent", *work) for index in range(2)]
        try:
            client = Client(address, reconnect_s=120)
            handle = client.submit(
                path, num_ranks=num_ranks, min_ranks=1, epochs=epochs, output_dir=folder / "out",
                checkpoint_every_minutes=options.checkpoint_s / 60, **shared,
            )  # fmt: skip
            events: list[Event] = []
            watching = threading.Thread(target=lambda: events.extend(handle.watch()))
            watching.start()
            while len(rank_processes()) < num_ranks * options.group_size:
                time.sleep(0.2)
            began_s = time.monotonic()
            for number in range(options.kills):
                time.sleep(
                    max(0.0, began_s + options.seconds * (number + dice.random()) / options.kills - time.monotonic())
                )
                kind = dice.choice(KINDS)
                counts[kind] += 1
                if kind == "coordinator":
                    coordinator.restart()
                elif kind == "agent":
                    dice.choice(agents).restart()
                elif ranks := rank_processes():
                    os.kill(dice.choice(ranks), signal.SIGKILL)
            fire_s = time.monotonic() - began_s
            watching.join()
            result = events[-1]
            assert isinstance(result, JobResult)
        finally:
            for service in (*agents, coordinator):
                service.process.kill()
                service.process.wait()
        lost = [event for event in events if isinstance(event, MembershipReport)]
        size = result.dataset_size
        figures = {
            "state": str(result.state),
            "error": result.error,
            "kills": dict(counts),
            "fire_s": round(fire_s, 1),
            "trained_s": round(time.monotonic() - began_s, 1),
            "epochs": len(result.committed_samples),
            "samples_exact": set(result.committed_samples) == {size},
            "went_back_to_a_checkpoint": sum("goes back to" in event.text for event in lost),
            "accuracy": result.metrics.get("accuracy"),
        }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
