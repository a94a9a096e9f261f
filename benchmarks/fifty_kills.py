"""Kills ranks, agents and the coordinator at random while a model trains: about 50 times in three minutes.

Four ranks on two agents train `examples/digits.py`, with batches that sleep, under `elche chaos`. Agents and
coordinator are started again a second after they were killed, as a service manager would do; ranks are started again
by elche. An agent takes its ranks with it, so a job may go back to its newest checkpoint, of which it makes one each
20 s by default. Prints a JSON object, with the verdict of the audit.

    python benchmarks/fifty_kills.py                # about five minutes
    python benchmarks/fifty_kills.py --kills 0      # in peace: the accuracy to compare with
    python benchmarks/fifty_kills.py --group-size 2 # three ranks, each two processes that share one model
"""

import argparse
import json
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from programs import end, start_agent, start_coordinator

import elche_audit
from elche_client import Client
from elche_client.commands.chaos import Chaos
from elche_client.events import Fault

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
WHAT = "rank,rank,rank,agent,coordinator"
"""What is killed, by how often."""


class Service:
    """A process that is started again after it was killed."""

    def __init__(
        self, start: "Callable[[], subprocess.Popen[Any]]", first: "subprocess.Popen[Any] | None" = None
    ) -> None:
        self.start = start
        self.process = first or start()


def keep_running(services: Sequence[Service], is_over: threading.Event) -> None:
    """Starts services again that have ended, until the benchmark is over."""
    while not is_over.wait(0.05):
        for service in services:
            if service.process.poll() is not None:
                time.sleep(DOWN_S)
                service.process = service.start()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=180.0, help="in which they fall (default: 180)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint-s", type=float, default=20.0, help="seconds between checkpoints (default: 20)")
    parser.add_argument("--what", default=WHAT, help=f"kinds of kills, by how often (default: {WHAT})")
    parser.add_argument("--epochs", type=int, help="default: as many as take about --seconds without kills")
    parser.add_argument("--group-size", type=int, default=1, help="processes of a rank (default: 1)")
    options = parser.parse_args()
    num_ranks = RANKS if options.group_size == 1 else 3
    devices = ",".join(["cpu"] * 2 * options.group_size)
    shared = {"group_size": options.group_size, "shard": "full_shard"} if options.group_size > 1 else {}
    is_over = threading.Event()
    epochs = options.epochs or max(1, round(options.seconds / (BATCHES_PER_EPOCH * BATCH_S / num_ranks)))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "digits.py"
        path.write_text(EXAMPLE.read_text() + JOB)
        first, address = start_coordinator(folder, "--allow-chaos")
        coordinator = Service(lambda: start_coordinator(folder, "--allow-chaos", listen=address)[0], first)
        agents = [Service(partial(start_agent, folder, address, devices)) for _ in range(2)]
        keeping = threading.Thread(target=keep_running, args=([*agents, coordinator], is_over))
        keeping.start()
        try:
            client = Client(address, reconnect_s=120)
            handle = client.submit(
                path, num_ranks=num_ranks, min_ranks=1, epochs=epochs, output_dir=folder / "out", audit=True,
                checkpoint_every_minutes=options.checkpoint_s / 60, **shared,
            )  # fmt: skip
            while sum(rank.num_batches > 0 for rank in client.get(handle.id).ranks) < num_ranks:
                time.sleep(0.2)
            began_s = time.monotonic()
            mtbf_s = options.seconds / options.kills if options.kills else 1e9
            chaos = Chaos(
                client,
                handle.id,
                mtbf_s=mtbf_s,
                faults=[Fault(one) for one in options.what.split(",")],
                seed=options.seed,
            )
            if options.kills:
                chaos.run(options.seconds)
            result = handle.result()
        finally:
            is_over.set()
            keeping.join()
            end(*(service.process for service in (*agents, coordinator)))
        verdict = elche_audit.judge(folder / "out")
        figures = {
            **chaos.report(),
            "state": str(result.state),
            "error": result.error,
            "trained_s": round(time.monotonic() - began_s, 1),
            "epochs": len(result.committed_samples),
            "committed_samples": list(result.committed_samples),
            "dataset_size": result.dataset_size,
            "samples_exact": set(result.committed_samples) == {result.dataset_size},
            "audit": elche_audit.lines(verdict)[-1],
            "went_back_to": sorted({part.reason for part in verdict.thrown if "went back" in part.reason}),
            "accuracy": result.metrics.get("accuracy"),
        }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
