"""Held-out accuracy of the digits example on two unequal ranks, over several seeds; one JSON object at the end.

python benchmarks/accuracy.py              # five seeds, about two minutes
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

from programs import elche_run

EXAMPLE = Path(__file__).parents[1] / "examples" / "digits.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="how many seeds (default 5)")
    accuracies = []
    for seed in range(parser.parse_args().seeds):
        result, _ = elche_run(EXAMPLE, "--ranks", "2", "--slow", "1=2.3", "--seed", str(seed))
        accuracies.append(result["metrics"]["accuracy"])
        print(f"seed {seed}: {accuracies[-1]:.4f}", file=sys.stderr)
    print(json.dumps({"accuracies": accuracies, "mean": statistics.mean(accuracies), "min": min(accuracies)}))


if __name__ == "__main__":
    main()
