"""Runs a script as several ranks of one world, each with a launcher of its own: when one dies the others go on.

python own_launchers.py NUM_RANKS SCRIPT. The exit code is the first that is neither 0 nor that of a killed process.
Each rank has a device of its own if there are simulated GPUs.
"""

import os
import subprocess
import sys

from elche.torchrun import free_port

VARIABLE = "TEST_GPUS"


def main(num_ranks: int, script: str) -> int:
    world = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen([sys.executable, script], env={**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": local})
        for rank, local in enumerate(map(str, range(num_ranks)) if VARIABLE in os.environ else ["0"] * num_ranks)
    ]
    codes = [rank.wait() for rank in ranks]
    return next((code for code in codes if code > 0), 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2]))
