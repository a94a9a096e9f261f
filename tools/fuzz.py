"""Fuzzes for as long as it is told, with random seeds: `make fuzz MINUTES=60`. Stops at the first fault.

Each turn runs tests/fuzz with another seed and more examples than the gate, and takes some minutes; one that has begun
is finished. A failing example is printed, with the command that makes it again.
"""

import argparse
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = 500


def main() -> int:
    """Runs turns until the time is over; exit code 1 at the first that fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--examples", type=int, default=EXAMPLES, help="of each test in a turn")
    parser.add_argument("--seed", type=int, help="makes one turn again")
    parser.add_argument("--only", default="", help="part of the tests' names")
    chosen = parser.parse_args()
    end_s, turns = time.monotonic() + 60 * chosen.minutes, 0
    while not turns or (chosen.seed is None and time.monotonic() < end_s):
        seed = secrets.randbits(32) if chosen.seed is None else chosen.seed
        turns += 1
        print(f"turn {turns}: seed {seed}, {chosen.examples} examples of each test", flush=True)
        arguments = ["-n", "2", "-x", f"--hypothesis-seed={seed}", "--timeout", "3600", "-k", chosen.only, "tests/fuzz"]
        env = {**os.environ, "FUZZ_EXAMPLES": str(chosen.examples)}
        if subprocess.run([sys.executable, "-m", "pytest", *arguments], cwd=ROOT, env=env, check=False).returncode:
            again = f"tools/fuzz.py --seed {seed} --examples {chosen.examples}"
            print(f"a fault: its example is above; `python {again}` makes it again", file=sys.stderr)
            return 1
    print(f"{turns} turns, and no fault")
    return 0


if __name__ == "__main__":
    sys.exit(main())
