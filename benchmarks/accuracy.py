"""Held-out accuracy of the digits example on two unequal ranks, over several seeds; one JSON object at the end.

python benchmarks/accuracy.py              # five seeds, about two minutes
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def accuracy(seed: int, folder: str) -> float:
    """The final held-out accuracy of one run."""
    elche = Path(sys.executable).parent / "elche"
    command = [elche, "run", ROOT / "examples" / "digits.py", "--ranks", "2", "--slow", "1=2.3"]
    command += ["--seed", str(seed), "--out", f"{folder}/{seed}", "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    return float(json.loads(done.stdout)["metrics"]["accuracy"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="how many seeds (default 5)")
    accuracies = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(parser.parse_args().seeds):
            accuracies.append(accuracy(seed, folder))
            print(f"seed {seed}: {accuracies[-1]:.4f}", file=sys.stderr)
    print(json.dumps({"accuracies": accuracies, "mean": statistics.mean(accuracies), "min": min(accuracies)}))


if __name__ == "__main__":
    main()
