"""Kills ranks of loops of the user's own, and their coordinator, at random: how often is each sample in the model?

Four processes, each started by itself, train `counting_loop.py`, whose model is how often each sample was trained.
SIGKILL at random moments hits up to three of them, and the coordinator, which is started again after a second. Loops
follow each other until there were enough kills. Prints a JSON object.

    python benchmarks/loop_kills.py               # 50 kills, about three minutes
    python benchmarks/loop_kills.py --seed 1 --kills 12 --el-che 4
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from programs import end, free_port, spread, start_coordinator

from elche_client import Client

LOOP = Path(__file__).with_name("counting_loop.py")
RANKS = 4
EPOCHS = 10
SAMPLES = 240
SLEEP_S = 0.02
SPACING_S = 3.0
"""Mean time between kills."""
DOWN_S = 1.0


def live(folder: Path, dice: random.Random, el_che: int, num_kills: int) -> dict[str, Any]:
    """One loop, under fire until one rank is left; what was killed, and what the others said at their end."""
    coordinator, address = start_coordinator(folder)
    shared = {
        "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1",
        "ELCHE_COORDINATOR": address, "LOOP_NOTES": str(folder), "LOOP_EPOCHS": str(EPOCHS),
        "LOOP_SLEEP_S": str(SLEEP_S), "LOOP_EL_CHE": str(el_che),
        "LOOP_SAMPLES": str(SAMPLES * max(1, 3 * el_che)),
    }  # fmt: skip
    ranks = []
    for rank in range(RANKS):
        with (folder / f"log-{rank}").open("w") as log:
            own = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": "0"}
            ranks.append(subprocess.Popen([sys.executable, str(LOOP)], stdout=log, stderr=log, env=own))
    while len(list(folder.glob("steps-*"))) < RANKS:
        time.sleep(0.05)
    killed = Counter[str]()
    victims = dice.sample(range(RANKS), RANKS - 1)
    try:
        while killed.total() < num_kills:
            time.sleep(SPACING_S * dice.uniform(0.2, 1.8))
            if all(rank.poll() is not None for rank in ranks):
                break
            if victims and dice.random() < 0.7:
                victim = ranks[victims.pop()]
                if victim.poll() is None:
                    victim.send_signal(signal.SIGKILL)
                    killed["rank"] += 1
            else:
                end(coordinator)
                killed["coordinator"] += 1
                time.sleep(DOWN_S)
                coordinator, _ = start_coordinator(folder, listen=address)
        codes = [rank.wait(120) for rank in ranks]
        (job,) = Client(address).jobs()
        state = str(job.state)
    finally:
        end(*ranks, coordinator)
    texts = [(folder / f"log-{rank}").read_text() for rank in range(RANKS)]
    told = [json.loads(line) for text in texts for line in text.splitlines() if line.startswith("{")]
    is_exact = bool(told) and all(one["counts"] == [float(EPOCHS)] for one in told)
    if not is_exact or state != "succeeded" or any(code > 0 for code in codes):
        print("\n".join([*texts, str(killed), (folder / "coordinator.log").read_text()]), file=sys.stderr)
    return {"killed": killed, "state": state, "is_exact": is_exact, "gaps_s": [one["gap_s"] for one in told]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--el-che", type=int, default=0, help="most batches per step (default: 0, shares of a batch)")
    options = parser.parse_args()
    dice = random.Random(options.seed)
    lives: list[dict[str, Any]] = []
    killed = Counter[str]()
    while killed.total() < options.kills:
        with tempfile.TemporaryDirectory() as name:
            lives.append(live(Path(name), dice, options.el_che, options.kills - killed.total()))
        killed += lives[-1]["killed"]
        print(lives[-1], file=sys.stderr, flush=True)
    gaps = [gap_s for one in lives for gap_s in one["gaps_s"]]
    figures = {
        "loops": len(lives),
        "kills": dict(killed),
        "states": dict(Counter(one["state"] for one in lives)),
        "samples_exact": all(one["is_exact"] for one in lives),
        "longest_gap_of_survivors": spread(gaps),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
