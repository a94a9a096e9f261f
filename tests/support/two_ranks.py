"""Runs a script as two ranks of one world, as torchrun does, without the seconds in which torchrun starts PyTorch.

python two_ranks.py SCRIPT [ARGUMENT...]. When one rank fails the other is ended, and the exit code is the first that is
not 0.
"""

import os
import subprocess
import sys
import time

from elche.torchrun import free_port


def main(*script: str) -> int:
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, *script], env={**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        )
        for rank in range(2)
    ]
    while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
        time.sleep(0.02)
    for rank in ranks:
        rank.terminate()
        rank.wait()
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
