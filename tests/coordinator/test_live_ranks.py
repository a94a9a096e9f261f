"""The benchmark of many live ranks speaks the protocol as it is."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_ranks_that_are_played_train_and_make_rounds() -> None:
    """Fields of messages were renamed, and every run of it waited for ranks that had ended by an error."""
    command = [sys.executable, "live_ranks_cost.py", "3", "--seconds", "4"]
    done = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout.splitlines()[-1])
    assert row["rounds"] > 0
    assert row["work_fraction"] > 0.9
